"""What code looks at besides its arguments: globals, closures, state that objects share; and whether it changed.

    looked = Looked()
    with looked.watching(): layer(hidden)
    looked.unchanged() -> bool          whether all of it is as it was when it was looked at

Of every function of the model's or of its libraries that runs (not torch's, not the standard library's) the names in
its code say which globals it may read, and which attributes of these, of its arguments and of what it closes over. What
they hold is noted as the function is called, and compared later: plain values, containers of them, where an iterator
stands. A name that is never reached is noted too; that costs a trace at most.

Other code may run meanwhile that is none of the model's: what takes messages (handlers of logging, a replacement of
warnings.showwarning) counts or keeps them, and what it looks at does not count. The garbage collector waits, since it
calls functions of whoever asked for that at any time (gc.callbacks, finalizers).
"""

from __future__ import annotations

import gc
import itertools
import logging
import operator
import random
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch import nn

from csc.capture import recorders
from csc.capture.dedup.equality import PLAIN
from csc.capture.dedup.identity import SharedByLayers
from csc.capture.dedup.operations import unprofiled
from csc.capture.values.hoist import NOT_THE_MODELS

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
        if not home or home.partition(".")[0] in LIBRARIES or home in recorders.MODULES:
            self._passed[place] = code
            return
        names = frozenset(code.co_names).union(one for one in code.co_consts if isinstance(one, str))
        for name in code.co_names:
            if name in frame.f_globals:
                self._note(frame.f_globals[name], code, names)
                if isinstance(frame.f_globals[name], PLAIN):
                    self._note(frame.f_globals, code, frozenset({name}))
        for one in [frame.f_locals[name] for name in code.co_freevars if name in frame.f_locals]:
            self._note(one, code, names)
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        for one in arguments:  # containers, and contexts of torch's, may be made for this call
            if hasattr(one, "__dict__") and not _is_torch_s(type(one)):
                self._note(one, code, names)
        kinds = [one if isinstance(one, type) else type(one) for one in arguments]
        self.shared.add(code, frame.f_globals, [kind for kind in kinds if not _is_torch_s(kind)])

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
        return (len(value), attributes, *(_look(one, names, deep - 1) for one in itertools.islice(value, LONGEST)))
    if isinstance(value, ContextVar):
        return _look(value.get(None), names, deep - 1)
    if isinstance(value, (FunctionType, MethodType)):
        return _of_function(value, names, deep)
    if isinstance(value, GeneratorType):
        inner = dict(value.gi_frame.f_locals) if value.gi_frame is not None else {}
        return tuple(_look(one, names, deep - 1) for one in inner.values())
    if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, random.Random):
        return hash(value.__self__.getstate())
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, Mapping) and type(value).__module__ == "builtins" and "__builtins__" in value:
        return tuple((name, _look(value[name], names, deep - 1)) for name in sorted(names) if name in value)
    if isinstance(value, (dict, Mapping)) and len(value) <= LONGEST:
        entries = [(key if isinstance(key, PLAIN) else id(key), value[key]) for key in list(value)]
        attributes = _of_object(value, names, deep) if getattr(value, "__dict__", None) else ()
        return (attributes, *((key, _look(one, names, deep - 1)) for key, one in entries))
    if hasattr(type(value), "__length_hint__"):
        return operator.length_hint(value)
    return _of_object(value, names, deep)


def _of_function(value: Any, names: frozenset[str], deep: int) -> Any:
    if isinstance(value, MethodType):
        return _look(value.__self__, names, deep - 1)
    cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
    own = tuple(_look(cell.cell_contents, names, deep - 1) for cell in cells)
    return (*own, *(_look(value.__dict__[name], names, deep - 1) for name in sorted(names & set(value.__dict__))))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _of_object(value: Any, names: frozenset[str], deep: int) -> Any:
    """The attributes of these names: of an instance, of its classes, of a Python module."""
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    own = [getattr(value, "__dict__", {}), *(vars(one) for one in classes if not _is_torch_s(one))]
    if isinstance(value, nn.Module):
        own.append(value.__dict__.get("_modules", {}))
    found: dict[str, Any] = {}
    for attributes in own:
        for name in names.intersection(attributes):
            held = attributes[name]
            if type(held).__name__ == "member_descriptor" and not isinstance(value, type):
                held = getattr(value, name, None)
            found.setdefault(name, held)
    return tuple((name, _look(found[name], names, deep - 1)) for name in sorted(found))


def _is_torch_s(cls: type) -> bool:
    return cls.__module__ == "builtins" or cls.__module__.split(".")[0] == "torch"
