"""Functions that are run for every batch before the step, outside the graph."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count
from types import CodeType, FrameType, FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from csc.errors import InputError
from csc.ir.capture_guards import Expression, QueryStep
from csc.torch_private.traces import ParameterReads, modules_called_untraced, outside_tracing, pytree

# --- Tensors that a model makes of its batch alone, computed before the step instead, outside the graph --------------


STATISTICS = frozenset({"unique", "_unique2", "bincount", "histc"})
TOTALS = frozenset({"max", "min", "amax", "amin", "sum", "mean", "prod", "median", "mode", "std", "var"})  # without dim


@dataclass(frozen=True)
class Hoisted:
    """Tensors that a model makes of its batch alone, as many as its values say (`(ids == 7).nonzero()`), or that it
    gives a function which runs on the host. prefix: of the names of the entries; line: of the model's code.
    """

    expression: Expression
    prefix: str
    line: str = field(default="", compare=False)

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """As those of a HostCall."""
        return tuple((entry, entry) for entry in self.expression.entries)

    @property
    def is_statistic(self) -> bool:
        """Whether it looks at all samples at once (`ids.unique()`): what it gives for a batch is not what it gives for
        the batch's microbatches, one behind the other, as `nonzero` does.
        """
        return any(_is_statistic(step) for step in self.expression.steps)

    def is_for(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the entries that it is made of."""
        return all(entry in batch for entry in self.expression.entries)

    def entries(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors, named, for a real microbatch; none if they cannot be made of it: then no program wants them."""
        try:
            answer = self.expression.of(batch)
        except Exception:  # the model's own calls: this microbatch may lack what they read
            return {}
        return {f"{self.prefix}_{place}": leaf for place, leaf in enumerate(pytree.tree_leaves(answer))}

    def stand_in(self, example: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> Any:
        """What it gives, its tensors taken from the traced batch."""
        leaves, structure = pytree.tree_flatten(self.expression.of(example))
        return pytree.tree_unflatten([batch[f"{self.prefix}_{i}"] for i in range(len(leaves))], structure)


def _is_statistic(step: QueryStep) -> bool:
    name = step.function.rpartition(".")[2]
    _, *operands = step.args
    return name in STATISTICS or (name in TOTALS and len(operands) == 1 and step.kwargs == ("dict",))


def unused(name: str, earlier: Sequence[Hoisted | HostCall]) -> str:
    """A prefix after a name that none of these has."""
    taken = {call.prefix for call in earlier}
    return next(
        candidate for candidate in chain([name], (f"{name}_call{n}" for n in count(2))) if candidate not in taken
    )


# --- Functions that are run for every batch before the step, outside the graph ---------------------------------------
#
# Models take Python decisions from tokens (Qwen-VL counts positions image by image) and from sizes of images (which
# patches share a window, where each image begins). The function that does so is found while tracing: the outermost one
# around the decision whose tensors are batch entries as they are. It is then run on the real batch, and what it
# returns enters the graph as further batch entries, so one graph serves every batch.


NameOf = Callable[[torch.Tensor], str | None]  # the batch entry that a traced tensor is, as it is
Given = Mapping[str, Any]  # the arguments of a call by the names of its parameters
SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
CHANGES = ("STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF")  # instructions that do so with a local name
NOT_THE_MODELS = ("torch", "csc")  # packages whose functions take part in every trace


@dataclass(frozen=True)
class Function:
    """A method of the module at path `owner`; or, of_module False, a function that code of the Python module `owner`
    calls by this name.
    """

    owner: str
    name: str
    of_module: bool = True

    def namespace(self, model: nn.Module) -> dict[str, Any]:
        """Where a replacement goes that its callers find."""
        return model.get_submodule(self.owner).__dict__ if self.of_module else sys.modules[self.owner].__dict__

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """The function, bound; a method as its class has it."""
        if not self.of_module:
            return self.namespace(model)[self.name]
        module = model.get_submodule(self.owner)
        return getattr(type(module), self.name).__get__(module)


@dataclass(frozen=True)
class HostCall:
    """A function, and what it is called with: (parameter, batch entry), and (parameter, value) where that is no tensor
    (plain values, configurations of the model). prefix: of the names of the entries that it makes.
    """

    function: Function
    arguments: tuple[tuple[str, str], ...]
    plain: tuple[tuple[str, Any], ...] = field(compare=False)
    prefix: str = field(default="", compare=False)

    @functools.cached_property
    def _has_containers(self) -> bool:
        """Whether a plain value is one; every step asks."""
        return any(not pytree.tree_is_leaf(value) for _, value in self.plain)

    @property
    def name(self) -> str:
        """`model.get_rope_index`."""
        return ".".join(filter(None, (self.function.owner, self.function.name)))

    def named(self, earlier: Sequence[HostCall | Hoisted]) -> HostCall:
        """The call with a prefix that none of the earlier ones has."""
        return replace(self, prefix=unused(self.function.name, earlier))

    def same(self, other: HostCall | None) -> bool:
        """Whether both are calls with the same entries and values."""
        return other is not None and self == other and _alike(self.plain, other.plain)

    def is_for(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the entries that it is called with: one without images may lack them."""
        return all(entry in batch for _, entry in self.arguments)

    def gives_tensors(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
        """Whether it runs on a batch without the model's parameters and returns tensors, and nothing that would have to
        be traced for its value.
        """
        reads = ParameterReads()
        try:
            leaves = pytree.tree_leaves(self._results(model, batch, reads))
        except Exception:  # a function of the model, which may want more than the batch
            return False
        return not reads.any and all(leaf is None or type(leaf) is torch.Tensor for leaf in leaves)

    def _results(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], watch: AbstractContextManager[Any] | None = None
    ) -> Any:
        arguments = {parameter: batch[entry] for parameter, entry in self.arguments}
        plain = dict(self.plain)
        if self._has_containers:  # which it may change
            plain = pytree.tree_map(lambda leaf: leaf, plain)
        with outside_tracing(), modules_called_untraced(), watch or nullcontext():
            return self.function.of(model)(**arguments, **plain)

    def entries(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors it returns, named after it, for a real microbatch. InputError if it raises."""
        try:
            results = self._results(model, batch)
        except Exception as error:
            raise InputError(
                f"{self.name} refuses the batch: {error}",
                ", ".join(entry for _, entry in self.arguments),
                "check these entries: placeholders in the text, image sizes and masks have to fit each other",
            ) from error
        return {
            f"{self.prefix}_{place}": leaf
            for place, leaf in enumerate(pytree.tree_leaves(results))
            if isinstance(leaf, torch.Tensor)
        }

    def stand_in(
        self, model: nn.Module, example: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
    ) -> Callable[[], Any]:
        """Gives, while tracing, what it returns for `example`, its tensors taken from the traced batch."""
        leaves, structure = pytree.tree_flatten(self._results(model, example))

        def results() -> Any:
            return pytree.tree_unflatten(
                [batch[f"{self.prefix}_{i}"] if isinstance(leaf, torch.Tensor) else leaf
                 for i, leaf in enumerate(leaves)], structure,
            )  # fmt: skip

        return results


def _alike(one: Sequence[tuple[str, Any]], other: Sequence[tuple[str, Any]]) -> bool:
    """Whether two calls have the same plain values."""
    if [name for name, _ in one] != [name for name, _ in other]:
        return False
    return all(a is b or bool(a == b) for (_, a), (_, b) in zip(one, other))


def _bound(function: Function, real: Callable[..., Any], given: Given, name_of: NameOf) -> HostCall | None:
    """A call with these arguments; None if a tensor among them is no batch entry or holds pixels or sound, or a value
    belongs to the trace. Defaults are left out.
    """
    arguments: list[tuple[str, str]] = []
    plain: list[tuple[str, Any]] = []
    for name, parameter in inspect.signature(real).parameters.items():
        value = given.get(name, parameter.default)
        if value is parameter.default or (parameter.kind in SEVERAL and not value):
            continue
        if isinstance(value, torch.Tensor):
            entry = None if _is_signal(value) else name_of(value)
            if entry is None:
                return None
            arguments.append((name, entry))
        elif not _plain(value) or parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return None
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            plain += pytree.tree_map(lambda leaf: leaf, value).items()
        else:
            plain.append((name, pytree.tree_map(lambda leaf: leaf, value)))
    return HostCall(function, tuple(arguments), tuple(plain)) if arguments else None


def _is_signal(tensor: torch.Tensor) -> bool:
    """Pixels, sound and features, which are for the graph; a list of numbers (seconds per grid) may be metadata."""
    return tensor.is_floating_point() and tensor.dim() > 1


def _plain(value: Any) -> bool:
    traced = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(leaf, traced) for leaf in pytree.tree_leaves(value))


@dataclass(frozen=True)
class Around:
    """A function that is being run. given: what it was called with; None if its code may have changed that since."""

    function: Function
    given: Given | None


def around(model: nn.Module, frame: FrameType | None, caller: CodeType | None = None) -> list[Around]:
    """Functions of the model's code that `frame` was called through, below the model's own forward, innermost first;
    those that were given pixels, sound or features left out, as far as their local names still show it. caller: the
    code that calls the model, above which frames are of no concern.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    stack: list[FrameType] = []
    while frame is not None and frame.f_code is not caller:
        stack.append(frame)
        if frame.f_locals.get("self") is model and frame.f_code.co_name == "forward":
            break
        frame = frame.f_back
    calls = []
    for depth, called in enumerate(stack):
        if str(called.f_globals.get("__name__")).partition(".")[0] in NOT_THE_MODELS:
            continue
        function = _method(called, paths) or _global(called, stack[depth + 1 :])
        names = _parameters(called.f_code)
        arguments = {name: called.f_locals.get(name) for name in names if name != "self"}
        if function is not None and not any(_is_signal(leaf) for leaf in _tensors(arguments)):
            calls.append(Around(function, None if _changed(called, names) else arguments))
    return calls


def named(batch: Mapping[str, torch.Tensor]) -> NameOf:
    """By the traced batch entries themselves."""
    entries = {id(tensor): name for name, tensor in batch.items()}
    return lambda tensor: entries.get(id(tensor))


def call_of(model: nn.Module, around: Around, name_of: NameOf) -> HostCall | None:
    """The call that is under way, if its tensors are entries of the traced batch as they are. around: with `given`."""
    assert around.given is not None
    return _bound(around.function, around.function.of(model), around.given, name_of)


def _parameters(code: CodeType) -> tuple[str, ...]:
    """Names of what a function takes, `*args` and `**kwargs` too."""
    packed = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + packed]


def _changed(frame: FrameType, names: Sequence[str]) -> bool:
    """Whether the code that a frame runs may have given other values to these names by now: it does so before the place
    where the frame is, or in a loop around both.
    """
    code = list(dis.get_instructions(frame.f_code))
    stores = [
        instruction.offset
        for instruction in code
        if instruction.opname.startswith(CHANGES)
        and not set(names).isdisjoint(
            instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        )
    ]
    back = [(instruction.argval, instruction.offset) for instruction in code if "JUMP_BACKWARD" in instruction.opname]
    here = frame.f_lasti
    return any(store <= here or any(start <= here and store <= end for start, end in back) for store in stores)


def _method(frame: FrameType, paths: Mapping[int, str]) -> Function | None:
    module, name = frame.f_locals.get("self"), frame.f_code.co_name
    if not isinstance(module, nn.Module) or id(module) not in paths or name == "forward":
        return None
    return Function(paths[id(module)], name) if _is_code_of(getattr(type(module), name, None), frame.f_code) else None


def _global(frame: FrameType, callers: Sequence[FrameType]) -> Function | None:
    """A function found in the module of the nearest caller that knows it: there may be decorators in between."""
    name = frame.f_code.co_name
    for caller in callers:
        if _is_code_of(caller.f_globals.get(name), frame.f_code):
            module = caller.f_globals.get("__name__")
            known = sys.modules.get(str(module))
            return Function(str(module), name, False) if known and known.__dict__ is caller.f_globals else None
    return None


def _is_code_of(function: Any, code: CodeType) -> bool:
    unwrapped = inspect.unwrap(function) if callable(function) else None
    return isinstance(unwrapped, FunctionType) and unwrapped.__code__ is code


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def hosted(
    model: nn.Module,
    calls: Sequence[HostCall | Hoisted],
    asking: Sequence[Function],
    example: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    name_of: NameOf,
    found: Callable[[HostCall], None],
) -> Iterator[None]:
    """The model with these calls replaced by what they return for `example`, as entries of the traced `batch`. Other
    calls of the functions `asking`, if they could run on the host, are told to `found`, with the arguments as they
    come: what a frame shows of a function's arguments may have been replaced in its body.
    """
    results = [(call, call.stand_in(model, example, batch)) for call in calls if isinstance(call, HostCall)]
    with ExitStack() as stack:
        for function in dict.fromkeys([*(call.function for call, _ in results), *asking]):
            replacement = _replacement(function, function.of(model), results, function in asking, name_of, found)
            stack.enter_context(patch.dict(function.namespace(model), {function.name: replacement}))
        yield


def _replacement(
    function: Function,
    real: Callable[..., Any],
    results: Sequence[tuple[HostCall, Callable[[], Any]]],
    asking: bool,
    name_of: NameOf,
    found: Callable[[HostCall], None],
) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)  # also for `around`, which asks whose code a frame runs
    def replacement(*args: Any, **kwargs: Any) -> Any:
        call = _bound(function, real, signature.bind(*args, **kwargs).arguments, name_of)
        for known, result in results:
            if known.same(call):
                return result()
        if asking and call is not None:
            found(call)
        return real(*args, **kwargs)

    return replacement
