"""What code can tell a layer by, besides what it holds: that it is this very one.

`scales[self]`, `everyone.index(self)` and `self is owner.layers[-1]` are other for each of two layers that hold equal
values. Each needs something that both layers share and that leads to one of them: a table with modules for keys, a list
of all layers, their owner. What leads to neither is for both the same. `table[id(self)]` needs no such thing, but it
has to ask for the number.

    SharedByLayers()                              what the code that runs has at hand, whichever layer runs it
      .add(code, space, kinds)              a function that is called: its code, its globals, classes of its arguments
      .asks_for_identity                    whether one of these functions asks for the identity of something
      .leads_to(things, identities)         whether what is shared leads to one of these
"""

from __future__ import annotations

import builtins
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Set
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from csc.capture.code_names import globals_read, imported
from csc.capture.dedup.equality import PLAIN

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
        asked = {name for name in NUMBERS & globals_read(code) if name not in space}
        if asked or not METHODS.isdisjoint(code.co_names):
            self.asks_for_identity = True
        package = space.get("__package__") or ""
        for name in imported(code):
            self._take(sys.modules.get(f"{package}.{name}") or sys.modules.get(name), names)
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
        told = {*identities, *map(id, TOLD)}
        return (
            len(self._reached) + len(reached) > MOST
            or not told.isdisjoint(self._reached)
            or not told.isdisjoint(reached)
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
