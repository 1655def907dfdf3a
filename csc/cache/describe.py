"""Any value as plain text, so that equal values read equal in every process; what cannot be told is an error.

Terms
  tree       nested lists of numbers, strings, booleans and None: JSON
  opaque     a value whose state Python cannot show (an object of a C extension, a code without a file)

    describer = Describer(Origins()); describer.tree(value, "model.act") -> tree         Opaque names the place
    describer.module(model) -> tree
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import re
import sys
import weakref
from abc import ABCMeta
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum, EnumMeta
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from csc.cache.origins import Origins, is_own, is_source
from csc.torch_private import OpOverload

PLACES = {"name_or_path", "_name_or_path", "_commit_hash"}  # where weights came from
INERT = {"generation_config", "_output_capturing_hooks_installed"}  # of transformers models: not for training
INERT_HOOKS = ("transformers.utils.output_capturing",)  # put there by the first forward, to hand hidden states out
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_MODULES = {"training", "_parameters", "_buffers", "_modules"} | {
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called", "_set"))
}
NAMED = (torch.dtype, torch.layout, torch.memory_format, OpOverload)
DESCRIPTORS = (property, classmethod, staticmethod, MemberDescriptorType, GetSetDescriptorType)
CACHED = type(functools.lru_cache(len))
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


class Opaque(ValueError):
    """A value that has no description."""


class Describer:
    """Describes values, and collects in `origins` where their code comes from."""

    def __init__(self, origins: Origins, device: str = "cpu") -> None:
        """device: the kind of device that parameters without data stand for."""
        self.origins = origins
        self._device = device
        self._known: dict[int, Any] = {}  # descriptions
        self._open: dict[int, int] = {}  # what is being described, each within the one before
        self._alive: list[Any] = []  # an id is a name as long as its object lives
        self._paths: dict[int, str] = {}
        self._classes: dict[type, None] = {}
        self._functions: dict[FunctionType, None] = {}
        self._code: dict[str, Any] = {}  # of classes and modules: what functions they have now

    def model(self, model: nn.Module, prefix: str = "") -> Any:
        """The whole module tree: classes, attributes, hooks, parameters up to their values, contents of buffers."""
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), prefix + path)
        modules = [[path, self._module(path, module)] for path, module in model.named_modules()]
        shared = [[path, self._paths[id(m)]] for path, m in model.named_modules(remove_duplicate=False)]
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        parameters = [[names[id(p)], self._parameter(name, p)] for name, p in model.named_parameters()]
        buffers = [[name, self._tensor(b, name)] for name, b in model.named_buffers(remove_duplicate=False)]
        return [modules, shared, parameters, buffers]

    def _parameter(self, name: str, parameter: nn.Parameter) -> Any:
        if type(parameter) is not nn.Parameter:
            raise Opaque(f"parameter {name} is a {type(parameter).__name__}")
        data = parameter.data
        device = data.device.type if data.device.type != "meta" else self._device
        return [str(data.dtype), list(data.shape), list(data.stride()), device]

    def _module(self, path: str, module: nn.Module) -> Any:
        where = path or "model"
        hooks = [self._hooks(module, kind, where) for kind in HOOKS]
        left_out = OF_MODULES | (PLACES | INERT if _of_transformers(type(module)) else set())
        own = {name: value for name, value in vars(module).items() if name not in left_out}
        state = [[name, self.tree(value, f"{where}.{name}")] for name, value in sorted(own.items())]
        return [self._class(type(module), where), module.training, state, hooks]

    def _hooks(self, module: nn.Module, kind: str, where: str) -> Any:
        with_kwargs = vars(module).get(f"{kind}_with_kwargs", {})
        found = {k: h for k, h in getattr(module, kind).items() if getattr(h, "__module__", "") not in INERT_HOOKS}
        return [[self.tree(hook, f"{where}.{kind}"), key in with_kwargs] for key, hook in found.items()]

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise Opaque(f"{where} is a {type(tensor).__name__} of layout {tensor.layout}")
        kind = [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.device.type]
        if tensor.device.type == "meta":
            return kind
        data = tensor.detach().cpu().contiguous().reshape(-1)
        content = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return [*kind, hashlib.sha256(content).hexdigest()]

    def tree(self, value: Any, where: str) -> Any:
        """The description. Opaque, with the place in the model, if there is none."""
        if value is None or isinstance(value, bool) or type(value) in (int, str):
            return value
        if type(value) is float:
            return ["float", value.hex()]
        if isinstance(value, (complex, bytes, bytearray, range, slice, type(Ellipsis), type(NotImplemented))):
            return [type(value).__name__, repr(value)]
        if isinstance(value, NAMED):
            return ["torch", str(value)]
        if isinstance(value, torch.device):
            return ["device", value.type]
        if isinstance(value, Enum):
            return ["enum", self._class(type(value), where), value.name]
        if isinstance(value, (PurePath, re.Pattern, logging.Logger)):
            return [type(value).__name__, value.name if isinstance(value, logging.Logger) else str(value)]
        if id(value) in self._paths:
            return ["module", self._paths[id(value)]]
        name = id(value)
        if name in self._open:
            return ["within", len(self._open) - self._open[name]]
        if name not in self._known:
            self._open[name] = len(self._open)
            self._known[name] = self._composed(value, where)
            del self._open[name]
            self._alive.append(value)
        return self._known[name]

    def _composed(self, value: Any, where: str) -> Any:
        """Of a value that may hold others, itself among them."""
        if isinstance(value, torch.Tensor):
            return ["tensor", *self._tensor(value, where)]
        if isinstance(value, nn.Module):
            return ["apart", self.model(value, f"{where}: ")]
        if isinstance(value, ModuleType):
            return ["import", value.__name__]
        if isinstance(value, type):
            return ["class", self._class(value, where)]
        if isinstance(value, FunctionType):
            return ["function", self._function(value, where)]
        if isinstance(value, MethodType):
            return ["method", self.tree(value.__func__, where), self.tree(value.__self__, where)]
        if isinstance(value, functools.partial):
            return ["partial", *(self.tree(one, where) for one in (value.func, value.args, value.keywords))]
        if isinstance(value, BUILT_IN):
            holder = getattr(value, "__self__", None)
            if holder is not None and not isinstance(holder, (ModuleType, type)):
                raise Opaque(f"{where} is a method of a {type(holder).__name__}")
            return ["built in", value.__module__ or "", value.__qualname__]
        if isinstance(value, weakref.ref):
            return ["weak", self.tree(value(), where)]
        if type(value) in (list, tuple, deque, torch.Size):
            return [type(value).__name__, *(self.tree(one, where) for one in value)]
        if isinstance(value, (set, frozenset)) and type(value) in (set, frozenset):
            return ["set", *sorted((self.tree(one, where) for one in value), key=json.dumps)]
        if type(value) in (dict, MappingProxyType):
            return ["dict", *self._items(value, where)]
        return self._object(value, where)

    def _items(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        return [[self.tree(key, where), self.tree(one, f"{where}[{key!r}]")] for key, one in value.items()]

    def _object(self, value: Any, where: str) -> Any:
        """An object of Python classes is what is in its attributes, and in the container that it is."""
        kind = type(value)
        bases = [one for one in kind.__mro__ if not _has_source(one)]
        plain = {object, dict, list, tuple, int, str, float, set}
        if not all(base in plain or base.__module__ in ("typing", "abc", "collections", "enum") for base in bases):
            raise Opaque(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        if bases == [kind] or not _has_source(kind):
            raise Opaque(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        left_out = PLACES if _of_transformers(kind) else set()
        slots = [name for one in kind.__mro__ for name in _slots(one) if hasattr(value, name)]
        state = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
        attributes = [[n, self.tree(v, f"{where}.{n}")] for n, v in sorted(state.items()) if n not in left_out]
        held: Any = None
        if isinstance(value, dict):
            held = self._items(value, where)
        elif isinstance(value, (list, tuple)):
            held = [self.tree(one, where) for one in value]
        elif isinstance(value, (int, str, float)):
            held = repr(value)
        elif isinstance(value, set):
            raise Opaque(f"{where} is a {kind.__qualname__}, a set")
        described = json.dumps([self._class(kind, where), attributes, held])
        return ["object", hashlib.sha256(described.encode()).hexdigest()]  # there may be one in every module

    # code

    def _class(self, kind: type, where: str) -> Any:
        """A class: where it and its bases come from, and what its methods look at."""
        if kind not in self._classes:
            self._classes[kind] = None
            for one in kind.__mro__:
                self._look_into(one, where)
        path = _path_of(kind)
        known = kind.__qualname__ if path and is_own(path) else f"{kind.__module__}.{kind.__qualname__}"
        return [known, *([one.__qualname__ for one in kind.__mro__[1:-1]])]

    def _look_into(self, kind: type, where: str) -> None:
        path = _path_of(kind)
        if path is None:
            if kind.__module__ == "__main__" or kind.__module__ not in sys.modules:
                raise Opaque(f"{where}: {kind.__qualname__} is in no file")
            return
        module = sys.modules[kind.__module__]
        self.origins.file(path, module.__package__ or "")
        if path.startswith(_torch_folder()):
            return
        place = f"{PurePath(path).name if is_own(path) else kind.__module__}.{kind.__qualname__}"
        self._code[place] = [fact for n, member in vars(kind).items() for fact in self._member(n, member, kind, path)]
        self._replaced(module, path)

    def _member(self, name: str, member: Any, kind: type, path: str) -> Iterator[Any]:
        """What a class holds under a name: that code may have been put there after the class was made."""
        where = f"{kind.__qualname__}.{name}"
        functions = list(_functions(member))
        for function in functions:
            file = function.__code__.co_filename
            if file.startswith("<"):
                continue  # written by a decorator of the class, such as dataclass
            if not is_source(file):
                raise Opaque(f"{where} is in no file")
            yield [name, self._signature(function)]
            if file != path and is_own(file):
                yield [name, self.tree(function, where)]
        if functions or name.startswith("__") or name == "_abc_impl" or isinstance(kind, EnumMeta):
            return
        if type(member) in (bool, int, float, str) or (is_own(path) and not isinstance(member, DESCRIPTORS)):
            yield [name, self.tree(member, where)]

    def _signature(self, function: FunctionType) -> Any:
        """A function's name, and of an own one what it does."""
        if _is_own(function):
            self.origins.file(function.__code__.co_filename, _package(function))
            return [function.__qualname__, _code(function.__code__)]
        return [function.__module__, function.__qualname__]

    def _replaced(self, module: ModuleType, path: str) -> None:
        """The functions and classes that a module of somebody else has, some of which may have been put there."""
        if is_own(path) or module.__name__ in self._code:
            return
        facts: list[Any] = []
        self._code[module.__name__] = facts
        for name, value in list(vars(module).items()):
            registered = isinstance(value, Mapping) and not isinstance(value, dict)
            for key, one in list(value.items()) if registered else [("", value)]:
                where = f"{module.__name__}.{name}"
                for function in _functions(one):
                    facts.append([name, str(key), self._signature(function)])
                    if _is_own(function):
                        facts.append([name, str(key), self.tree(function, where)])
                if isinstance(one, type):
                    own = (file := _path_of(one)) is not None and is_own(file)
                    known = self._class(one, where) if own else [one.__module__, one.__qualname__]
                    facts.append([name, str(key), known])

    def _function(self, function: FunctionType, where: str) -> Any:
        code = function.__code__
        path = code.co_filename
        if not is_source(path):
            raise Opaque(f"{where} is the function {function.__qualname__}, which is in no file")
        self._functions[function] = None
        self.origins.file(path, _package(function))
        cells = [_content(cell) for cell in function.__closure__ or ()]
        closure = [self.tree(one, f"{where}: {name}") for name, one in zip(code.co_freevars, cells)]
        defaults = [self.tree(function.__defaults__, where), self.tree(function.__kwdefaults__, where)]
        wrapped = getattr(function, "__wrapped__", None)
        inner = self.tree(wrapped, where) if wrapped is not None else None
        return [function.__qualname__, _code(code), closure, defaults, inner]

    # values of own modules that code looks at

    def globals(self) -> Any:
        """Where all that code is, and what own methods and functions, and those that they name, read of their modules'
        values. To be called when everything else has been described.
        """
        found: dict[tuple[str, str], Any] = {}
        seen = set[CodeType]()
        waiting = [*self._functions, *(f for kind in self._classes for one in kind.__mro__ for f in _methods(one))]
        while waiting:
            function = waiting.pop(0)
            if function.__code__ in seen or not _is_own(function):
                continue
            seen.add(function.__code__)
            names = sorted(set(_names(function.__code__)))
            for scope in _scopes(function, names):
                for name in names:
                    value = scope.get(name)
                    where = (PurePath(str(scope.get("__file__", ""))).name, name)
                    place = f"{scope.get('__name__')}.{name}"
                    if isinstance(value, type):
                        waiting += [f for one in value.__mro__ for f in _methods(one)]
                        found.setdefault(where, self._class(value, place))
                    elif inner := list(_functions(value)):
                        waiting += inner
                        found.setdefault(where, [self._signature(one) for one in inner])
                    elif name in scope and not _inert(value):
                        found.setdefault(where, self.tree(value, place))
        return [sorted(self._code.items()), [[*where, tree] for where, tree in sorted(found.items())]]


def _is_own(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    return is_source(file) and is_own(file)


def _package(function: FunctionType) -> str:
    return getattr(sys.modules.get(function.__module__ or ""), "__package__", None) or ""


def _scopes(function: FunctionType, names: list[str]) -> list[dict[str, Any]]:
    """Where a function's names are looked up: in its module, and in the own modules that it names."""
    modules = [value for name in names if isinstance(value := function.__globals__.get(name), ModuleType)]
    return [function.__globals__, *(vars(one) for one in modules if is_own(getattr(one, "__file__", None) or ""))]


def _methods(kind: type) -> Iterator[FunctionType]:
    """Of an own class; without the constructors of modules, which have run."""
    if (path := _path_of(kind)) is None or not is_own(path):
        return
    for name, member in vars(kind).items():
        if name != "__init__" or not issubclass(kind, nn.Module):
            yield from _functions(member)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def _inert(value: Any) -> bool:
    """Modules, typing's own, loggers: nothing that a result depends on beyond its name."""
    return isinstance(value, (ModuleType, logging.Logger)) or type(value).__module__ in (
        "typing",
        "__future__",
        "types",
    )


def _code(code: CodeType) -> str:
    """A hash of what a function does, without its file and lines."""
    digest = hashlib.sha256(code.co_code)
    for one in (code.co_consts, code.co_names, code.co_varnames, code.co_freevars):
        digest.update(repr([_constant(item) for item in one]).encode())
    return digest.hexdigest()


def _constant(item: Any) -> Any:
    if isinstance(item, CodeType):
        return _code(item)
    return sorted(map(repr, item)) if isinstance(item, frozenset) else item


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _functions(member: Any) -> Iterator[FunctionType]:
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


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(n for n in ((slots,) if isinstance(slots, str) else slots) if n not in ("__weakref__", "__dict__"))


def _path_of(kind: type) -> str | None:
    """The source file of a class; None for one of C or of none."""
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return path if path and is_source(path) else None


def _has_source(kind: type) -> bool:
    """True for a class that Python code defines: what its objects hold is in their attributes."""
    return _path_of(kind) is not None and not _of_c(kind)


def _of_c(kind: type) -> bool:
    """A class of an extension may name a module of Python code as its own. It shows in methods and attributes that are
    not Python's, in objects that are larger than attributes make them, or in a class of classes of its own.
    """
    if type(kind) is not type and not isinstance(kind, (ABCMeta, EnumMeta)) and not _has_source(type(kind)):
        return True
    for name, member in vars(kind).items():
        own = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType)
        if isinstance(member, own) and member.__objclass__ is kind and name not in ("__dict__", "__weakref__"):
            return True
        if isinstance(member, BuiltinFunctionType) and member.__self__ is kind:
            return True
    words = len(_slots(kind)) + 2  # and those of __dict__ and __weakref__
    return kind.__base__ is not None and kind.__basicsize__ > kind.__base__.__basicsize__ + 8 * words


@functools.cache
def _torch_folder() -> str:
    return str(PurePath(inspect.getfile(torch)).parent)


def _of_transformers(kind: type) -> bool:
    return any(one.__module__.startswith("transformers.") for one in kind.__mro__)
