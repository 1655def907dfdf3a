"""What a model holds besides its modules' own slots: objects in objects, classes, functions and the globals they read.

Terms
  watch    something that holds values (a list, an object with __slots__, a class, a namespace by the names that
           functions read of it) with the values that it had, compared by identity, then as values
  own      of the model or of its libraries: not torch's, not the standard library's
  reached  the functions whose name some reached function looks up, from `forward` on

The walk takes nothing twice, and goes DEEPEST values deep and MOST far.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import logging
import queue
import sys
import threading
import weakref
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Set, ValuesView
from configparser import RawConfigParser
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.managers import BaseProxy
from multiprocessing.sharedctypes import SynchronizedBase
from operator import is_
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from csc.capture.code_names import CALLED_BY_PYTHON, globals_read, imported, names_read, texts
from csc.capture.dedup.equality import LIBRARIES, PLAIN
from csc.capture.watches import (
    ABSENT,
    PARTS,
    Codes,
    Names,
    Read,
    TensorValues,
    Together,
    Watch,
    attributes,
    elements,
    environment,
    identical,
    is_of_members,
    items,
    looked_up,
    names_of,
    put_members_back,
    values,
    without,
)

log = logging.getLogger("csc")

DEEPEST, MOST = 12, 20_000
CACHED = type(functools.lru_cache(len))
FIRST = frozenset({"forward", "__call__", *CALLED_BY_PYTHON})
MEMORY: tuple[type[Any], ...] = (bytearray, array, memoryview, *ctypes.Array.__bases__)  # the last: all of ctypes
BEHIND = (MappingProxyType, KeysView, ValuesView, ItemsView)  # which a mapping stands
OF_DATA = (SimpleNamespace, Namespace, ChainMap, UserDict, UserList)  # Python's own, with attributes of their own
LOCK = type(threading.Lock())
UNSEEN = (queue.Queue, queue.SimpleQueue, io.IOBase, BaseProxy)  # whose state nothing here can compare


@dataclass(frozen=True)
class _Asked:
    """What an object is asked for, which it may hold under another name, or anew each time."""

    read: Read


class Reached:
    """roots: (path, value) to start from; classes: those of the modules. known: identities of containers that others
    watch, whose values are walked through all the same. ignored: what `changed` may not tell, since the model's
    forward writes it itself. elsewhere: identities of what others watch altogether: the model's modules, parameters.
    spaces: (path, namespace, names that are read of it).
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        classes: Iterable[type],
        known: Set[int] = frozenset(),
        ignored: Set[str] = frozenset(),
        elsewhere: Set[int] = frozenset(),
        spaces: Iterable[tuple[str, dict[str, Any], list[str]]] = (),
    ) -> None:
        self._known = known
        self.caches: list[Any] = []  # of functools.lru_cache
        self._watches: list[Watch] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._arrays: list[tuple[str, Callable[[], bytes], bytes]] = []
        self._attributes: list[tuple[str, Any, dict[str, Any]]] = []
        self._kinds: list[tuple[type, dict[str, Any]]] = []
        self._functions: list[tuple[str, FunctionType]] = []
        self._cells: list[tuple[str, CellType]] = []
        self._spaces = {id(space): (path, space, names) for path, space, names in spaces}
        self._seen: dict[Any, Any] = {}  # by identity; the things themselves, so that no other takes theirs
        self._reached: set[str] = set()
        self._later: dict[str, list[tuple[str, Any, int]]] = {}  # members of classes, by a name that none has looked up
        self._waiting: deque[tuple[str, Any, int]] = deque((path, value, 0) for path, value in roots)
        for kind in dict.fromkeys(classes):
            self._walk_classes(kind, 0)
            self._walk_forward_of_torch(kind)
        self._reach(FIRST)
        while self._waiting and len(self._seen) < MOST:
            path, value, depth = self._waiting.popleft()
            if isinstance(value, type):
                self._walk_classes(value, depth)
            elif id(value) in elsewhere or isinstance(value, (*PLAIN, ModuleType)):
                continue
            elif self._is_new(id(value), value):
                self._walk(path, value, depth)
        self._waiting.clear()
        for path, space, names in self._spaces.values():
            read = functools.partial(looked_up, space, tuple(names))
            self._watches.append((path, tuple(names), read, read()))
        methods = tuple(name for name in sorted(self._reached) if hasattr(torch.Tensor, name))
        read = functools.partial(looked_up, vars(torch.Tensor), methods)
        self._watches.append(("class Tensor", methods, read, read()))
        if ignored:
            self._ignore(ignored)
        self._before = [PARTS(function) for _, function in self._functions], list(map(_of_cell, self._cells))
        self._values = TensorValues(self._tensors)
        self._objects, self._dicts = (
            [obj for _, obj, _ in self._attributes],
            [attributes for *_, attributes in self._attributes],
        )
        self._together, self._codes = Together(self._watches), Codes([function for _, function in self._functions])

    def _ignore(self, ignored: Set[str]) -> None:
        """Leave out what `changed` would tell in one of these texts."""
        self._watches = [
            without(watch, {text.removeprefix(f"{watch[0]}.") for text in ignored if text.startswith(f"{watch[0]}.")})
            for watch in self._watches
            if _contents_of(watch[0]) not in ignored
        ]
        self._functions = [function for function in self._functions if _code_of(function[0]) not in ignored]
        self._cells = [cell for cell in self._cells if cell[0] not in ignored]
        self._tensors = [tensor for tensor in self._tensors if tensor[0] not in ignored]
        self._arrays = [array for array in self._arrays if array[0] not in ignored]

    def holds(self) -> bool:
        """Whether nothing was replaced or written to since."""
        return (
            self._together.hold()
            and self._codes.hold()
            and identical(list(map(_of_cell, self._cells)), self._before[1])
            and self._values.hold()
            and all(map(is_, map(vars, self._objects), self._dicts))
            and all(read() == before for _, read, before in self._arrays)
        )

    def changed(self) -> list[str]:
        """In words of the model."""
        changes = []
        for path, names, read, before in self._watches:
            now = read()
            if is_of_members(read) and names_of(*read.args) != names:
                changes += self._members_changed(path, dict(zip(names, before)), *read.args)
                continue
            if len(now) != len(before):
                changes.append(_contents_of(path))
            for place, (old, new) in enumerate(zip(before, now)):
                if not _alike(old, new):
                    changes.append(f"{path}.{names[place]}" if place < len(names) else _contents_of(path))
        for (path, function), was in zip(self._functions, self._before[0]):
            if not all(map(_alike, was, PARTS(function))):
                changes.append(_code_of(path))
        for (path, cell), was in zip(self._cells, self._before[1]):
            if not _alike(was, _of_cell((path, cell))):
                changes.append(path)
        changes += self._values.changed()
        changes += [_contents_of(path) for path, obj, attributes in self._attributes if vars(obj) is not attributes]
        changes += [path for path, read, before in self._arrays if read() != before]
        return list(dict.fromkeys(changes))

    def _members_changed(
        self, path: str, before: Mapping[str, Any], members: Mapping[Any, Any], left_out: Set[str] = frozenset()
    ) -> list[str]:
        """Of a mapping that has other names, or in another order; of a class those that a forward looks up: libraries
        note things there that none does.
        """
        now = {str(name): value for name, value in items(members) if str(name) not in left_out}
        names = dict.fromkeys((*before, *now))
        of_class = isinstance(members, MappingProxyType)
        if of_class:
            names = dict.fromkeys(name for name in names if name in self._reached)
        changes = [f"{path}.{name}" for name in names if not _alike(before.get(name, ABSENT), now.get(name, ABSENT))]
        return changes or ([] if of_class else [_contents_of(path)])

    def put_back(self, is_wrong: Callable[[Any], bool]) -> None:
        """Let what holds a value that `is_wrong` hold what it held before, or nothing under a new name."""
        for _, names, read, before in self._watches:
            if isinstance(read, functools.partial) and any(map(is_wrong, read())):
                put_members_back(read, dict(zip(names, before)), before, is_wrong)
        for kind, members in self._kinds:
            for name in [name for name, value in vars(kind).items() if is_wrong(value)]:
                setattr(kind, name, members[name]) if name in members else delattr(kind, name)
        for cell, was in zip(self._cells, self._before[1]):
            if is_wrong(_of_cell(cell)):
                cell[1].cell_contents = was

    # --- the walk ------------------------------------------------------------------------------------------------

    def _is_new(self, key: Any, value: Any) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = value
        return True

    def _watch(self, path: str, names: Names, read: Read, depth: int) -> None:
        """Watch what `read` gives, and walk on through it."""
        values = read()
        self._watches.append((path, names, read, values))
        self._on(path, zip(names or [""] * len(values), values), depth)

    def _on(self, path: str, values: Iterable[tuple[str, Any]], depth: int) -> None:
        if depth < DEEPEST:
            self._waiting.extend((f"{path}.{name}" if name else path, value, depth + 1) for name, value in values)

    def _walk(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensors.append((path, value))
        elif isinstance(value, _Asked):
            self._watch(path, (), lambda: value.read(), depth)
        elif isinstance(value, MEMORY):
            self._arrays.append((path, functools.partial(_bytes, value), _bytes(value)))
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                self._watch(path, (), lambda: list(value.flat), depth)
            else:
                self._arrays.append((path, functools.partial(_array, value), _array(value)))
        elif isinstance(value, dict):
            names = tuple(map(str, dict.keys(value)))
            if isinstance(value, defaultdict):
                self._watch(
                    path, ("default_factory",), functools.partial(attributes, value, ("default_factory",)), depth
                )
            if id(value) in self._known:
                self._on(path, zip(names, list(dict.values(value))), depth)
            else:
                self._watch(path, names, functools.partial(values, value), depth)
        elif isinstance(value, (list, set, deque)):
            if id(value) in self._known:
                self._on(path, [("", item) for item in value], depth)
            else:
                self._watch(path, (), functools.partial(elements, value), depth)
        elif isinstance(value, BEHIND):
            self._on(path, [("", referent) for referent in gc.get_referents(value)], depth)
        elif isinstance(value, (tuple, frozenset)):
            self._on(path, [("", item) for item in value], depth)
        elif isinstance(value, FunctionType):
            self._walk_function(path, value, depth)
        elif isinstance(value, MethodType):
            self._on(path, [("", value.__func__), ("", value.__self__)], depth)
        elif isinstance(value, CACHED):
            self.caches.append(value)
            self._on(path, [("", value.__wrapped__)], depth)
        elif isinstance(value, functools.partial):
            self._on(path, [("func", value.func), ("args", value.args), ("keywords", value.keywords)], depth)
        elif isinstance(value, (staticmethod, classmethod)):
            self._on(path, [("", value.__func__)], depth)
        elif isinstance(value, property):
            self._on(path, [("", value.fget)], depth)
        elif _is_own(_module_of(type(value))) or isinstance(value, (nn.Module, *OF_DATA)):
            self._walk_object(path, value, depth)
        else:
            self._walk_state(path, value, depth)

    def _walk_state(self, path: str, value: Any, depth: int) -> None:
        """What an object of the standard library or of torch says of its own state, where forward may read that. Of an
        optimizer that is what a function names: a model may hold one that it never reads.
        """
        if isinstance(value, ContextVar):
            self._watch(path, ("value",), lambda: [value.get(ABSENT)], depth)
        elif isinstance(value, threading.local):
            self._watch(path, (), lambda: list(vars(value).values()), depth)
        elif isinstance(value, threading.Event):
            self._watch(path, ("is_set",), lambda: [value.is_set()], depth)
        elif isinstance(value, weakref.ref):
            self._watch(path, ("referent",), lambda: [value()], depth)
        elif isinstance(value, SynchronizedBase):
            self._on(path, [("", value.get_obj())], depth)
        elif isinstance(value, RawConfigParser):
            self._on(path, [("", vars(value)["_sections"]), ("", value.defaults())], depth)
        elif isinstance(value, torch.distributions.Distribution):
            self._on(path, [("", vars(value))], depth)
        elif isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
            for name in vars(value):  # a step or load_state_dict may replace the whole attribute
                self._once_read(path, name, _Asked(functools.partial(attributes, value, (name,))), depth)
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
                rates = _Asked(lambda: [sys.intern(repr(value.get_last_lr()))])  # each step makes a new list
                self._once_read(path, "get_last_lr", rates, depth)
        elif isinstance(value, LOCK):
            self._once_read(path, "locked", _Asked(lambda: [value.locked()]), depth)
        elif isinstance(value, UNSEEN):
            log.warning(
                "the model reaches %s, a %s: what it holds is read when the model is traced, and a change of it "
                "between steps is not seen. Pass what changes as an entry of the batch", path, type(value).__name__,
            )  # fmt: skip

    def _walk_object(self, path: str, value: Any, depth: int) -> None:
        names = tuple(name for kind in type(value).__mro__ for name in _slots(kind) if not name.startswith("__"))
        if names:
            self._watch(path, names, functools.partial(attributes, value, names), depth)
        if isinstance(getattr(value, "__dict__", None), dict):
            self._attributes.append((path, value, vars(value)))
            self._on(path, [("", vars(value))], depth)
        self._walk_classes(type(value), depth)
        if isinstance(value, nn.Module):
            self._walk_forward_of_torch(type(value))

    def _walk_classes(self, kind: type, depth: int) -> None:
        """Attributes and methods of a class and those above it; of torch's only whether they were replaced."""
        if _is_own(_module_of(type(kind))):
            self._walk_classes(type(kind), depth)
        for cls in kind.__mro__:
            is_user = _is_own(_module_of(cls))
            if cls is object or not (is_user or issubclass(cls, nn.Module)) or not self._is_new(id(cls), cls):
                continue
            path, members = f"class {cls.__name__}", vars(cls)
            self._kinds.append((cls, dict(members)))
            self._watches.append((path, tuple(members), functools.partial(values, members), list(members.values())))
            for name, member in members.items() if is_user else ():
                self._once_read(path, name, member, depth)

    def _once_read(self, path: str, name: str, member: Any, depth: int) -> None:
        """Walk on through a member as soon as a function that forward reaches has its name."""
        if name in self._reached:
            self._on(path, [(name, member)], depth)
        else:
            self._later.setdefault(name, []).append((path, member, depth))

    def _reach(self, names: Set[str]) -> None:
        """Walk on through the members of classes that have these names."""
        for name in names - self._reached:
            self._reached.add(name)
            for path, member, depth in self._later.pop(name, ()):
                self._on(path, [(name, member)], depth)

    def _walk_function(self, path: str, function: FunctionType, depth: int) -> None:
        if not _is_own(str(function.__module__)):
            return
        self._functions.append((path, function))
        self._on(path, [("", function.__defaults__), ("", function.__kwdefaults__), ("", vars(function))], depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if self._is_new(id(cell), cell):
                self._cells.append((f"{path}.{name}", cell))
                self._on(path, [(name, _of_cell(("", cell)))], depth)
        read = names_read(function.__code__)
        variables = texts(function.__code__) if read & {"environ", "getenv"} else ()
        if variables:
            self._watch("environment variable", variables, functools.partial(environment, variables), depth)
        self._reach(read)
        loaded = read & globals_read(function.__code__)
        self._walk_names(f"global {function.__module__}", function.__globals__, loaded, read, depth)
        package = function.__globals__.get("__package__") or ""
        for name in imported(function.__code__):
            module = sys.modules.get(f"{package}.{name}") or sys.modules.get(name)
            if isinstance(module, ModuleType) and _is_own(module.__name__):
                self._walk_names(f"global {module.__name__}", vars(module), read, read, depth)

    def _walk_names(self, path: str, space: dict[str, Any], names: Set[str], inner: Set[str], depth: int) -> None:
        """Those of the names that a namespace has; in Python modules among them, those of `inner`."""
        for name in sorted(names):
            if name not in space:
                continue
            value = space[name]
            if isinstance(value, ModuleType):
                if _is_own(value.__name__) and depth < DEEPEST:
                    self._walk_names(f"{path}.{name}", vars(value), inner, frozenset(), depth + 1)
                elif _is_torch(value):
                    self._watch_torch(value, inner or names)
            elif self._is_new((id(space), name), space):
                self._spaces.setdefault(id(space), (path, space, []))[2].append(name)
                self._on(path, [(name, value)], depth)

    def _walk_forward_of_torch(self, kind: type) -> None:
        """What the forward of a class of torch calls of torch."""
        forward = vars(kind).get("forward")
        if isinstance(forward, FunctionType) and not _is_own(_module_of(kind)):
            names = names_read(forward.__code__)
            modules = (forward.__globals__.get(name) for name in names)
            for module in modules:
                if isinstance(module, ModuleType) and _is_torch(module):
                    self._watch_torch(module, names)

    def _watch_torch(self, module: ModuleType, names: Set[str]) -> None:
        """Whether functions of torch were replaced. What they are and call is torch's."""
        space = vars(module)
        for name in names:
            value = space.get(name, ABSENT)
            if isinstance(value, ModuleType):
                if value.__name__.startswith(f"{module.__name__}."):
                    self._watch_torch(value, names)
            elif value is not ABSENT and self._is_new((id(space), name), space):
                self._spaces.setdefault(id(space), (f"global {module.__name__}", space, []))[2].append(name)


def _contents_of(path: str) -> str:
    return f"what {path} holds"


def _code_of(path: str) -> str:
    return f"the code or the defaults of {path}"


def _of_cell(named: tuple[str, CellType]) -> Any:
    try:
        return named[1].cell_contents
    except ValueError:
        return ABSENT


def _alike(left: Any, other: Any) -> bool:
    if left is other:
        return True
    if not isinstance(left, (*PLAIN, tuple, frozenset)):
        return False
    try:
        return type(left) is type(other) and bool(left == other)
    except Exception:  # comparing is the user's code
        return False


def _module_of(kind: type) -> str:
    """The module of a class; "builtins" for one that has an attribute of its own by that name, as Cython's have."""
    module = kind.__module__
    return module if isinstance(module, str) else "builtins"


def _is_own(module: str) -> bool:
    return module.partition(".")[0] not in LIBRARIES and module != "builtins"


def _is_torch(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "torch"


def _slots(kind: type) -> Names:
    names = vars(kind).get("__slots__", ()) if _is_own(_module_of(kind)) else ()
    return (names,) if isinstance(names, str) else tuple(names)


def _bytes(memory: Any) -> bytes:
    """What is in it. No view of it is kept: memory with a view cannot grow."""
    return memoryview(memory).tobytes()


def _array(array: np.ndarray) -> bytes:
    """What is in it, and as what it is read."""
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()
