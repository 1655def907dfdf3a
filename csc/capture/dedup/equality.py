"""Layers that do the same: which of a layer's attributes its forward looks at, and whether another layer has the same.

Terms
  structure   classes of the modules below a layer, names, shapes and dtypes of their parameters and buffers
  read        (path below the layer, name) of the attributes that a forward looked at, tensors and modules aside
  pairs       each thing of one layer, and the thing that another layer has in its place

    structure(layer) -> a hashable value
    attributes_read(layer) -> context with the set that grows while the layer runs
    Counterparts(layer, other).same(read) -> bool

Equal values are not the same thing: a forward may look itself up in a table that both layers share. Whoever takes one
layer for another asks the pairs, too, whether anything shared leads to either of them (csc.capture.dedup.identity).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import CellType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, Enum)
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})  # compared once, by `structure`
CONTAINERS = (list, tuple, deque, set, frozenset)
VALUES = (tuple, frozenset)  # of which nobody asks whether it is this very one
HOOKS = {  # of torch's modules, by numbers of their own, and what says by these numbers how each is called
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
OF_HOOKS = frozenset(name for names in HOOKS.values() for name in names)
EMPTY = object()  # what a cell holds before its variable has a value
Read = set[tuple[str, str]]


def structure(layer: nn.Module) -> Any:
    """Equal for layers that differ in attributes and in values of tensors at most."""
    tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    places: dict[int, int] = {}
    return (
        tuple((path, type(module), module.training) for path, module in layer.named_modules(remove_duplicate=False)),
        tuple(
            (name, type(t), tuple(t.shape), t.dtype, t.requires_grad, places.setdefault(id(t), place))
            for place, (name, t) in enumerate(tensors)
        ),
    )


@contextmanager
def attributes_read(layer: nn.Module) -> Iterator[Read]:
    """The attributes of the layer and the modules below it that are looked at inside of the context.

    Read through the class, since what a forward does may depend on anything that it can reach from `self`.
    """
    paths = {id(module): path for path, module in layer.named_modules()}
    read: Read = set()

    def watched(original: Any) -> Any:
        def __getattribute__(self: Any, name: str) -> Any:
            path = paths.get(id(self))
            if path is not None and name not in STRUCTURE:
                read.add((path, name))  # of one that it has not, too: another layer may have it, in place of its class'
            return original(self, name)

        return __getattribute__

    classes = {type(module) for module in layer.modules()}
    own = {cls: cls.__dict__.get("__getattribute__") for cls in classes}
    try:
        for cls, original in {cls: cls.__getattribute__ for cls in classes}.items():
            cls.__getattribute__ = watched(original)  # type: ignore[method-assign]
        yield read
    finally:
        for cls, before in own.items():
            if before is not None:
                cls.__getattribute__ = before  # type: ignore[method-assign]
            elif "__getattribute__" in cls.__dict__:
                del cls.__getattribute__


class Counterparts:
    """What two layers have in each other's place, one to one, and what they share. Grows with each comparison."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        self._first, self._second = (dict(layer.named_modules(remove_duplicate=False)) for layer in (one, other))
        self._others = {id(module): self._second[path] for path, module in self._first.items()}
        self._ones = {id(self._second[path]): module for path, module in self._first.items()}
        self._kept: list[Any] = []  # so that no other thing takes the identity of one that was paired
        self.shared: dict[int, Any] = {}

    def same(self, read: Read) -> bool:
        """Whether two layers of one structure have equal values for all of these attributes."""
        for path, name in read:
            mine, its = self._first[path].__dict__, self._second[path].__dict__
            if name in OF_HOOKS:
                continue
            if (name in mine) != (name in its):
                return False
            if name in HOOKS and name in mine:
                if not self.equal(_hooks(mine, name), _hooks(its, name)):
                    return False
            elif name in mine and not self.equal(mine[name], its[name]):
                return False
        return True

    @property
    def identities(self) -> set[int]:
        """Of what is either layer's own."""
        return {*self._others, *self._ones}

    def equal(self, one: Any, other: Any) -> bool:
        """Whether `other` is for the second layer what `one` is for the first."""
        if id(one) in self._others or id(other) in self._ones:
            return self._others.get(id(one)) is other and self._ones.get(id(other)) is one
        if one is other:
            self.shared[id(one)] = one
            return True
        if type(one) is not type(other):
            return False
        if type(one) in PLAIN:
            return repr(one) == repr(other)  # 0.0 is not -0.0
        if type(one) not in VALUES:  # things that hold themselves are equal if all else is
            self._others[id(one)], self._ones[id(other)] = other, one
            self._kept.append((one, other))
        return self._hold_equal(one, other)

    def _hold_equal(self, one: Any, other: Any) -> bool:
        """Whether two things of one type hold equal things."""
        if isinstance(one, CellType):
            return self.equal(_contents(one), _contents(other))
        if isinstance(one, FunctionType):
            return (
                one.__code__ is other.__code__
                and one.__globals__ is other.__globals__
                and self._all_equal(one.__closure__ or (), other.__closure__ or ())
                and self.equal((one.__defaults__, one.__kwdefaults__), (other.__defaults__, other.__kwdefaults__))
                and self._attributes_equal(one, other)
            )
        if isinstance(one, MethodType):
            return self.equal(one.__func__, other.__func__) and self.equal(one.__self__, other.__self__)
        if isinstance(one, functools.partial):
            return self.equal(
                (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)
            ) and self._attributes_equal(one, other)
        if isinstance(one, (int, float, complex, str, bytes)) and not isinstance(one, Enum):
            plain: Any = next(cls for cls in type(one).__mro__ if cls in PLAIN)
            return plain.__repr__(one) == plain.__repr__(other) and self._attributes_equal(one, other)
        if isinstance(one, CONTAINERS):
            kind: Any = next(cls for cls in type(one).__mro__ if cls in CONTAINERS)
            return self._all_equal(kind.__iter__(one), kind.__iter__(other)) and self._attributes_equal(one, other)
        if isinstance(one, dict):
            return (
                self._all_equal(dict.__iter__(one), dict.__iter__(other))
                and self._all_equal(dict.values(one), dict.values(other))
                and self.equal(getattr(one, "default_factory", None), getattr(other, "default_factory", None))
                and self._attributes_equal(one, other)
            )
        if isinstance(one, MappingProxyType):
            return self._all_equal(one.items(), other.items())
        return False

    def _all_equal(self, ones: Iterable[Any], others: Iterable[Any]) -> bool:
        """In their order, in which a forward may go through them."""
        ones, others = list(ones), list(others)
        self._kept.append((ones, others))
        return len(ones) == len(others) and all(map(self.equal, ones, others))

    def _attributes_equal(self, one: Any, other: Any) -> bool:
        """Of things whose class is a subclass of Python's, and of functions."""
        slots = [name for cls in type(one).__mro__ for name in _slots(cls)]
        mine, its = (
            {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots if hasattr(thing, name)}}
            for thing in (one, other)
        )
        return mine.keys() == its.keys() and all(self.equal(mine[name], its[name]) for name in mine)


def _slots(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    return tuple(
        f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in ((names,) if isinstance(names, str) else names)
        if name not in ("__dict__", "__weakref__")
    )


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def _hooks(attributes: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """The hooks of a module, in their order, each with how it is called."""
    ways = [attributes.get(one, {}) for one in HOOKS[name]]
    return tuple((hook, *(number in way for way in ways)) for number, hook in attributes[name].items())
