"""Layers that do the same: which attributes, globals and closures a layer's forward looks at, and whether another's
are equal.
"""

from __future__ import annotations

import builtins
import functools
import gc
import itertools
import logging
import operator
import random
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from csc.capture import batch
from csc.capture.code_names import globals_read, modules_imported
from csc.capture.values.hoist import NOT_THE_MODELS
from csc.torch_private.traces import FakeTensor, modes_that_are_on

# --- While an operation of torch's runs, nobody looks at what is called ----------------------------------------------
#
# Python tells a profile function of every call and return. A layer of forty operations makes 80,000 of them in a
# trace, nearly all within torch, where none is to be looked at: telling them took longer than the trace.
#
# An operation is one that torch defines, called with tensors of torch's and plain values, so that it can call nothing
# of the model's: no subclass of Tensor, no function among its arguments, no mode but torch's and csc's around it.


DEFINED = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)  # in C
IN_PYTHON = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor"})
TENSORS = frozenset({FakeTensor, torch.Tensor, torch.nn.Parameter})
PLAIN_ARGUMENTS = frozenset(
    {bool, int, float, complex, str, type(None), type(...), torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype,
     torch.device, torch.layout, torch.memory_format}
)  # fmt: skip
TRACERS = ("torch", "csc")  # packages whose modes are on in every trace


class _Operations(TorchFunctionMode):
    def __init__(self, look: Callable[..., None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (_is_torch_s(func) and _are_plain(args) and _are_plain(kwargs.values()) and _only_tracers()):
            return func(*args, **kwargs)
        sys.setprofile(None)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(self._look)


@contextmanager
def unprofiled(look: Callable[..., None]) -> Iterator[None]:
    """Python calls `look` for what runs in the context, outside of operations."""
    before = sys.getprofile()
    with _Operations(look):
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)


def _is_torch_s(func: Any) -> bool:
    if isinstance(func, FunctionType):
        return func.__module__ in IN_PYTHON
    return isinstance(func, DEFINED)


def _are_plain(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind in TENSORS or kind in PLAIN_ARGUMENTS:
            continue
        if kind in (tuple, list, torch.Size):
            if not _are_plain(value):
                return False
        elif kind is not slice or not _are_plain((value.start, value.stop, value.step)):
            return False
    return True


def _only_tracers() -> bool:
    return all(type(mode).__module__.partition(".")[0] in TRACERS for mode in modes_that_are_on())


# --- Layers that do the same -----------------------------------------------------------------------------------------
#
# The question is which of a layer's attributes its forward looks at, and whether another layer has the same.
#
# Terms
#   structure   classes of the modules below a layer, names, shapes and dtypes of their parameters and buffers
#   read        (path below the layer, name) of the attributes that a forward looked at, tensors and modules aside
#   pairs       each thing of one layer, and the thing that another layer has in its place
#
# Equal values are not the same thing: a forward may look itself up in a table that both layers share. Whoever takes
# one layer for another asks the pairs, too, whether anything shared leads to either of them.


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
    methods = {cls: cls.__dict__.get("__getattribute__") for cls in classes}
    try:
        for cls, original in {cls: cls.__getattribute__ for cls in classes}.items():
            cls.__getattribute__ = watched(original)  # type: ignore[method-assign]
        yield read
    finally:
        for cls, before in methods.items():
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

    def _hold_equal(self, left: Any, other: Any) -> bool:
        """Whether two things of one type hold equal things."""
        if isinstance(left, CellType):
            return self.equal(_contents(left), _contents(other))
        if isinstance(left, FunctionType):
            return (
                left.__code__ is other.__code__
                and left.__globals__ is other.__globals__
                and self._all_equal(left.__closure__ or (), other.__closure__ or ())
                and self.equal((left.__defaults__, left.__kwdefaults__), (other.__defaults__, other.__kwdefaults__))
                and self._attributes_equal(left, other)
            )
        if isinstance(left, MethodType):
            return self.equal(left.__func__, other.__func__) and self.equal(left.__self__, other.__self__)
        if isinstance(left, functools.partial):
            return self.equal(
                (left.func, left.args, left.keywords), (other.func, other.args, other.keywords)
            ) and self._attributes_equal(left, other)
        if isinstance(left, (int, float, complex, str, bytes)) and not isinstance(left, Enum):
            plain: Any = next(cls for cls in type(left).__mro__ if cls in PLAIN)
            return plain.__repr__(left) == plain.__repr__(other) and self._attributes_equal(left, other)
        if isinstance(left, CONTAINERS):
            kind: Any = next(cls for cls in type(left).__mro__ if cls in CONTAINERS)
            return self._all_equal(kind.__iter__(left), kind.__iter__(other)) and self._attributes_equal(left, other)
        if isinstance(left, dict):
            return (
                self._all_equal(dict.__iter__(left), dict.__iter__(other))
                and self._all_equal(dict.values(left), dict.values(other))
                and self.equal(getattr(left, "default_factory", None), getattr(other, "default_factory", None))
                and self._attributes_equal(left, other)
            )
        if isinstance(left, MappingProxyType):
            return self._all_equal(left.items(), other.items())
        return False

    def _all_equal(self, ones: Iterable[Any], others: Iterable[Any]) -> bool:
        """In their order, in which a forward may go through them."""
        ones, others = list(ones), list(others)
        self._kept.append((ones, others))
        return len(ones) == len(others) and all(map(self.equal, ones, others))

    def _attributes_equal(self, left: Any, other: Any) -> bool:
        """Of things whose class is a subclass of Python's, and of functions."""
        slots = [name for cls in type(left).__mro__ for name in _slots(cls)]
        mine, its = (
            {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots if hasattr(thing, name)}}
            for thing in (left, other)
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
    kinds = [attributes.get(name, {}) for name in HOOKS[name]]
    return tuple((hook, *(number in kind for kind in kinds)) for number, hook in attributes[name].items())


# --- What code can tell a layer by, besides what it holds: that it is this very one ----------------------------------
#
# `scales[self]`, `everyone.index(self)` and `self is owner.layers[-1]` are other for each of two layers that hold
# equal values. Each needs something that both layers share and that leads to one of them: a table with modules for
# keys, a list of all layers, their owner. What leads to neither is for both the same. `table[id(self)]` needs no such
# thing, but it has to ask for the number.


NUMBERS = frozenset({"id", "hash"})  # functions of Python that tell one thing from another
METHODS = frozenset({"__hash__", "__repr__"})  # and methods: texts of functions and objects have their addresses
TOLD = tuple(getattr(builtins, name) for name in sorted(NUMBERS))
ENDS = (CodeType, FrameType, ModuleType, logging.Logger, logging.Handler)  # that lead to nothing of a model
TORCH_S = (nn.Module, tuple, dict, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
MOST = 50_000  # things that are followed; what leads to more may lead to anything


class SharedByLayers:
    """outside: packages whose functions and classes hold nothing of a model."""

    def __init__(self, outside: Collection[str]) -> None:
        self._outside = outside
        self._codes: dict[tuple[int, int], Any] = {}
        self._roots: dict[int, Any] = {}
        self._reached: dict[int, Any] | None = None
        self.asks_for_identity = False

    def add(self, code: CodeType, space: Mapping[str, Any], kinds: Iterable[type]) -> None:
        """A function that is called: what it may read of its globals, and what the classes of its arguments hold."""
        for kind in kinds:
            self._roots[id(kind)] = kind
        if (id(code), id(space)) in self._codes:
            return
        self._codes[id(code), id(space)] = code, space
        names = frozenset(code.co_names).union(text for text in code.co_consts if isinstance(text, str))
        numbers = {name for name in NUMBERS & globals_read(code) if name not in space}
        if numbers or not METHODS.isdisjoint(code.co_names):
            self.asks_for_identity = True
        package = space.get("__package__") or ""
        for name in modules_imported(code, package):
            self._take(sys.modules.get(name), names)
        for name in names:
            if name in space:
                self._take(space[name], names)

    def _take(self, value: Any, names: Set[str]) -> None:
        """A value; of Python's modules, those of their members that have one of the names."""
        if not isinstance(value, ModuleType):
            if type(value) not in PLAIN:
                self._roots[id(value)] = value
        elif self._is_own(value.__name__):
            for name in names & vars(value).keys():
                member = vars(value)[name]
                if type(member) not in PLAIN and not isinstance(member, ModuleType):
                    self._roots[id(member)] = member

    def leads_to(self, things: Mapping[int, Any], identities: Set[int]) -> bool:
        """things: what two layers hold in common. What leads to a function that tells identities leads to all."""
        if self._reached is None:
            self._reached = self._followed(self._roots)
        reached = self._followed(things, self._reached)
        identities_told = {*identities, *map(id, TOLD)}
        return (
            len(self._reached) + len(reached) > MOST
            or not identities_told.isdisjoint(self._reached)
            or not identities_told.isdisjoint(reached)
        )

    def _followed(self, roots: Mapping[int, Any], known: Collection[int] = ()) -> dict[int, Any]:
        """All that these lead to, and they themselves, by identity."""
        reached: dict[int, Any] = {}
        waiting = list(roots.values())
        while waiting and len(reached) <= MOST:
            value = waiting.pop()
            if type(value) not in PLAIN and id(value) not in reached and id(value) not in known:
                reached[id(value)] = value
                waiting += self._next(value)
        return reached

    def _next(self, value: Any) -> Iterable[Any]:
        """What a thing leads to in one step."""
        kind = type(value)  # a weak proxy has the class of what it stands for
        if issubclass(kind, type):
            return (*vars(value).values(), *value.__bases__) if self._is_own(value.__module__) else ()
        if kind in weakref.ProxyTypes:
            return (value.__init__.__self__,)
        if isinstance(value, weakref.ref):
            return (value(),)
        if isinstance(value, torch.Tensor):
            return ()
        if isinstance(value, FunctionType):
            if _package(value.__globals__.get("__name__")) == "csc":  # a trace's own, which know all layers
                return ()
            return (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        if isinstance(value, (MethodType, BuiltinFunctionType)):
            return (value.__self__, getattr(value, "__func__", None))
        if isinstance(value, ContextVar):
            return (value.get(None),)
        if isinstance(value, threading.local):
            return (vars(value), kind)
        package = _package(kind.__module__)
        if isinstance(value, ENDS) or package == "csc" or (package == "torch" and not isinstance(value, TORCH_S)):
            return ()
        return gc.get_referents(value)

    def _is_own(self, module: Any) -> bool:
        return _package(module) not in self._outside and module != "builtins"


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


# --- What code looks at besides its arguments ------------------------------------------------------------------------
#
# It looks at globals, closures and state that objects share; what is asked is whether these have changed.
#
#     looked = Looked()
#     with looked.watching(): layer(hidden)
#     looked.unchanged() -> bool          whether all of it is as it was when it was looked at
#
# Of every function of the model's or of its libraries that runs (not torch's, not the standard library's) the names in
# its code say which globals it may read, and which attributes of these, of its arguments and of what it closes over.
# What they hold is noted as the function is called, and compared later: plain values, containers of them, where an
# iterator stands. A name that is never reached is noted too; that costs a trace at most.
#
# Other code may run meanwhile that is none of the model's: what takes messages (handlers of logging, a replacement of
# warnings.showwarning) counts or keeps them, and what it looks at does not count. The garbage collector waits, since
# it calls functions of whoever asked for that at any time (gc.callbacks, finalizers).


# Called by traces; and what computes nothing of a forward: huggingface_hub keeps what it found installed, tqdm locks.
LIBRARIES = {
    *NOT_THE_MODELS, *sys.stdlib_module_names, "huggingface_hub", "mpmath", "networkx", "numpy", "sympy", "tqdm",
}  # fmt: skip
DEEPEST, LONGEST = 4, 256  # of values within values; entries of a container


class Looked:
    """What one run looked at, with what it was then."""

    def __init__(self) -> None:
        self._notes: dict[tuple[int, CodeType], tuple[Any, frozenset[str], Any]] = {}
        self._telling: FrameType | None = None  # of the message that is under way
        self._passed: dict[tuple[int, int], CodeType] = {}  # code that is not looked at, by identity, and its globals'
        self.shared = SharedByLayers(LIBRARIES)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what the functions look at that run inside of the context."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with unprofiled(self._called):
                yield
        finally:
            self._telling = None
            if collects:
                gc.enable()

    def unchanged(self) -> bool:
        """Whether everything is what it was when a function that looks at it was first called."""
        return all(_look(root, names, DEEPEST) == then for root, names, then in self._notes.values())

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self._telling is not None:
            if event == "return" and frame is self._telling:
                self._telling = None
            return
        if event != "call":  # Python tells of returns and of calls of C functions too: most of what it tells
            return
        code = frame.f_code
        place = (id(code), id(frame.f_globals))
        if place in self._passed:
            return
        if _takes_messages(code):
            self._telling = frame
            return
        home = str(frame.f_globals.get("__name__"))
        if not home or home.partition(".")[0] in LIBRARIES or home in batch.MODULES:
            self._passed[place] = code
            return
        names = frozenset(code.co_names).union(constant for constant in code.co_consts if isinstance(constant, str))
        for name in code.co_names:
            if name in frame.f_globals:
                self._note(frame.f_globals[name], code, names)
                if isinstance(frame.f_globals[name], PLAIN):
                    self._note(frame.f_globals, code, frozenset({name}))
        for value in [frame.f_locals[name] for name in code.co_freevars if name in frame.f_locals]:
            self._note(value, code, names)
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        for argument in arguments:  # containers, and contexts of torch's, may be made for this call
            if hasattr(argument, "__dict__") and not _is_torch_class(type(argument)):
                self._note(argument, code, names)
        kinds = [argument if isinstance(argument, type) else type(argument) for argument in arguments]
        self.shared.add(code, frame.f_globals, [kind for kind in kinds if not _is_torch_class(kind)])

    def _note(self, root: Any, code: CodeType, names: frozenset[str]) -> None:
        if type(root) in PLAIN or isinstance(root, torch.Tensor):
            return
        key = (id(root), code)
        if key in self._notes and self._notes[key][1] == names:
            return
        known = self._notes[key][1] if key in self._notes else frozenset()
        self._notes[key] = (root, names | known, _look(root, names | known, DEEPEST))


def _takes_messages(code: CodeType) -> bool:
    return code is logging.Logger.handle.__code__ or code is getattr(warnings.showwarning, "__code__", None)


def _look(value: Any, names: frozenset[str], deep: int) -> Any:
    """What a value holds, as nested tuples that can be compared; of objects what has one of the names."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if deep == 0:
        return None
    if isinstance(value, PLAIN):  # of a subclass, which may have attributes
        return (value, _of_object(value, names, deep))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        attributes = _of_object(value, names, deep) if getattr(value, "__dict__", None) else ()
        return (len(value), attributes, *(_look(item, names, deep - 1) for item in itertools.islice(value, LONGEST)))
    if isinstance(value, ContextVar):
        return _look(value.get(None), names, deep - 1)
    if isinstance(value, (FunctionType, MethodType)):
        return _of_function(value, names, deep)
    if isinstance(value, GeneratorType):
        inner = dict(value.gi_frame.f_locals) if value.gi_frame is not None else {}
        return tuple(_look(item, names, deep - 1) for item in inner.values())
    if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, random.Random):
        return hash(value.__self__.getstate())
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, Mapping) and type(value).__module__ == "builtins" and "__builtins__" in value:
        return tuple((name, _look(value[name], names, deep - 1)) for name in sorted(names) if name in value)
    if isinstance(value, (dict, Mapping)) and len(value) <= LONGEST:
        entries = [(key if isinstance(key, PLAIN) else id(key), value[key]) for key in list(value)]
        attributes = _of_object(value, names, deep) if getattr(value, "__dict__", None) else ()
        return (attributes, *((key, _look(item, names, deep - 1)) for key, item in entries))
    if hasattr(type(value), "__length_hint__"):
        return operator.length_hint(value)
    return _of_object(value, names, deep)


def _of_function(value: Any, names: frozenset[str], deep: int) -> Any:
    if isinstance(value, MethodType):
        return _look(value.__self__, names, deep - 1)
    cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
    cells_seen = tuple(_look(cell.cell_contents, names, deep - 1) for cell in cells)
    return (
        *cells_seen,
        *(_look(value.__dict__[name], names, deep - 1) for name in sorted(names & set(value.__dict__))),
    )


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _of_object(value: Any, names: frozenset[str], deep: int) -> Any:
    """The attributes of these names: of an instance, of its classes, of a Python module."""
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    spaces = [getattr(value, "__dict__", {}), *(vars(base) for base in classes if not _is_torch_class(base))]
    if isinstance(value, nn.Module):
        spaces.append(value.__dict__.get("_modules", {}))
    attributes_found: dict[str, Any] = {}
    for attributes in spaces:
        for name in names.intersection(attributes):
            held = attributes[name]
            if type(held).__name__ == "member_descriptor" and not isinstance(value, type):
                held = getattr(value, name, None)
            attributes_found.setdefault(name, held)
    return tuple((name, _look(attributes_found[name], names, deep - 1)) for name in sorted(attributes_found))


def _is_torch_class(cls: type) -> bool:
    return cls.__module__ == "builtins" or cls.__module__.split(".")[0] == "torch"
