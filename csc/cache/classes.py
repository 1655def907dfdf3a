"""Classes, as descriptions refer to them: each has a number, in the order in which they were met.

Two classes of one name in two files, or in one file that was loaded twice, are two numbers. What a class is (its
bases, its functions' code, values in it) is told once, under its number.

    classes = Classes(describer); classes.number(kind, "model.act") -> 7         classes.tree() -> of all so far
    classes.methods -> of own classes: their functions, for csc.cache.reads
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum, EnumMeta
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Protocol

from csc.cache.bytecode import facts
from csc.cache.class_sources import functions_of, is_own_class, is_own_function, is_put_there, path_of, torch_folder
from csc.cache.indescribable import Opaque
from csc.cache.origins import Origins, distribution, is_own, is_source

DESCRIPTORS = (property, classmethod, staticmethod, MemberDescriptorType, GetSetDescriptorType)
HELPING = ("transformers",)  # puts methods of its own into nn.Module when it makes its first model
OF_DYNAMO = ("__compiled_fn_", "__resume_at_", "__import_", "__builtins_dict__")  # put into modules that it compiles
MAKING = ("__init__", "__setstate__")  # of modules, where Dynamo puts its own once it has compiled anything
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
PLAIN = (bool, int, float, str)
OF_CLASSES = {  # what Python and dataclasses put into every class
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__slots__", "__hash__",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__", "__parameters__", "_abc_impl",
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__",
    "__static_attributes__", "__type_params__", "__classcell__", "__replace__",
}  # fmt: skip


class Describes(Protocol):
    """Describes what classes hold, as csc.cache.describe does; where: its name, as errors give it."""

    origins: Origins

    def tree(self, value: Any, where: str) -> Any: ...

    def function(self, function: FunctionType, where: str) -> Any: ...


class Classes:
    """The classes that a Describer has met."""

    def __init__(self, describer: Describes) -> None:
        self.methods: list[tuple[type, str, FunctionType]] = []
        self._describer = describer
        self._numbers: dict[type, int] = {}
        self._facts: list[Any] = []
        self._modules: dict[str, list[Any]] = {}  # of somebody else: what stands in them now

    def number(self, kind: type, where: str) -> int:
        """Of a class; it and its bases are described when they are met first."""
        if kind not in self._numbers:
            number = self._numbers[kind] = len(self._numbers)
            self._facts.append(None)
            self._facts[number] = self._described(kind, where)
        return self._numbers[kind]

    def tree(self) -> Any:
        """What the classes are."""
        return [self._facts, sorted(self._modules.items())]

    def _described(self, kind: type, where: str) -> Any:
        path = path_of(kind)
        own = path is not None and is_own(path)
        name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
        if path is None:
            if kind.__module__ == "__main__" or kind.__module__ not in sys.modules:
                raise Opaque(f"{where}: {kind.__qualname__} is in no file")
            return [name]
        module = sys.modules[kind.__module__]
        self._describer.origins.file(path, module.__package__ or "")
        bases = [self.number(one, where) for one in kind.__mro__[1:-1]]
        meta = self.number(type(kind), where) if is_own_class(type(kind)) else type(kind).__qualname__
        members = [fact for n, member in list(vars(kind).items()) for fact in self._member(n, member, kind, path)]
        if not path.startswith(torch_folder()):
            self._replaced(module, path)
        return [PurePath(path).name if own else "", name, bases, meta, members]

    def _member(self, name: str, member: Any, kind: type, path: str) -> Iterator[Any]:
        """What a class holds under a name: that code may have been put there after the class was made."""
        where = f"{PurePath(path).name}: {kind.__qualname__}.{name}"
        functions = list(functions_of(member))
        for function in functions:
            file = function.__code__.co_filename
            if file.startswith("<") and (name.startswith("__") or not is_own(path)):
                yield [name, facts(function.__code__).digest]  # written by a decorator of the class, such as dataclass
                continue
            if not is_source(file):
                raise Opaque(f"{where} is in no file")
            if not is_own(file):
                made_by_torch = name in MAKING and file.startswith(torch_folder())
                if path.startswith(torch_folder()) and (made_by_torch or distribution(file) in HELPING):
                    continue
                yield [name, _signature(function)]
            else:
                yield [name, self._describer.function(function, where)]
                self.methods.append((kind, name, function))
        if functions or name in OF_CLASSES:
            return
        if isinstance(kind, EnumMeta):
            if isinstance(member, Enum):
                yield [name, self._describer.tree(member.value, where)]
        elif type(member) in PLAIN:
            if not (name.startswith("__") and not is_own(path)):
                yield [name, self._describer.tree(member, where)]
        elif is_own(path) and not isinstance(member, DESCRIPTORS) and type(member).__name__ != "_tuplegetter":
            yield [name, self._describer.tree(member, where)]
        elif isinstance(member, BUILT_IN):
            yield [name, member.__qualname__]
        elif is_put_there(member):
            yield [name, self._describer.tree(member, where)]

    def _replaced(self, module: ModuleType, path: str) -> None:
        """The functions and classes that a module of somebody else has, some of which may have been put there."""
        if is_own(path) or module.__name__ in self._modules:
            return
        described: list[Any] = []
        self._modules[module.__name__] = described
        for name, value in list(vars(module).items()):
            if name.startswith(OF_DYNAMO):
                continue
            registered = isinstance(value, Mapping) and not isinstance(value, dict)
            for key, one in list(value.items()) if registered else [("", value)]:
                where = f"{module.__name__}.{name}"
                for function in functions_of(one):
                    described.append([name, str(key), _signature(function)])
                    if is_own_function(function):
                        described.append([name, str(key), self._describer.tree(function, where)])
                if isinstance(one, type):
                    known = self.number(one, where) if is_own_class(one) else [one.__module__, one.__qualname__]
                    described.append([name, str(key), known])
                elif is_put_there(one):
                    described.append([name, str(key), self._describer.tree(one, where)])
                elif type(one) in (bool, int, float) and not name.startswith("__"):
                    described.append([name, str(key), repr(one)])


def _signature(function: FunctionType) -> Any:
    """Which of an installed distribution's functions it is; of an own one what it does."""
    if is_own_function(function):
        return [function.__qualname__, facts(function.__code__).digest]
    return [function.__module__, function.__qualname__, function.__code__.co_name, function.__code__.co_firstlineno]
