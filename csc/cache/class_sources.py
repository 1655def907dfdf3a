"""What classes show of themselves: where their source is, and whether their objects hold more than Python can show."""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator
from enum import EnumMeta
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from csc.cache.origins import is_own, is_source

CACHED = type(functools.lru_cache(len))


def path_of(kind: type) -> str | None:
    """The source file of a class; None for one of C or of none."""
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return path if path and is_source(path) else None


def is_own_class(kind: type) -> bool:
    """True for a class of the user's files."""
    return (path := path_of(kind)) is not None and is_own(path)


def is_own_function(function: FunctionType) -> bool:
    """True for a function of the user's files."""
    file = function.__code__.co_filename
    return is_source(file) and is_own(file)


def is_put_there(value: Any) -> bool:
    """True for what only the user can have put among the functions of an installed module: a callable object, a class
    or a partial function of his own.
    """
    if isinstance(value, type):
        return is_own_class(value)
    if isinstance(value, (functools.partial, functools.partialmethod, MethodType)):
        function = getattr(value, "func", None) or getattr(value, "__func__", None)
        return isinstance(function, FunctionType) and is_own_function(function)
    return is_own_class(type(value))


def has_source(kind: type) -> bool:
    """True for a class that Python code defines: what its objects hold is in their attributes."""
    return path_of(kind) is not None and not _of_c(kind)


def _of_c(kind: type) -> bool:
    """A class of an extension may name a module of Python code as its own. It shows in methods and attributes that are
    not Python's, in objects that are larger than attributes make them, or in a class of classes of its own.
    """
    if type(kind) is not type and not isinstance(kind, (ABCMeta, EnumMeta)) and not has_source(type(kind)):
        return True
    for name, member in vars(kind).items():
        own = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType)
        if isinstance(member, own) and member.__objclass__ is kind and name not in ("__dict__", "__weakref__"):
            return True
        if isinstance(member, BuiltinFunctionType) and member.__self__ is kind:
            return True
    words = len(slots(kind)) + 2  # and those of __dict__ and __weakref__
    return kind.__base__ is not None and kind.__basicsize__ > kind.__base__.__basicsize__ + 8 * words


def slots(kind: type) -> tuple[str, ...]:
    """Names of a class's own slots, as its objects have them."""
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(_mangled(kind, name) for name in names if name not in ("__weakref__", "__dict__"))


def _mangled(kind: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if private else name


def functions_of(member: Any) -> Iterator[FunctionType]:
    """The functions that a member of a class or module is or wraps."""
    if isinstance(member, property):
        members = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        members = [member.func]
    else:
        members = [getattr(member, "__func__", member)]
    for one in members:
        while isinstance(one, FunctionType) or type(one) is CACHED:
            if isinstance(one, FunctionType):
                yield one
            one = getattr(one, "__wrapped__", None)


@functools.cache
def torch_folder() -> str:
    """Where torch's own files lie."""
    return str(PurePath(inspect.getfile(torch)).parent)


def of_transformers(kind: type) -> bool:
    """True for a class of transformers, or one made from it."""
    return any(one.__module__.startswith("transformers.") for one in kind.__mro__)
