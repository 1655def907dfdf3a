"""What a model's code may read: slots of its modules, objects in objects, classes, functions and the globals they name.

One walk finds it, for two ends: guards ask before a step whether all of it is as it was (csc.capture.model_guards), and
keys of the cache tell it as text (csc.cache.describe).

Terms
  watch    something that holds values (a list, an object's attributes, a class, a namespace by the names that functions
           read of it) with the values that it had, compared by identity, then as values
  own      see csc.capture.sources; code of others is compared, and not walked through
  users    reached through nothing but the model and the user's own code. What libraries' code leads to beside that
           is watched, and no part of a key: their versions stand for it
  named    of a name: some function that forward may reach looks it up. Members of classes and of Python modules are
           walked through once they are named

The walk takes nothing twice, and goes DEEPEST values deep and MOST far.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import io
import logging
import os
import queue
import re
import sys
import threading
import weakref
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from configparser import RawConfigParser
from contextvars import ContextVar
from dataclasses import dataclass
from enum import EnumMeta
from itertools import chain, repeat
from multiprocessing.managers import BaseProxy
from multiprocessing.sharedctypes import SynchronizedBase
from operator import attrgetter, is_, itemgetter, methodcaller
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from csc.capture import batch
from csc.capture.code_names import (
    CALLED_BY_PYTHON,
    OWN_MODULE,
    Asked,
    asked_of_namespaces,
    asks_by_name,
    full_name,
    globals_read,
    modules_imported,
    names_read,
    texts,
)
from csc.capture.dedup.equality import PLAIN
from csc.capture.sources import distribution, home_of, is_own, is_users, module_of
from csc.capture.watches import (
    ABSENT,
    PARTS,
    Codes,
    Names,
    Read,
    TensorValues,
    Together,
    Watch,
    all_variables,
    attributes,
    elements,
    environment,
    file_state,
    hidden,
    identical,
    is_of_members,
    items,
    looked_up,
    names_of,
    put_members_back,
    values,
    without,
)
from csc.capture.watches import (
    Namespace as Space,
)
from csc.torch_private.hooks import hooks_of_all_modules

log = logging.getLogger("csc")

DEEPEST, MOST = 12, 40_000
CONFIGURATIONS = 3  # objects of any class within objects, from an attribute of a module on
CACHED = type(functools.lru_cache(len))
FIRST = frozenset({"forward", "__call__", *CALLED_BY_PYTHON})
MADE_BY = frozenset({"__init__", "__new__", "__post_init__"})  # of a class that code names, and so may call
MEMORY: tuple[type[Any], ...] = (bytearray, array, memoryview, *ctypes.Array.__bases__)  # the last: all of ctypes
BEHIND = (MappingProxyType, KeysView, ValuesView, ItemsView)  # which a mapping stands
OF_DATA = (SimpleNamespace, Namespace, ChainMap, UserDict, UserList)  # Python's own, with attributes of their own
OF_C = (BuiltinFunctionType, MethodWrapperType)  # functions of C, some of an object
ENVIRONMENT = frozenset(map(id, (os.environ, os.getenv)))
LOCK = type(threading.Lock())
IN_MEMORY = (io.StringIO, io.BytesIO)
UNSEEN = (queue.SimpleQueue, BaseProxy)  # whose state nothing here can compare
OWN_SLOTS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}  # dicts of an nn.Module
NOT_FOR_TRAINING = frozenset({"generation_config", batch.INSTALLED, "_is_hf_initialized"})  # of transformers
OF_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
APART = (logging.Logger, threading.local, *OF_TRAINING)  # whose attributes change by themselves, or are asked for
NOTHING_ASKED = Asked(frozenset(), frozenset(), (), False)
BY_TEXT = (attrgetter, methodcaller)  # hold the names that they look up
Excused = Callable[[Mapping[Any, Any], str, Any, Any], bool]  # of a change: (holder, name, before, now)


# --- What a value consists of ----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """names: of the values, or none; read: gives the values as they are then, None where no other ones can come."""

    names: Names
    values: list[Any]
    read: Read | None = None


@dataclass(frozen=True)
class _Asked:
    """What an object is asked for, which it may hold under another name, or anew each time."""

    read: Read


def _watched(names: Names, read: Read) -> Part:
    return Part(names, read(), read)


def _fixed(*values: Any) -> Part:
    return Part((), list(values))


def parts(value: Any, deep: int = DEEPEST) -> list[Part]:
    """Of anything but tensors, memory, functions, classes and modules. deep: as many values deep was it found."""
    found = list(_contents(value))
    kind = type(value)
    slots = tuple(name for base in kind.__mro__ for name in slots_of(base))
    if slots:
        found.append(_watched(slots, functools.partial(attributes, value, slots)))
    if has_attributes(value, deep):
        found.append(_watched(tuple(map(str, vars(value))), functools.partial(values, vars(value))))
    return found


def has_attributes(value: Any, deep: int = DEEPEST) -> bool:
    """Whether a value's `__dict__` is walked through: code of others may keep anything there."""
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, APART):
        return False
    near = deep < CONFIGURATIONS and not callable(value) and not isinstance(value, dict)
    near = near and not module_of(type(value)).startswith("csc.")  # what a trace puts there
    data = isinstance(value, (*OF_DATA, torch.distributions.Distribution))
    return data or near or is_own(module_of(type(value)))


def _contents(value: Any) -> Iterator[Part]:
    if isinstance(value, np.ndarray):
        yield _watched((), lambda: list(value.flat))
    elif isinstance(value, dict):
        if isinstance(value, defaultdict):
            yield _watched(("default_factory",), functools.partial(attributes, value, ("default_factory",)))
        yield _watched(tuple(map(str, dict.keys(value))), functools.partial(values, value))
        yield _fixed(*(key for key in dict.keys(value) if type(key) not in PLAIN))
    elif isinstance(value, (list, set, deque)):
        yield _watched((), functools.partial(elements, value))
    elif isinstance(value, BEHIND):
        yield _fixed(*gc.get_referents(value))
    elif isinstance(value, (tuple, frozenset)):
        yield _fixed(*value)
    elif isinstance(value, MethodType):
        yield _fixed(value.__func__, value.__self__)
    elif isinstance(value, CACHED):
        yield _fixed(value.__wrapped__)
    elif isinstance(value, (functools.partial, functools.partialmethod)):
        yield Part(("func", "args", "keywords"), [value.func, value.args, value.keywords])
    elif isinstance(value, (staticmethod, classmethod)):
        yield _fixed(value.__func__)
    elif isinstance(value, property):
        yield _fixed(value.fget)
    elif isinstance(value, functools.cached_property):
        yield _fixed(value.func)
    elif isinstance(value, OF_C):
        if not isinstance(value.__self__, (ModuleType, type)):
            yield _fixed(value.__self__)
    elif isinstance(value, _Asked):
        yield _watched((), lambda: value.read())
    elif isinstance(value, ContextVar):
        yield _watched(("value",), lambda: [value.get(ABSENT)])
    elif isinstance(value, threading.local):
        yield _watched((), lambda: list(vars(value).values()))
    elif isinstance(value, threading.Event):
        yield _watched(("is_set",), lambda: [value.is_set()])
    elif isinstance(value, queue.Queue):
        yield _watched((), functools.partial(elements, value.queue))
    elif isinstance(value, weakref.ref):
        yield _watched(("referent",), lambda: [value()])
    elif isinstance(value, SynchronizedBase):
        yield _fixed(value.get_obj())
    elif isinstance(value, RawConfigParser):
        yield _fixed(vars(value)["_sections"], value.defaults())


def _in_order(value: Any, part: Part) -> Iterable[tuple[str, Any]]:
    """Of what a value holds: attributes by name, since a trace may write one anew, which puts it behind the others;
    the keys of a dict as it has them.
    """
    pairs = zip(part.names or repeat(""), part.values)
    return sorted(pairs, key=itemgetter(0)) if are_attributes(value, part) else pairs


def are_attributes(value: Any, part: Part) -> bool:
    """Whether a part of a value has names that are no keys of it."""
    are_keys = part.read is not None and is_of_members(part.read) and part.read.args[0] is value
    return bool(part.names) and not are_keys


def slots_of(kind: type) -> Names:
    """Names of a class's own slots, as its objects have them."""
    declared = vars(kind).get("__slots__", ()) if is_own(module_of(kind)) else ()
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    of_class = f"_{kind.__name__.lstrip('_')}"
    private = (name.startswith("__") and not name.endswith("__") for name in names)
    mangled = (f"{of_class}{name}" if is_private else name for name, is_private in zip(names, private))
    return tuple(name for name in mangled if not name.startswith("__"))


def is_plain(value: Any) -> bool:
    """Whether a value never changes, and nothing has to be known of its class."""
    return isinstance(value, PLAIN) and not is_own(module_of(type(value)))


def of_transformers(kind: type) -> bool:
    """Whether it is a class of transformers, or one made from it."""
    return any(module_of(base).startswith("transformers.") for base in kind.__mro__)


def is_holder(name: Any, value: Any) -> bool:
    """Whether a module keeps its parameters, buffers, modules or hooks under a name."""
    return name in OWN_SLOTS or (isinstance(value, dict) and "_hooks" in str(name))


def joined(path: str, name: str) -> str:
    """A place in words: `attribute config` and `width` are `attribute config.width`."""
    return f"{path}{name}" if not path or not name or path.endswith(" ") else f"{path}.{name}"


# --- The walk --------------------------------------------------------------------------------------------------------


class Reached:
    """model: whose modules are walked. roots: (path, value) to start from beside it. slots: whether to watch what the
    modules hold themselves, and not alone what that leads to. for_keys: through opaque modules too, and not through
    what models of transformers hold for other ends than training. ignored: places in words that the model's forward
    writes itself, and so may differ. spaces: (path, namespace, names read of it).
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        roots: Iterable[tuple[str, Any]] = (),
        slots: bool = True,
        for_keys: bool = False,
        ignored: Set[str] = frozenset(),
        spaces: Iterable[Space] = (),
    ) -> None:
        self.caches: list[Any] = []  # of functools.lru_cache
        self.found: dict[int, tuple[str, Any]] = {}  # by identity: what is the user's, in the order of the walk
        self.spaces: dict[int, tuple[str, Mapping[str, Any], dict[str, bool]]] = {}  # names: whether the user's code's
        self.named: set[str] = set()
        self.by_name = False  # whether code of the user's asks for names that it computes
        self.unnamed: list[tuple[FunctionType, str, int]] = []  # such questions to a namespace, and their lines
        self._spoken = set(FIRST)  # names that code has, not those alone that it may compute
        self._slots, self._for_keys = slots, for_keys
        self._ignored, self._ignored_of = ignored, _by_holder(ignored)
        self._watches: list[Watch] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._arrays: list[tuple[str, Callable[[], Any], Any]] = []
        self._attributes: list[tuple[str, Any, dict[str, Any]]] = []
        self._kinds: list[tuple[type, dict[str, Any]]] = []
        self._functions: list[tuple[str, FunctionType]] = []
        self._cells: list[tuple[str, CellType]] = []
        self._modules_met: dict[int, ModuleType] = {}
        self._made: set[str] = set()  # classes that code names, in words
        self._seen: dict[Any, tuple[Any, bool]] = {}  # with the things themselves, so that no other takes their place
        self._later: dict[str, list[tuple[str, Any, int, bool]]] = {}  # members of classes by names that none looked up
        self._waiting: deque[tuple[str, Any, int, bool]] = deque()
        self._waiting_of_others: deque[tuple[str, Any, int, bool]] = deque()
        members = [] if model is None else [*model.modules(), *model.parameters()]
        self._members = frozenset(map(id, members))
        self._packages = {module_of(type(member)).partition(".")[0] for member in members}
        for path, space, names in spaces:
            self.spaces[id(space)] = (path, space, dict.fromkeys(names, True))
            self._on(path, [(name, space[name]) for name in names if name in space], 0, True)
        of_all = [(f"a hook of all modules ({kind})", hooks) for kind, hooks in hooks_of_all_modules()] if slots else []
        self._on("", [*of_all, *roots], 0, True)
        if model is not None:
            self._walk_model(model, {} if for_keys else hidden(model))
        self._name(FIRST)
        self._walk_all()
        self.unnamed = [one for one in self.unnamed if one[0].__name__ in {*self._spoken, "<lambda>"}]
        self.is_whole = not (self._waiting or self._waiting_of_others)
        self._keep()

    def _walk_model(self, model: nn.Module, opaque: Mapping[int, str]) -> None:
        for path, module in model.named_modules():
            if id(module) in opaque:
                if self._slots:
                    self._watch_members(f"parameter {path}", module._parameters)
            else:
                self._walk_module(f"attribute {path}", module, -1, True)
        for name, parameter in model.named_parameters():
            self._walk_said(f"attribute {name}", parameter, 0, True)

    def _walk_all(self) -> None:
        while len(self._seen) < MOST:
            if not (self._waiting or self._waiting_of_others):
                self._walk_modules_met()
            waiting = self._waiting or self._waiting_of_others
            if not waiting:
                break
            path, value, depth, users = waiting.popleft()
            if id(value) in self._members or is_plain(value):
                continue
            if isinstance(value, type):
                self._walk_classes(value, depth, users, named=True)
            elif self._is_new(id(value), path, value, users):
                self._walk(path, value, depth, users)

    def _keep(self) -> None:
        """Note how all of it is now."""
        for path, space, names in self.spaces.values():
            read = functools.partial(looked_up, space, tuple(names))
            self._watches.append((path, tuple(names), read, read()))
        methods = tuple(name for name in sorted(self.named) if hasattr(torch.Tensor, name))
        read = functools.partial(looked_up, vars(torch.Tensor), methods)
        self._watches.append(("class Tensor", methods, read, read()))
        if self._ignored:
            self._leave_out()
        self._before = [PARTS(function) for _, function in self._functions], list(map(_of_cell, self._cells))
        self._values = TensorValues(self._tensors)
        self._objects = [owner for _, owner, _ in self._attributes]
        self._dicts = [attributes for *_, attributes in self._attributes]
        self._together, self._codes = Together(self._watches), Codes([function for _, function in self._functions])

    def _leave_out(self) -> None:
        """Drop what `changed` would tell in one of the words that are ignored."""
        self._watches = [
            without(watch, self._ignored_of.get(watch[0], frozenset()))
            for watch in self._watches
            if _contents_of(watch[0]) not in self._ignored
        ]
        self._functions = [function for function in self._functions if _code_of(function[0]) not in self._ignored]
        self._cells = [cell for cell in self._cells if cell[0] not in self._ignored]
        self._tensors = [tensor for tensor in self._tensors if tensor[0] not in self._ignored]
        self._arrays = [array for array in self._arrays if array[0] not in self._ignored]

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

    def changed(self, excused: Excused = lambda *_: False) -> list[str]:
        """In words of the model; nothing where a value was replaced by an equal one."""
        changes = []
        for path, names, read, before in self._watches:
            now = read()
            if is_of_members(read):
                if not (identical(now, before) and names_of(*read.args) == names):
                    changes += self._members_changed(path, dict(zip(names, before)), read.args, excused)
                continue
            if len(now) != len(before):
                changes.append(_contents_of(path))
            for place, (old, new) in enumerate(zip(before, now)):
                if not alike(old, new):
                    changes.append(joined(path, names[place]) if place < len(names) else _contents_of(path))
        for (path, function), was in zip(self._functions, self._before[0]):
            if not all(map(alike, was, PARTS(function))):
                changes.append(_code_of(path))
        for (path, cell), was in zip(self._cells, self._before[1]):
            if not alike(was, _of_cell((path, cell))):
                changes.append(path)
        changes += self._values.changed()
        changes += [_contents_of(path) for path, owner, attributes in self._attributes if vars(owner) is not attributes]
        changes += [path for path, read, before in self._arrays if read() != before]
        return list(dict.fromkeys(changes))

    def _members_changed(
        self, path: str, before: Mapping[str, Any], read: tuple[Any, ...], excused: Excused
    ) -> list[str]:
        """Of a mapping that has other values or names, or another order; of a class those that a forward looks up:
        libraries note things there that none does. Attributes have no order that counts.
        """
        members, left_out = read[0], read[1] if len(read) > 1 else frozenset()
        now = {str(name): value for name, value in items(members) if str(name) not in left_out}
        names = dict.fromkeys((*before, *now))
        of_class = isinstance(members, MappingProxyType)
        if of_class:
            called = self.named | MADE_BY if path in self._made else self.named
            names = dict.fromkeys(name for name in names if name in called)
        pairs = [(name, before.get(name, ABSENT), now.get(name, ABSENT)) for name in names]
        changes = [name for name, old, new in pairs if not alike(old, new) and not excused(members, name, old, new)]
        if path.startswith("a hook"):
            return [path] if changes else []
        ordered = not of_class and id(members) not in map(id, self._dicts)
        if ordered and not changes and list(before) != list(now):
            return [_contents_of(path)]
        return [joined(path, name) for name in changes]

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

    # what the walk does with each kind of value

    def _is_new(self, key: Any, path: str, value: Any, users: bool) -> bool:
        if key in self._seen and self._seen[key][1] >= users:
            return False
        self._seen[key] = value, users
        if users:
            self.found[key] = path, value
        return True

    def _on(self, path: str, values: Iterable[tuple[str, Any]], depth: int, users: bool) -> None:
        """Walk on through values, later."""
        if depth > DEEPEST:
            return
        for name, value in values:
            place = joined(path, name)
            is_written = place in self._ignored and not isinstance(value, dict)  # of a dict some keys may be
            if not is_written and type(value) not in PLAIN:
                of_users = users or is_users(value)
                waiting = self._waiting if of_users else self._waiting_of_others
                waiting.append((place, value, depth, of_users))

    def _watch_members(self, path: str, members: Mapping[Any, Any]) -> None:
        self._watches.append((path, tuple(map(str, members)), functools.partial(values, members), [*values(members)]))

    def _watch_attributes(self, path: str, value: Any, names: Names) -> None:
        self._watches.append((path, names, functools.partial(attributes, value, names), attributes(value, names)))

    def _walk(self, path: str, value: Any, depth: int, users: bool) -> None:
        if isinstance(value, torch.Tensor):
            self._tensors.append((path, value))
            self._walk_said(path, value, depth, users)
        elif isinstance(value, MEMORY):
            self._arrays.append((path, functools.partial(_bytes, value), _bytes(value)))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._arrays.append((path, functools.partial(_array, value), _array(value)))
        elif isinstance(value, io.IOBase) and not _is_unseen(value):
            if not value.closed and (isinstance(value, IN_MEMORY) or value.readable()):
                self._arrays.append((path, functools.partial(_file, value), _file(value)))
        elif isinstance(value, FunctionType):
            self._walk_function(path, value, depth, users)
        elif isinstance(value, ModuleType):
            self._modules_met[id(value)] = value
            self._walk_classes(type(value), depth, users)
        elif isinstance(value, nn.Module):
            self._walk_module(path, value, depth, users)
        else:
            for part in parts(value, depth):
                if part.read is not None:
                    self._watches.append((path, part.names, part.read, part.values))
                self._on(path, _in_order(value, part), depth + 1, users)
            if has_attributes(value, depth):
                self._attributes.append((path, value, vars(value)))
            if is_own(module_of(type(value))):
                self._watch_attributes(path, value, ("__class__",))
                self._walk_classes(type(value), depth, users)
            self._walk_asked(path, value, depth, users)

    def _walk_asked(self, path: str, value: Any, depth: int, users: bool) -> None:
        """What objects of libraries are asked for by functions that name it: a model may hold an optimizer that it
        never reads. What nobody can ask is said.
        """
        asked: dict[str, Read] = {}
        if isinstance(value, OF_TRAINING):  # a step or load_state_dict may replace the whole attribute
            asked = {name: functools.partial(attributes, value, (name,)) for name in vars(value)}
        elif isinstance(value, logging.Logger):  # whose cache changes with each question
            asked = {name: functools.partial(attributes, value, (name,)) for name in ("level", "disabled")}
            asked["getEffectiveLevel"] = lambda: [value.getEffectiveLevel()]
            asked["isEnabledFor"] = lambda: [value.getEffectiveLevel(), value.disabled, value.manager.disable]
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):  # each step makes a new list
            asked["get_last_lr"] = lambda: [sys.intern(repr(value.get_last_lr()))]
        elif isinstance(value, LOCK):
            asked = {"locked": lambda: [value.locked()]}
        elif isinstance(value, CACHED):
            self.caches.append(value)
        elif isinstance(value, BY_TEXT) and users:
            self._name(frozenset(".".join(texts_in(value.__reduce__())).split(".")))
        elif isinstance(value, (*UNSEEN, io.IOBase)):
            log.warning(
                "the model reaches %s, a %s: what it holds is read when the model is traced, and a change of it "
                "between steps is not seen. Pass what changes as an entry of the batch", path, type(value).__name__,
            )  # fmt: skip
        for name, read in asked.items():
            self._once_named(path, name, _Asked(read), depth, users)

    def _walk_said(self, path: str, tensor: torch.Tensor, depth: int, users: bool) -> None:
        """Attributes that a tensor was given."""
        if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and vars(tensor).keys() - NOT_FOR_TRAINING:
            self._watch_members(path, vars(tensor))
            self._on(path, sorted(vars(tensor).items()), depth + 1, users)

    def _walk_module(self, path: str, module: nn.Module, depth: int, users: bool) -> None:
        """A module of the model, or one that it holds in another way."""
        is_member, place = id(module) in self._members, path.removeprefix("attribute ")
        slots = vars(module)
        holders = [(name, value) for name, value in slots.items() if is_holder(name, value)]
        if self._slots or not is_member:
            self._watch_members(path, slots)
            self._attributes.append((path, module, slots))
        for name, members in holders:
            hook = f"a hook ({name}) of {place or 'the model'}" if name not in OWN_SLOTS else ""
            part = f"{OWN_SLOTS.get(name)} {place}" if is_member else joined(path, name)
            if joined(path, name) in self._ignored:
                continue
            if self._slots or not is_member:
                self._watch_members(hook or part, members)
            kept = {key: value for key, value in members.items() if value is not None and not batch.is_recorder(value)}
            if self._slots or name != "_buffers" or not is_member:
                self._on(hook or part, [(str(key), value) for key, value in kept.items()], depth + 1, users)
        inert = NOT_FOR_TRAINING if self._for_keys and of_transformers(type(module)) else frozenset()
        held = [(str(name), value) for name, value in slots.items() if not (name in inert or is_holder(name, value))]
        held.sort(key=itemgetter(0))
        self._on(path, held, depth + 1, users)
        self._walk_classes(type(module), max(depth, 0), users)
        self._walk_forward_of_others(type(module))

    def _walk_classes(self, kind: type, depth: int, users: bool, named: bool = False) -> None:
        """Attributes and methods of a class and those above it; of torch's only whether they were replaced. named: code
        names it, and may call it.
        """
        if is_own(module_of(type(kind))):
            self._walk_classes(type(kind), depth, users)
        for cls in kind.__mro__:
            own = is_own(module_of(cls))
            if cls is object or not (own or issubclass(cls, nn.Module)):
                continue
            path, members, first = f"class {cls.__name__}", vars(cls), id(cls) not in self._seen
            if named and own:
                self._made.add(path)
                made_by = [(name, members[name]) for name in sorted(MADE_BY & members.keys())]
                self._on(path, made_by, depth + 1, users and is_users(cls))
            if not self._is_new(id(cls), path, cls, users):
                continue
            if first:
                self._kinds.append((cls, dict(members)))
                self._watch_members(path, members)
                self._watch_attributes(path, cls, ("__bases__",))
            if own and isinstance(cls, EnumMeta):  # Python goes through them
                self._on(path, list(cls.__members__.items()), depth + 1, users and is_users(cls))
            for name, member in sorted(members.items()):
                if own or (isinstance(member, FunctionType) and is_users(member)):
                    self._once_named(path, name, member, depth, users and is_users(cls))

    def _once_named(self, path: str, name: str, member: Any, depth: int, users: bool) -> None:
        """Walk on through a member as soon as a function that forward reaches has its name."""
        if users and self.by_name:
            self._name({name})
        if name in self.named:
            self._on(path, [(name, member)], depth + 1, users)
        else:
            self._later.setdefault(name, []).append((path, member, depth, users))

    def _name(self, names: Set[str]) -> None:
        """Walk on through the members of classes that have these names."""
        for name in sorted(names - self.named):
            self.named.add(name)
            for path, member, depth, users in self._later.pop(name, ()):
                self._on(path, [(name, member)], depth + 1, users)

    def _walk_function(self, path: str, function: FunctionType, depth: int, users: bool) -> None:
        home, code = home_of(function), function.__code__
        if not (is_own(home) or is_own(function.__module__)):  # a wrapper of torch's may have the name of an own one
            return
        self._functions.append((path, function))
        held = [function.__defaults__, function.__kwdefaults__, vars(function)]
        self._on(path, zip(repeat(""), held), depth + 1, users)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if self._is_new(id(cell), path, cell, False):
                self._cells.append((f"{path}.{name}", cell))
            self._on(path, [(name, _of_cell(("", cell)))], depth + 1, users)
        if not (is_own(home) and self._follows(function.__globals__)):
            return
        users = is_users(function)
        read = names_read(code)
        space, globals_of_code = function.__globals__, globals_read(code)
        loaded = read & globals_of_code
        asks = read & {"environ", "getenv"} or any(id(space.get(name)) in ENVIRONMENT for name in loaded)
        variables = texts(code) if asks else ()
        if asks and users and asked_of_namespaces(code).variables:
            self._watches.append(("environment variable", (), all_variables, all_variables()))
        if variables:
            variables_now = functools.partial(environment, variables)
            self._watches.append(("environment variable", variables, variables_now, variables_now()))
        names = read | set(texts(code)) if users else read  # getattr may be given a text
        self._name(names)
        self._spoken |= names
        if users and asks_by_name(code) and not self.by_name:
            self.by_name = True
            for name in list(self._later):
                self._name({name} if any(later[3] for later in self._later[name]) else set())
        asked = asked_of_namespaces(code) if users else NOTHING_ASKED
        self.unnamed += [(function, what, line) for what, line in asked.computed if what not in space]
        self._name(asked.globals)
        self._walk_names(f"global {home}", space, loaded | asked.globals, names | asked.globals, depth, users)
        builtin = (globals_of_code | asked.globals) - space.keys()
        self._watch_library(builtins, builtin, users)
        if users:  # a name that is nowhere yet
            self._walk_names(f"global {home}", space, builtin - vars(builtins).keys(), names, depth, users, absent=True)
        package = space.get("__package__") or ""
        by_text = {str(home) if name == OWN_MODULE else full_name(name, package) for name in asked.modules}
        for name in dict.fromkeys((*modules_imported(code, package), *sorted(by_text))):
            if users:
                self.spaces.setdefault(id(sys.modules), ("module", sys.modules, {}))[2].setdefault(name, False)
            module = sys.modules.get(name)
            if isinstance(module, ModuleType):
                self._walk_names(f"global {name}", {name: module}, {name}, names, depth, users)

    def _walk_names(
        self, path: str, space: Mapping[str, Any], names: Set[str], inner: Set[str], depth: int, users: bool,
        absent: bool = False,
    ) -> None:  # fmt: skip
        """Those of the names that a namespace has; in Python modules among them, those of `inner`. absent: none of them
        is there, and one may come.
        """
        for name in sorted(name for name in names if absent or name in space):
            value = space.get(name)
            if not isinstance(value, ModuleType):
                self._walk_global(path, space, name, depth, users)
            elif not is_own(value.__name__):
                self._watch_library(value, inner, users)
            elif self._is_new((id(value), frozenset(inner)), "", value, False):
                self._walk_names(f"global {value.__name__}", vars(value), inner | {"__getattr__"}, inner, depth, users)
                if users:
                    self._on(path, [(name, value)], depth + 1, users)

    def _walk_global(self, path: str, space: Mapping[str, Any], name: str, depth: int, users: bool) -> None:
        _, _, known = self.spaces.setdefault(id(space), (path, space, {}))
        if known.get(name, -1) < users:
            known[name] = users
            if name in space and (self._follows(space) or is_users(space[name])):
                self._on(path, [(name, space[name])], depth + 1, users)

    def _follows(self, space: Mapping[str, Any]) -> bool:
        """Whether to walk through what a Python module has: keys go on in libraries that the model's classes are of."""
        package, path = str(space.get("__name__")).partition(".")[0], str(space.get("__file__") or "")
        return not self._for_keys or package in self._packages or not distribution(path)

    def _walk_modules_met(self) -> None:
        """Members of Python modules that are values somewhere, by the names that any code looks up."""
        for module in list(self._modules_met.values()):
            space, users = vars(module), is_users(module)
            if is_own(module.__name__):
                names = space.keys() if users and self.by_name else self.named & space.keys()
                names = {name for name in names if name == "__getattr__" or not name.startswith("__")}
                self._walk_names(f"global {module.__name__}", space, names, frozenset(), 0, users)
            else:
                self._watch_library(module, self.named, users)

    def _walk_forward_of_others(self, kind: type) -> None:
        """What the forward of a class of torch calls of torch."""
        forward = vars(kind).get("forward")
        if isinstance(forward, FunctionType) and not is_own(module_of(kind)):
            names = names_read(forward.__code__)
            for module in (forward.__globals__.get(name) for name in sorted(names)):
                if isinstance(module, ModuleType):
                    self._watch_library(module, names, True)

    def _watch_library(self, module: ModuleType, names: Set[str], users: bool) -> None:
        """Whether functions and numbers of torch or of Python were replaced. What they are and call is theirs."""
        space, top = vars(module), module.__name__.partition(".")[0]
        if top == "csc":
            return
        for name in sorted(name for name in names if name in space):
            value = space[name]
            if isinstance(value, ModuleType):
                if value.__name__.startswith(f"{module.__name__}."):
                    self._watch_library(value, names, users)
            elif callable(value) or type(value) in (int, float, bool):
                _, _, known = self.spaces.setdefault(id(space), (f"global {module.__name__}", space, {}))
                known[name] = known.get(name, False) or users
                if is_users(value):
                    self._on(f"global {module.__name__}", [(name, value)], 0, True)


def texts_in(value: Any) -> Iterator[str]:
    """The texts in tuples and partials: what an attrgetter or a methodcaller is made of."""
    if isinstance(value, str):
        yield value
    inner = (value.func, value.args) if isinstance(value, functools.partial) else value
    for item in inner if isinstance(inner, tuple) else ():
        yield from texts_in(item)


def _by_holder(places: Iterable[str]) -> dict[str, set[str]]:
    """Names by what holds them, whichever part of a place that is."""
    holders: dict[str, set[str]] = {}
    for place in places:
        for mark in re.finditer(r"[. ]", place):
            holder, name = place[: mark.end()].rstrip("."), place[mark.end() :]
            if mark[0] == "." or "." not in name:
                holders.setdefault(holder, set()).add(name)
    return holders


def _contents_of(path: str) -> str:
    return f"what {path} holds"


def _code_of(path: str) -> str:
    return f"the code or the defaults of {path}"


def _of_cell(named: tuple[str, CellType]) -> Any:
    try:
        return named[1].cell_contents
    except ValueError:
        return ABSENT


def alike(left: Any, other: Any) -> bool:
    """Whether two values are one, or plain ones that are equal, or containers of such."""
    if left is other or type(left) is not type(other):
        return left is other
    try:
        if type(left) is torch.Tensor:
            return _is_equal(left, other)
        if isinstance(left, (list, tuple, deque)):
            return len(left) == len(other) and all(map(alike, left, other))
        if isinstance(left, dict):
            mine, its = items(left), items(other)
            return len(mine) == len(its) and all(map(alike, chain(*mine), chain(*its)))
        return isinstance(left, (*PLAIN, set, frozenset)) and bool(left == other)
    except Exception:  # comparing is the user's code; and what holds itself has no end
        return False


def _is_equal(left: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike in all that a trace sees of one."""
    how = ("dtype", "device", "layout", "shape", "requires_grad")
    same = all(getattr(left, name) == getattr(other, name) for name in how) and vars(left) == vars(other)
    return same and left.stride() == other.stride() and torch.equal(left, other)


def _bytes(memory: Any) -> bytes:
    """What is in it. No view of it is kept: memory with a view cannot grow."""
    return memoryview(memory).tobytes()


def _file(file: Any) -> Any:
    """What is in one in memory, as far as the system tells of another; None for one that is closed since."""
    if file.closed:
        return None
    inner = _in_file(file)
    return inner.getvalue() if isinstance(inner, IN_MEMORY) else file_state(inner.fileno())


def _in_file(file: Any) -> Any:
    """What a buffer or a text reads from, at last."""
    while (inner := getattr(file, "buffer", None) or getattr(file, "raw", None)) is not None:
        file = inner
    return file


def _is_unseen(file: io.IOBase) -> bool:
    """Whether it reads from what the system knows nothing of: an archive, a socket's or a user's own class."""
    if file.closed or isinstance(_in_file(file), IN_MEMORY):
        return False
    try:
        return file.readable() and _in_file(file).fileno() < 0
    except OSError:  # it has no number
        return True


def _array(array: np.ndarray) -> bytes:
    """What is in it, and as what it is read."""
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()
