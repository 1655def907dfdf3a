"""What a model's forward writes to the model itself, and whether it also computes with it.

A compiled step does not write it. That is right for what a model remembers for others (how often it was called, what it
returned last); a model that computes with what it wrote a step before trains something else from step to step, which no
program does. To tell one from the other the model is run twice, and once as it would be much later; a model without
weights is traced again instead.

Terms: a *slot* is (path of a module, name of an attribute), of a buffer (path of its module + "._buffers", name).
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from csc.capture.batch import only_records
from csc.capture.model_guards import BESIDE
from csc.capture.reached import Reached
from csc.capture.watches import ABSENT
from csc.errors import CscError, InputError
from csc.ir import graph as g
from csc.ir.program import Program

log = logging.getLogger("csc")

BUFFERS = "._buffers"
CONTAINERS = (list, dict, set, OrderedDict)  # the last one of hooks
INTERNAL = ("_parameters", "_buffers", "_modules", "training")
FURTHER = 1009  # steps on, for what counts
SAME = 1e-6  # the relative difference of two losses that are the same

Slot = tuple[str, str]
Changes = Mapping[Slot, tuple[Any, Any]]
Captured = tuple[Program, Changes]


class Slots:
    """Attributes and buffers of a model's modules as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = {slot: (value, _content(value)) for slot, value in _slots(model)}

    def written(self) -> Changes:
        """Those that have another value now, with both."""
        changes = {}
        for slot, value in _slots(self._model):
            before, content = self._values.get(slot, (None, None))
            tensors = isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor)
            if value is before if tensors else _equal(value, content):
                continue
            changes[slot] = (content, _content(value))
        return changes


def written_beside(before: Reached) -> frozenset[Slot]:
    """What is no slot and has another value now: globals, objects, closures."""
    return frozenset((BESIDE, text) for text in before.changed())


def refuse_if_computed_with(
    model: nn.Module,
    run: Callable[..., float],
    changes: Changes,
    beside: frozenset[Slot],
    program: Program,
    again: Callable[[], Captured],
) -> None:
    """InputError if what the model's forward wrote decides what it computes in a later step.

    run: the loss of one forward, with random numbers that are the same each time, or (`other=True`) of another batch of
    the same sizes, with other weights; program: the capture; changes: what was written in its trace; beside: globals,
    objects and closures that were, which nobody puts back; again: captures the model as it then is, for models that
    cannot be run.
    """
    _refuse_if_counted(model, run, changes, beside, program, again)
    if changes:
        _refuse_made_of_a_batch(model, run, changes)


def _refuse_if_counted(
    model: nn.Module,
    run: Callable[..., float],
    changes: Changes,
    beside: frozenset[Slot],
    program: Program,
    again: Callable[[], Captured],
) -> None:
    """InputError if the same batch has another loss in the next step, or much later."""
    first = {slot: both for slot, both in changes.items() if not (_remembered(*both) or only_records(slot[1], *both))}
    if not first and not beside:
        return
    try:
        losses, counted = _losses(model, run)
    except Exception as reason:  # the user's model
        log.info("whether the model computes with what it changes is looked up in its graph: %s", reason)
        then = {s: _next(model, s, both[1]) for s, both in first.items()}
        second = _traced_with(model, then, first or beside, program, again)
        counted = {s: _later(first[s][1], after) for s, (_, after) in second.items() if _counts(first.get(s), after)}
        if counted:
            _traced_with(model, counted, counted, program, again)
    else:
        if any(abs(loss - losses[0]) > SAME * abs(losses[0]) for loss in losses):
            raise _computed_with(model, first or beside)


def _refuse_made_of_a_batch(model: nn.Module, run: Callable[..., float], changes: Changes) -> None:
    """InputError if what the forward makes of one batch, or of weights, is computed with in the next step."""
    before = dict.fromkeys(changes, ABSENT) | {slot: value for slot, value in _slots(model) if slot in changes}
    try:
        losses = []
        for batches in ((False, True), (True,)):  # what is kept beside the model is then of the batch
            with torch.no_grad(), attributes_kept(model), put(model, before):
                losses.append([run(other=other) for other in batches][-1])
    except Exception as reason:  # the user's model
        log.info("whether the model computes with what it made of an earlier batch is not known: %s", reason)
        return
    if abs(losses[0] - losses[1]) > SAME * abs(losses[0]):
        names = ", ".join(sorted(f"{path.removesuffix(BUFFERS)}.{name}".lstrip(".") for path, name in changes))
        raise InputError(
            f"the model's forward makes {names} of its first batch or of the weights of then, and computes with "
            "it in all later steps", type(model).__name__,
            "run model(**batch) once before you compile: csc takes what is there then; or compute it from each batch",
        )  # fmt: skip


def _losses(model: nn.Module, run: Callable[[], float]) -> tuple[list[float], dict[Slot, Any]]:
    """Of two steps, and of one much later; what counted from the first to the second, and where it is then."""
    with torch.no_grad(), attributes_kept(model):
        slots = Slots(model)
        losses = [run()]
        first, slots = slots.written(), Slots(model)
        losses.append(run())
        second = slots.written()
        counted = {s: _later(first[s][1], after) for s, (_, after) in second.items() if _counts(first.get(s), after)}
        with put(model, counted):
            losses.append(run())
    return losses, counted


def _counts(before: tuple[Any, Any] | None, after: Any) -> bool:
    return before is not None and _is_number(before[1]) and _is_number(after)


def _remembered(before: Any, after: Any) -> bool:
    """A tensor where there was none: what read it before it was written would have failed in the first step."""
    return isinstance(after, torch.Tensor) and before is None


def _traced_with(
    model: nn.Module, values: Mapping[Slot, Any], slots: Iterable[Slot], program: Program, again: Callable[[], Captured]
) -> Changes:
    """What another trace writes, with these values to start from. InputError that tells what changed if it is another
    program.
    """
    try:
        with put(model, values):
            other, changes = again()
        same = g.canonical(other.graph) == g.canonical(program.graph) and _same_constants(other, program)
    except CscError:
        same = False
    if not same:
        raise _computed_with(model, slots)
    return changes


def _computed_with(model: nn.Module, slots: Iterable[Slot]) -> InputError:
    paths = (("" if path == BESIDE else path.removesuffix(BUFFERS), name) for path, name in slots)
    names = ", ".join(sorted(f"{path}.{name}".lstrip(".") for path, name in paths))
    return InputError(
        f"the model's forward changes {names} and computes with it, so that each step is another one",
        type(model).__name__,
        "pass what changes from step to step as an entry of the batch, a tensor; or keep the module out of the trace "
        "with csc.opaque(module)",
    )


def _same_constants(one: Program, other: Program) -> bool:
    """Whether graphs that are alike read the same constants."""
    names = [[node.meta["role"][1] for node in g.placeholders(p.graph) if _is_constant(node)] for p in (one, other)]
    return len(names[0]) == len(names[1]) and all(
        torch.equal(one.constants[left_name], other.constants[its]) for left_name, its in zip(*names)
    )


def _is_constant(node: Any) -> bool:
    return node.meta["role"][0] == "constant" and bool(node.users)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _later(one: Any, following: Any) -> Any:
    """What counts on, many steps later."""
    return one + FURTHER * (following - one)


def _next(model: nn.Module, slot: Slot, after: Any) -> Any:
    """What the next step finds; of a tensor, which has no values in a trace, another one."""
    path, name = slot
    if not isinstance(after, torch.Tensor):
        return after
    module = model.get_submodule(path.removesuffix(BUFFERS))
    tensor: Any = module._buffers[name] if path.endswith(BUFFERS) else getattr(module, name)
    return tensor.detach().logical_not() if tensor.dtype is torch.bool else tensor.detach() + 1


@contextmanager
def put(model: nn.Module, values: Mapping[Slot, Any]) -> Iterator[None]:
    """The model with these values; afterwards as it was."""
    modules = dict(model.named_modules())
    before = []
    for (path, name), value in values.items():
        if path.endswith(BUFFERS):
            holder = modules[path.removesuffix(BUFFERS)]._buffers
        else:
            holder = vars(modules[path])
        before.append((holder, name, name in holder, holder.get(name)))
        if value is ABSENT:
            holder.pop(name, None)
        else:
            holder[name] = value
    try:
        yield
    finally:
        for holder, name, there, value in reversed(before):
            if there:
                holder[name] = value
            else:
                holder.pop(name, None)


def _slots(model: nn.Module) -> Iterator[tuple[Slot, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in INTERNAL:
                yield (path, name), value
        for name, value in module._buffers.items():
            yield (f"{path}{BUFFERS}", name), value


def _content(value: Any) -> Any:
    """A container as it is now; else the value itself."""
    return type(value)(value) if type(value) in CONTAINERS else value


def _equal(one: Any, other: Any) -> bool:
    """Tensors, also in containers, are equal if they are one: comparing values would be part of the trace."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (torch.Tensor, weakref.ref)):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    try:
        return bool(one == other)
    except Exception:  # comparing is the user's code
        return False


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Models remember things in attributes (Qwen-VL its position offsets); what a trace wrote must not stay behind."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, copy(value)) for _, attributes in before for value in attributes.values() if type(value) in CONTAINERS
    ]
    try:
        yield
    finally:
        for attributes, earlier in before:
            for name in [name for name, value in attributes.items() if earlier.get(name) is not value]:
                del attributes[name]
            attributes.update(earlier)
        for held, content in contents:
            if len(held) != len(content) or any(item is not other for item, other in zip(held, content)):
                held.clear()
                held.extend(content) if isinstance(held, list) else held.update(content)
            elif isinstance(held, dict):
                held.update(content)
