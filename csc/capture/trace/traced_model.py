"""The model as what a trace or a replay runs: a function from batch tensors to its loss."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from csc.capture.batch import is_metadata
from csc.capture.dedup.layers import Layers, Repeats
from csc.capture.reached import Reached
from csc.capture.trace.autograd import AutogradQueries, autograd_calls, own_gradients
from csc.capture.trace.chance import own_chance
from csc.capture.trace.mutations import Changes, Slot, Slots, written_beside
from csc.capture.values import hoist as hosting
from csc.capture.values.batch_alone import Alone, Recording
from csc.capture.values.hoist import Function, Hoisted, HostCall, unused
from csc.capture.values.interpreter import Run, Watching
from csc.capture.values.row_index import PREFIX, RowIndices
from csc.capture.watches import FileState, files_read
from csc.errors import InputError, calling_line
from csc.ir.capture_guards import Expression
from csc.torch_private.symbolic_sizes import GuardOnDataDependentSymNode

# --- Parameters that a module holds beside the ones it has registered ------------------------------------------------
#
# `nn.LSTM` computes with a list of its parameters, and a user's module may have one. A tracer puts what it traces in
# the place of registered parameters alone: the list would be read as constants, and nothing in it trained.


class Held:
    """Places in the lists and dicts that modules of a model have as attributes. Whoever calls `put` brings them back
    as they were (csc.capture.trace.mutations).
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._places: list[tuple[list[Any] | dict[Any, Any], Any, str]] = []
        for module in model.modules():
            for attribute, held in vars(module).items():
                if not attribute.startswith("_parameters") and type(held) in (list, dict):
                    for place, parameter in enumerate(held) if isinstance(held, list) else held.items():
                        if isinstance(parameter, nn.Parameter) and id(parameter) in names:
                            self._places.append((held, place, names[id(parameter)]))

    def put(self, named: Mapping[str, torch.Tensor]) -> None:
        """Put what is called by a parameter's name wherever that parameter is held."""
        for held, place, name in self._places:
            if name in named:  # not hidden from the trace
                held[place] = named[name]


# --- Tensors that a model holds and a trace would take for others ----------------------------------------------------
#
# A trace puts plain tensors in place of parameters and buffers. So a class of tensors with code of its own
# (__torch_function__, __torch_dispatch__) would compute as torch.Tensor does, in silence.


HANDLERS = ("__torch_function__", "__torch_dispatch__")
PLAIN = (torch.Tensor, nn.Parameter)


def refuse_tensors(model: nn.Module) -> None:
    """Raises InputError for a parameter or buffer without values yet, with code of its own, or made for inference."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                "it has no size yet: its module is a lazy one, which makes it at its first batch",
                name,
                "run model(**batch) once before you compile",
            )
        if tensor.is_floating_point() and _computes(type(tensor)):
            raise InputError(
                f"it is a {type(tensor).__name__}, a class of tensors that computes by code of its own, which csc "
                "would not run",
                name,
                "hold a plain tensor, and compute in the module's forward, or in a parametrization "
                "(torch.nn.utils.parametrize)",
            )
        if tensor.is_inference():
            raise InputError(
                "it was made in torch.inference_mode, and autograd cannot use it",
                name,
                "put a clone in its place (made outside of inference_mode)",
            )


def _computes(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors has code for what torch does with them."""
    return any(all(_code(kind, name) != _code(plain, name) for plain in PLAIN) for name in HANDLERS)


def _code(kind: type, name: str) -> object:
    """What is behind a class method."""
    handler = getattr(kind, name)
    return getattr(handler, "__func__", handler)


# --- What a trace leaves in tables that the model's code keeps beside the model --------------------------------------
#
# The tables are globals, closures and caches of functions. A trace leaves tensors without data where eager PyTorch
# would find them.


DEEPEST = 3  # of containers within one that a trace has made


@contextmanager
def no_fakes_left(before: Reached) -> Iterator[None]:
    """Members of what the model reaches that are, or hold, tensors of the trace are as they were before it, or gone;
    caches of functions that it has added to (functools.lru_cache) are empty.
    """
    known = [(cache, cache.cache_info().misses) for cache in before.caches]
    try:
        yield
    finally:
        before.put_back(_is_of_trace)
        for cache, misses in known:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _is_of_trace(value: Any, deep: int = DEEPEST) -> bool:
    """A tensor of a trace, or a container with one; containers may hold themselves."""
    if isinstance(value, torch.Tensor):
        return type(value).__module__.startswith("torch._subclasses")
    if not deep or not isinstance(value, (list, tuple, dict)):
        return False
    return any(_is_of_trace(item, deep - 1) for item in (dict.values(value) if isinstance(value, dict) else value))


# --- The model as what a trace or a replay runs: a function from batch tensors to its loss ---------------------------


NAMED = 4  # of the tensors that a model returned
WITH_LOSS = (
    "return the loss from forward, alone or under the name 'loss' (F.cross_entropy(logits.flatten(0, -2), "
    "labels.flatten()), say), or compile a module around the model whose forward does"
)


class LossOnly(nn.Module):
    """The model as a function from batch tensors to its loss. `extra`: plain keyword arguments, baked in.

    host: functions of the model that run on the host; what they return comes with the batch, beside the model's own
    arguments. layers: those of which equal ones are traced once. rows: whether what moves rows runs on their numbers
    (csc.capture.values.row_index). recording: what the last run called; autograd: what it asked for; loss: what it
    returned; made: numbers of rows, of a replay.
    """

    recording: Recording
    loss: torch.Tensor
    made: Mapping[str, torch.Tensor]
    changes: Changes  # what the last run wrote to the model
    written_beside: frozenset[Slot]  # and beside it
    files: Mapping[str, FileState]  # that it read

    def __init__(
        self,
        model: nn.Module,
        extra: Mapping[str, Any],
        host: HoistedCalls,
        values: Mapping[str, torch.Tensor],
        layers: Layers,
        rows: bool = False,
        replayed: bool = False,
        decides: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.host = host
        self._extra, self._example, self._decides = dict(extra), values, decides
        self.watching = Watching(metadata(values, host), decides, self._hoisted)
        self._own_buffers = dict(model.named_buffers(remove_duplicate=False))  # as they are, not as a trace has them
        self._batch: Mapping[str, torch.Tensor] = {}
        self._repeats = Repeats(layers, self.watching.knows, self.watching.real)
        self._with_rows, self._replayed = rows, replayed
        self.autograd = AutogradQueries()
        self._held = Held(model)

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Without hooks: those that the user gave all modules are for his own."""
        return self.forward(batch)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        host = self.host
        made_names, refused = host.entries(self.model, self._example)
        refused_calls = [call for call, _ in refused]
        calls = [call for call in host.calls if call.is_for(self._example) and call not in refused_calls]
        parameters = self._named()
        recording = Recording({**parameters, **{f"batch {name}": tensor for name, tensor in batch.items()}})
        rows: list[RowIndices] = []

        def by_number(run: Run) -> RowIndices:
            rows.append(RowIndices(parameters.values(), None if self._replayed else batch, run))
            return rows[0]

        ask = (lambda sources: None) if self._replayed else partial(self._asked, batch)
        self._batch = batch
        buffers = {path: buffer for path, buffer in self._own_buffers.items() if path in parameters}
        alone = Alone(batch, {id(parameters[path]): (path, buffer) for path, buffer in buffers.items()}, self._example)
        with (
            own_gradients() as with_hooks,
            autograd_calls(self.autograd),
            self.watching.entries(
                batch,
                ask,
                recording,
                alone,
                by_number if self._with_rows else None,
                {id(tensor): name for name, tensor in parameters.items()},
            ),
            own_chance(),
            self._repeats.patched(),
            hosting.hosted(self.model, calls, host.asking, self._example, batch, self._name_of, self._found),
        ):
            entries = {
                name: value for name, value in batch.items() if name not in made_names and not name.startswith(PREFIX)
            }
            self._held.put(parameters)
            slots, beside = Slots(self.model), Reached(self.model, slots=False)
            with no_fakes_left(beside), files_read() as self.files:
                loss = loss_of(self.model(**entries, **self._extra), self.model, entries.keys() | self._extra.keys())
                filled = {slot: (was, was) for slot, (was, _) in slots.written().items()}  # some are put back
            kept = with_hooks(loss)
            self.changes = {**filled, **slots.written()}
            self.written_beside = frozenset() if self._replayed else written_beside(beside)
        self.recording, self.loss, self.made = recording, loss, rows[0].made if rows else {}
        return kept

    def _named(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, as they are in this run."""
        named = (self.model.named_parameters, self.model.named_buffers)
        return {path: tensor for listing in named for path, tensor in listing(remove_duplicate=False)}

    def _asked(self, batch: Mapping[str, torch.Tensor], sources: frozenset[str]) -> None:
        """The model asks for values that only the batch has: can a function around it be run before?"""
        if not sources:
            return
        around = hosting.around(self.model, sys._getframe(1), type(self).forward.__code__)
        for one in around:
            if one.function in self.host.asking:  # none of its calls could
                self._give_up(one.function)
        open_ = [call for call in around if call.function not in self.host.tried]
        for open_call in reversed(open_):
            call = hosting.call_of(self.model, open_call, self._name_of) if open_call.given is not None else None
            if open_call.given is None or call in self.host.calls:
                asking = (*self.host.asking, *(open_call.function for open_call in open_))
                raise HostFunctionFound(replace(self.host, asking=asking))
            if call is not None:
                self._found(call)
                self._give_up(open_call.function)

    def _give_up(self, function: Function) -> None:
        if function not in self.host.tried:
            self.host = replace(self.host, tried=(*self.host.tried, function))

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        """The batch entry that a traced tensor is; where questions are answered, also what can be made of it before the
        step.
        """
        name = next((name for name, value in self._batch.items() if value is tensor), None)
        if name is not None or not self._decides:
            return name
        expression = self.watching.alone.expression(torch.clone, (tensor,), {})
        return f"{self._prefix(expression, 'given')}_0" if expression is not None else None

    def _hoisted(self, expression: Expression, name: str) -> Any:
        """What stands for tensors of the batch alone, in a trace; None in a replay that has none."""
        known = [call for call in self.host.calls if isinstance(call, Hoisted) and call.expression == expression]
        if known:
            return known[0].stand_in(self._example, self._batch)
        if self._replayed:
            return None
        return self._prefix(expression, name)  # ends the trace

    def _prefix(self, expression: Expression, name: str) -> str:
        """Of the entries of an expression. The trace has to start again with it, if it is new."""
        known = [call for call in self.host.calls if isinstance(call, Hoisted) and call.expression == expression]
        if known:
            return known[0].prefix
        made = Hoisted(expression, unused(name, self.host.calls), calling_line())
        raise HostFunctionFound(replace(self.host, calls=(*self.host.calls, made)))

    def refuse_changing(self) -> None:
        """InputError if a decision was taken by a buffer that the forward itself writes."""
        written = {".".join(filter(None, slot)) for slot in self.changes}
        for name in sorted(self.watching.alone.constants_read & written) if self.watching.alone.decisions else ():
            raise InputError(
                f"the model takes a Python decision that depends on {name!r}, which its forward changes", name,
                "take it from the batch alone: pass what changes as a plain Python value in the batch",
            )  # fmt: skip

    def _found(self, call: HostCall) -> None:
        """Start again with the call on the host, if it can run there."""
        if call.gives_tensors(self.model, self._example):
            calls = (*self.host.calls, call.named(self.host.calls))
            raise HostFunctionFound(replace(self.host, calls=calls))


@dataclass(frozen=True)
class HoistedCalls:
    """What runs on the host: calls; asking: functions of which the next trace shows how they are called, as one that is
    being run may have changed its arguments; tried: those that cannot. Each start of a trace has more of one of them
    than the one before.
    """

    calls: tuple[HostCall | Hoisted, ...] = ()
    asking: tuple[Function, ...] = ()
    tried: tuple[Function, ...] = ()

    def entries(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[tuple[HostCall | Hoisted, InputError]]]:
        """(the tensors that the calls make of a microbatch, named; the calls that refuse it)."""
        entries: dict[str, torch.Tensor] = {}
        refused = []
        for call in self.calls:
            if call.is_for({**batch, **entries}):
                try:
                    entries |= call.entries(model, {**batch, **entries})
                except InputError as error:
                    refused.append((call, error))
        return entries, refused

    def made(self, names: Iterable[str]) -> set[str]:
        """Those of the names that entries made by calls have."""
        prefixes = {call.prefix for call in self.calls}
        return {name for name in names if name.rpartition("_")[0] in prefixes and name.rpartition("_")[2].isdecimal()}


class HostFunctionFound(Exception):
    """Ends a trace: it has to start again with `host`."""

    def __init__(self, host: HoistedCalls) -> None:
        super().__init__(str(host))
        self.host = host


def loss_of(result: Any, model: nn.Module | None = None, given: Collection[str] = ()) -> torch.Tensor:
    """The loss in what a model returned: `.loss`, `["loss"]`, the first of a tuple, or the tensor itself.

    Raises InputError if there is none or it is no floating-point scalar. model, given: what returned it, and the
    entries that it was given, for that sentence.
    """
    if isinstance(result, torch.Tensor):
        loss: Any = result
    elif isinstance(result, Mapping):
        loss = result.get("loss")
    elif hasattr(result, "loss"):
        loss = result.loss
    elif isinstance(result, (tuple, list)) and result:
        loss = result[0]
    else:
        loss = None
    name = type(model).__name__ if model is not None else "the model"
    takes_labels = model is not None and "labels" in inspect.signature(model.forward).parameters
    remedy = "give the batch labels, which its forward takes" if takes_labels and "labels" not in given else WITH_LOSS
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"{name} returned {_described(result)}: a {type(result).__name__} without a loss", "model output", remedy
        )
    if loss.dim() != 0 or not loss.dtype.is_floating_point:
        raise InputError(
            f"{name} returned {_described(result)}, and a loss is one floating-point number", "model output",
            f"if these are losses of samples or tokens return loss.mean(); if they are logits {remedy}",
        )  # fmt: skip
    return loss


def _described(result: Any) -> str:
    """The tensors that a model returned, with their sizes."""
    if isinstance(result, torch.Tensor):
        return f"a tensor {_sizes(result)} of {str(result.dtype).removeprefix('torch.')}"
    named: Iterable[tuple[Any, Any]] = result.items() if isinstance(result, Mapping) else ()
    if isinstance(result, (tuple, list)):
        named = enumerate(result)
    tensors = [f"{name} {_sizes(tensor)}" for name, tensor in named if isinstance(tensor, torch.Tensor)]
    return ", ".join(tensors[:NAMED]) or "no tensor"


def _sizes(tensor: torch.Tensor) -> list[int | str]:
    """Of the example, also in a trace, where they are symbols."""
    sizes: list[int | str] = []
    for size in tensor.shape:
        try:
            sizes.append(int(size))
        except GuardOnDataDependentSymNode:  # of which only the values of a batch tell
            sizes.append("?")
    return sizes


def metadata(values: Mapping[str, torch.Tensor], host: HoistedCalls) -> dict[str, torch.Tensor]:
    """The entries whose values are known in a trace; what was made of tokens is as unknown as they are."""
    known = {name: tensor for name, tensor in values.items() if is_metadata(tensor, values)}
    for call in host.calls:
        if isinstance(call, Hoisted) and not known.keys() >= set(call.expression.entries):
            known = {name: tensor for name, tensor in known.items() if not name.startswith(f"{call.prefix}_")}
    return known


def sizes_among(tensors: Mapping[str, torch.Tensor], given: Collection[str], host: HoistedCalls) -> set[str]:
    """Those of the tensors of a microbatch that describe others, and those made of such alone: whole numbers which are
    often the same from step to step. given: the entries that nothing of the model has made.
    """
    names = {name for name in given if is_metadata(tensors[name], tensors)}
    for call in host.calls:
        if names.issuperset(entry for _, entry in call.arguments):
            made_names = replace(host, calls=(call,)).made(tensors.keys() - given)
            names |= {name for name in made_names if not tensors[name].is_floating_point()}
    return names
