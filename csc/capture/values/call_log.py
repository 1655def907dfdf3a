"""Writes down what a model's code calls, so that two runs of it can be compared (see csc.ir.capture_guards).

    recording = Recording({"input_ids": tensor, "model.embed.weight": tensor})      where tensors come from
    recording.add(func, args, kwargs, result)                                       of every call, in order
    recording.needed(loss) -> calls                                                 those that the loss depends on

A trace and its replay with another batch make the same program if they make the same calls: each with the same plain
values, on tensors that come from the same places, with gradients and autocast on or off alike. What is called for
something that the loss does not depend on may differ. Inside vmap and the like tensors cannot be told apart; there
plain values are compared alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import resolve_name

from csc import devices
from csc.ir.capture_guards import UNKNOWN, Call
from csc.torch_private.traces import in_functorch_transform, outside_tracing, pytree

# Other operators that write (x += y) come under the name of a method (add_).
WRITERS = frozenset({"__setitem__", "__iand__", "__ilshift__", "__ior__", "__ipow__", "__irshift__", "__ixor__"})
CONTIGUOUS = "torch.Tensor.contiguous"
PLAIN = (
    bool, float, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class Recording:
    """Of one run."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        """named: tensors that are there before the run: batch entries, parameters and buffers."""
        self._origin: dict[int, tuple[Any, ...]] = {id(tensor): ("of", name) for name, tensor in named.items()}
        self._calls: list[tuple[str, tuple[Any, ...], bool]] = []  # name, leaves, whether the loss needs it anyway
        self._alive: list[torch.Tensor] = list(named.values())
        self._others = 0

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call, and what it returned. One that gives no tensor decides at most what is called next."""
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = resolve_name(func) or str(func)
        within, written = in_functorch_transform(), writes(name)
        if not made and not written and not within:
            return
        if name == CONTIGUOUS and not within:  # of one sample it may be the tensor itself, of several a copy: the same
            self._origin[id(made[0])] = self._leaf(args[0], within)
            self._alive.append(made[0])
            return
        leaves = (_modes(), *(self._leaf(leaf, within) for leaf in _leaves(args, kwargs)))
        if not within:
            for place, tensor in enumerate(made):
                if id(tensor) not in self._origin or written:
                    self._origin[id(tensor)] = ("call", len(self._calls), place)
                    self._alive.append(tensor)
        self._calls.append((name, leaves, written or within))

    def needed(self, loss: torch.Tensor) -> tuple[Call, ...]:
        """The calls that a tensor depends on, numbered among themselves, sizes as expressions in symbols; at the end
        which of their results it is. One that no call has given (an autograd function of the model's) is unknown.
        """
        last = self._origin.get(id(loss), (UNKNOWN, 0))
        wanted = {last[1]} if last[0] == "call" else set()
        for number in reversed(range(len(self._calls))):
            _, leaves, anyway = self._calls[number]
            if anyway or number in wanted:
                wanted.add(number)
                wanted |= {leaf[1] for leaf in leaves if isinstance(leaf, tuple) and leaf[0] == "call"}
        place = {number: index for index, number in enumerate(sorted(wanted))}
        named = [
            (name, *(_token(leaf, place) for leaf in leaves)) for name, leaves, _ in map(self._calls.__getitem__, place)
        ]
        return (*named, ("loss", _token(last, place)))

    def _leaf(self, leaf: Any, within: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if _is_size(leaf) else repr(leaf) if isinstance(leaf, PLAIN) else _described(leaf)
        if within:
            return ("tensor",)
        if id(leaf) not in self._origin:
            self._origin[id(leaf)] = self._found(leaf)
            self._alive.append(leaf)
        return self._origin[id(leaf)]

    def _found(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """A tensor that no recorded call has given: a constant, or what vmap made. A value that gradients may flow
        through came from somewhere else: nobody knows from what.
        """
        if type(tensor) is torch.Tensor:
            return _constant(tensor)
        self._others += 1
        kind = UNKNOWN if tensor.is_floating_point() or tensor.is_complex() else "other"
        return (kind, self._others)


def _modes() -> str:
    """What else decides what a call does."""
    autocast = [device for device in devices.TYPES if torch.is_autocast_enabled(device)]
    return " ".join([*([] if torch.is_grad_enabled() else ["no_grad"]), *autocast])


def _constant(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor with values, which a module or a function has beside its parameters and buffers."""
    with outside_tracing():
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return ("constant", str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha256(values).hexdigest())


def _leaves(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Of the arguments, with the length of a sequence before what is in it, and the name of a keyword."""
    for one in args:
        yield from _inside(one)
    for name, one in kwargs.items():
        yield name
        yield from _inside(one)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield len(value)
        for one in value:
            yield from _inside(one)
    elif isinstance(value, Mapping):
        yield from _leaves((), value)
    elif isinstance(value, slice):
        yield "slice"
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool)


def _described(leaf: Any) -> str:
    """Of what has no text of its own: functions and other objects, the same in both runs if they are one."""
    return f"{type(leaf).__qualname__} {getattr(leaf, '__qualname__', id(leaf))}"


def writes(name: str) -> bool:
    """Whether a torch function of this name writes to what it is called with."""
    own = name.rpartition(".")[2]
    return own in WRITERS or (own.endswith("_") and not own.endswith("__"))


def _token(leaf: Any, place: Mapping[int, int]) -> Any:
    if isinstance(leaf, torch.SymInt):
        return leaf.node.expr
    if isinstance(leaf, tuple) and leaf[0] == "call":
        return ("call", place[leaf[1]], leaf[2])
    return leaf
