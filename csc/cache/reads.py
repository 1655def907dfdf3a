"""What the code of a model looks at: the values that own functions and methods read of modules, however they get there.

Terms
  own        of the user's files; what installed code looks at is taken to follow from its version
  reached    from `forward`, as far as names tell: a method is where code that is reached uses its name
  world      what lies outside of the process or changes by itself (csc.cache.world)

    reads(describer) -> tree        after everything else has been described. Opaque, with file and line, if code that
                                    is reached asks the world
"""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Iterator
from pathlib import PurePath
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from csc import devices
from csc.cache import world
from csc.cache.bytecode import Facts, facts
from csc.cache.class_sources import CACHED, functions_of, is_own_class, is_own_function
from csc.cache.describe import Describer
from csc.cache.indescribable import Opaque
from csc.cache.origins import file_of, is_own, is_source

INERT = ("typing", "__future__", "types")  # nothing that a result depends on beyond its name
NOT_IN_FORWARD = {  # methods that objects and models have for other ends
    "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__",
    "extra_repr", "state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict", "train", "eval",
    "reset_parameters", "_init_weights", "init_weights", "post_init", "from_pretrained", "save_pretrained", "generate",
    "prepare_inputs_for_generation", "tie_weights", "to", *devices.TYPES, "apply", "_apply",
}  # fmt: skip


def reads(describer: Describer) -> Any:
    """What the code that the describer has met looks at, that code's own included."""
    found = _Reads(describer)
    found.follow()
    found.check()
    return found.values


class _Reads:
    def __init__(self, describer: Describer) -> None:
        self.values: list[Any] = []
        self._describer = describer
        self._known: dict[tuple[int, str], ModuleType | None] = {}  # (namespace, name) that have been described
        self._named: dict[FunctionType, list[FunctionType]] = {}  # functions that a function names
        self._asks: dict[FunctionType, list[str]] = {}  # what of the world
        self._dynamic = False
        self._names = set[str]()

    def follow(self) -> None:
        """Describe what functions look at, and what the functions found with it look at, until there are no more."""
        waiting, methods = 0, 0
        while True:
            functions = list(self._describer.functions)
            found = self._describer.classes.methods
            if waiting < len(functions):
                self._look(functions[waiting])
                waiting += 1
            elif methods < len(found):
                self._look(found[methods][2])
                methods += 1
            elif not self._look_into_escaped():
                return

    def _look(self, function: FunctionType) -> None:
        if function in self._named or not is_own_function(function):
            return
        self._named[function] = []
        known = facts(function.__code__)
        self._names |= known.names
        self._dynamic = self._dynamic or known.dynamic
        space = function.__globals__
        for name in sorted(known.attributes & world.ATTRIBUTES):
            self._ask(function, 0, f"reads files (`{name}`)")
        for name, line in known.globals:
            if name in space:
                self._value(function, space, name, line, known)
            elif name in world.BUILTINS and hasattr(builtins, name):
                self._ask(function, line, f"calls `{name}`")
        for name, above, inner, line in known.imports:
            whole = self._imported(function, name, above, line, known)
            for one in inner:
                if sys.modules.get(whole) is not None and one not in vars(sys.modules[whole]):
                    self._imported(function, f"{whole}.{one}", 0, line, known)

    def _imported(self, function: FunctionType, name: str, above: int, line: int, known: Facts) -> str:
        package = str(function.__globals__.get("__package__") or "").split(".")
        parts = [*package[: len(package) + 1 - above], *filter(None, [name])] if above else [name]
        whole = ".".join(filter(None, parts))
        module = sys.modules.get(whole)
        if module is None:
            path = file_of(whole, str(PurePath(function.__code__.co_filename).parent))
            if path is not None and is_own(path[0]):
                self._ask(function, line, f"imports {whole}, which was not loaded before")
            return whole
        for one in (module, sys.modules.get(whole.partition(".")[0])):
            if one is not None:
                self._module(function, one, line, known, set())
        return whole

    def _value(self, function: FunctionType, space: dict[str, Any], name: str, line: int, known: Facts) -> None:
        """What a function finds under a name that it uses, in its own module or another one."""
        value = space[name]
        if isinstance(value, ModuleType):
            self._module(function, value, line, known, set())
            return
        if isinstance(value, type):
            if issubclass(value, nn.Module):  # it may be made in forward
                constructors = [f for one in value.__mro__ for f in functions_of(vars(one).get("__init__"))]
                self._named[function] += filter(is_own_function, constructors)
        else:
            self._named[function] += filter(is_own_function, functions_of(value))
        if what := world.asked(value):
            self._ask(function, line, f"uses {what}")
            return
        if (id(space), name) in self._known or _inert(value):
            return
        self._known[id(space), name] = None
        place = f"{PurePath(str(space.get('__file__', ''))).name}: {name}"
        self.values.append([place, self._described(value, place)])

    def _described(self, value: Any, place: str) -> Any:
        if isinstance(value, type):
            return self._describer.classes.number(value, place)
        if isinstance(value, FunctionType) or type(value) is CACHED:
            trees = []
            for one in functions_of(value):
                trees.append(self._describer.function(one, place))
                self._look(one)
            return trees
        return self._describer.tree(value, place)

    def _module(self, function: FunctionType, module: ModuleType, line: int, known: Facts, seen: set[int]) -> None:
        """What a function finds in a module that it names: whatever there has a name that the function uses."""
        if id(module) in seen or module.__name__.partition(".")[0] == "csc":
            return
        seen.add(id(module))
        space = vars(module)
        if what := world.asked_of(module, known.names):
            self._ask(function, line, f"uses {what}")
            return
        path = getattr(module, "__file__", None) or ""
        if is_source(path) and is_own(path):
            self._describer.tree(module, module.__name__)
            names = list(space) if known.dynamic else [*known.names, "__getattr__"]
            for name in sorted(name for name in names if name in space and not _of_python(name)):
                value = space[name]
                if isinstance(value, ModuleType):
                    self._module(function, value, line, known, seen)
                else:
                    self._value(function, space, name, line, known)
            return
        for name in sorted(known.names):
            if name in space:
                if isinstance(space[name], ModuleType):
                    self._module(function, space[name], line, known, seen)
                else:
                    self._installed(function, module, name)

    def _installed(self, function: FunctionType, module: ModuleType, name: str) -> None:
        """A value of somebody else's module: which one it is; what it is where it is the user's, or plain."""
        value = vars(module)[name]
        self._named[function] += filter(is_own_function, functions_of(value))
        if (id(vars(module)), name) in self._known:
            return
        self._known[id(vars(module)), name] = None
        place = f"{module.__name__}.{name}"
        try:
            self.values.append([place, self._described(value, place)])
        except Opaque:
            self.values.append([place, type(value).__qualname__])

    def _look_into_escaped(self) -> bool:
        """What is in own modules that are values, under names that any code uses. False if that is known."""
        before = len(self._known)
        for module in list(self._describer.escaped.values()):
            space = vars(module)
            names = space.keys() if self._dynamic else self._names & space.keys()
            for name in sorted(names):
                value = space[name]
                if (_of_python(name) and name != "__getattr__") or (id(space), name) in self._known:
                    continue
                self._known[id(space), name] = None
                if isinstance(value, ModuleType) or not _inert(value):
                    place = f"{PurePath(str(space.get('__file__', ''))).name}: {name}"
                    self.values.append([place, self._describer.tree(value, place)])
        return len(self._known) > before

    # what forward reaches of it

    def _ask(self, function: FunctionType, line: int, what: str) -> None:
        file = PurePath(function.__code__.co_filename).name
        place = f"{file}:{line or function.__code__.co_firstlineno}: {function.__qualname__}"
        self._asks.setdefault(function, []).append(f"{place} {what}, which may differ at every start")

    def check(self) -> None:
        """Opaque if code that forward reaches asks the world for something."""
        if self._asks:
            for function in self._reached():
                if function in self._asks:
                    raise Opaque(self._asks[function][0])

    def _reached(self) -> Iterator[FunctionType]:
        by_name: dict[str, list[FunctionType]] = {}
        reached = dict.fromkeys(self._describer.functions)
        for kind, name, function in self._describer.classes.methods:
            by_name.setdefault(name, []).append(function)
            if name == "forward" or _called_by_others(kind, name):
                reached[function] = None
        waiting = list(reached)
        while waiting:
            function = waiting.pop(0)
            yield function
            names = facts(function.__code__)
            called = by_name if names.dynamic else names.names & by_name.keys()
            for one in (*self._named.get(function, ()), *(f for name in called for f in by_name[name])):
                if one not in reached:
                    reached[one] = None
                    waiting.append(one)


def _called_by_others(kind: type, name: str) -> bool:
    """True for a method that Python calls by itself, or that a class of somebody else may call under its own name."""
    if name in NOT_IN_FORWARD:
        return False
    if name.startswith("__") and name.endswith("__"):
        return not (name == "__init__" and issubclass(kind, nn.Module))
    return any(name in vars(one) for one in kind.__mro__ if not is_own_class(one))


def _inert(value: Any) -> bool:
    named = type(value).__module__ in INERT and not isinstance(value, SimpleNamespace)
    return isinstance(value, logging.Logger) or named


def _of_python(name: str) -> bool:
    """True for what Python itself puts into a module."""
    return name.startswith("__") and name.endswith("__") and name != "__getattr__"
