"""Layers that do the same: which of a layer's attributes its forward looks at, and whether another layer has the same.

Terms
  structure   classes of the modules below a layer, names, shapes and dtypes of their parameters and buffers
  read        (path below the layer, name) of the attributes that a forward looked at, tensors and modules aside

    structure(layer) -> a hashable value
    attributes_read(layer) -> context with the set that grows while the layer runs
    same(one, other, read) -> bool
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, Enum)
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})  # compared once, by `structure`
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


def same(one: nn.Module, other: nn.Module, read: Read) -> bool:
    """Whether two layers of one structure have equal values for all of these attributes."""
    first, second = (dict(layer.named_modules(remove_duplicate=False)) for layer in (one, other))
    pairs = {id(module): second[path] for path, module in first.items()}
    for path, name in read:
        mine, its = first[path].__dict__, second[path].__dict__
        if (name in mine) != (name in its) or (name in mine and not equal(mine[name], its[name], pairs)):
            return False
    return True


def equal(one: Any, other: Any, pairs: Mapping[int, nn.Module]) -> bool:
    """Whether two values do the same for two layers. pairs: modules of the second layer by the first's `id`."""
    if one is other:
        return True
    if id(one) in pairs:
        return pairs[id(one)] is other
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b, pairs) for a, b in zip(one, other))
    if isinstance(one, (set, frozenset)):
        return all(isinstance(item, PLAIN) for item in one) and one == other
    if isinstance(one, Mapping):
        if all(isinstance(key, int) for key in one) and all(callable(value) for value in one.values()):
            return equal(list(one.values()), list(other.values()), pairs)  # hooks, by numbers of their own
        return list(one) == list(other) and all(equal(one[key], other[key], pairs) for key in one)
    if isinstance(one, FunctionType):
        cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
        return (
            one.__code__ is other.__code__
            and equal(cells[0], cells[1], pairs)
            and equal((one.__defaults__, one.__kwdefaults__), (other.__defaults__, other.__kwdefaults__), pairs)
        )
    if isinstance(one, MethodType):
        return one.__func__ is other.__func__ and equal(one.__self__, other.__self__, pairs)
    if isinstance(one, functools.partial):
        return equal((one.func, one.args, one.keywords), (other.func, other.args, other.keywords), pairs)
    return False
