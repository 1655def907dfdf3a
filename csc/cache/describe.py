"""Any value as plain text, so that equal values read equal in every process; what cannot be told is an error.

Terms
  tree       nested lists of numbers, strings, booleans and None: JSON
  opaque     a value whose state Python cannot show (an object of a C extension, a code without a file)
  found      code that is reached from the model: csc.cache.reads describes what it looks at
  escaped    an own module that is a value somewhere: code may look up anything in it

    describer = Describer(Origins()); describer.tree(value, "model.act") -> tree         Opaque names the place
    describer.model(model) -> tree
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from csc.cache.bytecode import facts
from csc.cache.class_sources import CACHED, has_source, of_transformers, slots
from csc.cache.classes import Classes
from csc.cache.indescribable import Opaque
from csc.cache.origins import Origins, is_own, is_source
from csc.capture import batch
from csc.torch_private.exported import OpOverload
from csc.torch_private.hooks import hooks_of_all_modules, hooks_of_tensor

PLACES = {"name_or_path", "_name_or_path", "_commit_hash"}  # where weights came from
INERT = {"generation_config", batch.INSTALLED, "_is_hf_initialized"}  # not for training
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_MODULES = {"training", "_parameters", "_buffers", "_modules"} | {
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called", "_set"))
}
NAMED = (torch.dtype, torch.layout, torch.memory_format, OpOverload)
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
SIMPLE = (complex, bytes, bytearray, range, slice, type(Ellipsis), type(NotImplemented))
MAPPINGS = (dict, MappingProxyType, OrderedDict, defaultdict, Counter)


class Describer:
    """Describes values, and collects in `origins` where their code comes from."""

    def __init__(self, origins: Origins, device: str = "cpu") -> None:
        """device: the kind of device that parameters without data stand for."""
        self.origins = origins
        self.classes = Classes(self)
        self.functions: dict[FunctionType, None] = {}  # found as values, not as methods
        self.escaped: dict[int, ModuleType] = {}
        self._device = device
        self._known: dict[int, Any] = {}  # descriptions
        self._open: dict[int, int] = {}  # what is being described, each within the one before
        self._alive: list[Any] = []  # an id is a name as long as its object lives
        self._paths: dict[int, str] = {}

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

    def hooks_of_all(self) -> Any:
        """Hooks that every module has."""
        return [[kind, self.tree(hooks, f"hooks of all modules ({kind})")] for kind, hooks in hooks_of_all_modules()]

    def _parameter(self, name: str, parameter: nn.Parameter) -> Any:
        if type(parameter) is not nn.Parameter:
            raise Opaque(f"parameter {name} is a {type(parameter).__name__}")
        data = parameter.data
        device = data.device.type if data.device.type != "meta" else self._device
        said = self.tree(hooks_of_tensor(parameter), f"hooks of {name}"), self._said_of(parameter, name)
        return [str(data.dtype), list(data.shape), list(data.stride()), device, *said]

    def _said_of(self, tensor: torch.Tensor, where: str) -> Any:
        """Attributes that a tensor was given."""
        given = {name: value for name, value in vars(tensor).items() if name not in INERT}
        return [[name, self.tree(value, f"{where}.{name}")] for name, value in sorted(given.items())]

    def _apart(self, module: nn.Module, where: str) -> Any:
        """Of a module that is not a part of the model: its weights are constants."""
        weights = [self._tensor(parameter, where) for parameter in module.parameters()]
        return ["apart", self.model(module, f"{where}: "), weights]

    def _module(self, path: str, module: nn.Module) -> Any:
        where = path or "model"
        hooks = [self._hooks(module, kind, where) for kind in HOOKS]
        left_out = OF_MODULES | (PLACES | INERT if of_transformers(type(module)) else set())
        own = {name: value for name, value in vars(module).items() if name not in left_out}
        state = [[name, self.tree(value, f"{where}.{name}")] for name, value in sorted(own.items())]
        return [self.classes.number(type(module), where), module.training, state, hooks]

    def _hooks(self, module: nn.Module, kind: str, where: str) -> Any:
        with_kwargs = vars(module).get(f"{kind}_with_kwargs", {})
        found = {k: h for k, h in getattr(module, kind).items() if not batch.is_recorder(h)}
        return [[self.tree(hook, f"{where}.{kind}"), key in with_kwargs] for key, hook in found.items()]

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise Opaque(f"{where} is a {type(tensor).__name__} of layout {tensor.layout}")
        kind = [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.device.type]
        kind.append(self._said_of(tensor, where))
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
        if type(value) in SIMPLE:
            return [type(value).__name__, repr(value)]
        if isinstance(value, NAMED):
            return ["torch", str(value)]
        if isinstance(value, torch.device):
            return ["device", value.type]
        if isinstance(value, Enum):
            return ["enum", self.classes.number(type(value), where), value.name]
        if isinstance(value, re.Pattern):
            return ["pattern", self.tree(value.pattern, where), value.flags]
        if isinstance(value, (PurePath, logging.Logger)):
            return [type(value).__name__, value.name if isinstance(value, logging.Logger) else str(value)]
        if isinstance(value, (np.ndarray, np.generic)):
            return _array(value, where)
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
            return self._apart(value, where)
        if isinstance(value, ModuleType):
            return self._python_module(value, where)
        if isinstance(value, type):
            return ["class", self.classes.number(value, where)]
        if isinstance(value, FunctionType):
            self.functions[value] = None
            return ["function", self.function(value, where)]
        if type(value) is CACHED:
            return ["cached", self.tree(value.__wrapped__, where)]
        if isinstance(value, MethodType):
            return ["method", self.tree(value.__func__, where), self.tree(value.__self__, where)]
        if isinstance(value, functools.partial):
            return ["partial", *(self.tree(one, where) for one in (value.func, value.args, value.keywords))]
        if isinstance(value, BUILT_IN):
            holder = getattr(value, "__self__", None)
            held = None if isinstance(holder, (ModuleType, type)) else self.tree(holder, where)
            return ["built in", value.__module__ or "", value.__qualname__, held]
        if isinstance(value, weakref.ref):
            return ["weak", self.tree(value(), where)]
        if type(value) in (list, tuple, deque, torch.Size):
            return [type(value).__name__, *(self.tree(one, where) for one in value)]
        if isinstance(value, (set, frozenset)) and type(value) in (set, frozenset):
            return ["set", *sorted((self.tree(one, where) for one in value), key=json.dumps)]
        if type(value) in MAPPINGS:
            default = self.tree(getattr(value, "default_factory", None), where)
            return [type(value).__name__, default, *self._items(value, where)]
        if type(value) is SimpleNamespace:
            return ["namespace", *self._items(vars(value), where)]
        return self._object(value, where)

    def _items(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        return [[self.tree(key, where), self.tree(one, f"{where}[{key!r}]")] for key, one in value.items()]

    def _object(self, value: Any, where: str) -> Any:
        """An object of Python classes is what is in its attributes, and in the container that it is."""
        kind = type(value)
        bases = [one for one in kind.__mro__ if not has_source(one)]
        plain = {object, dict, list, tuple, int, str, float, set}
        if not all(base in plain or base.__module__ in ("typing", "abc", "collections", "enum") for base in bases):
            raise Opaque(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        if bases == [kind] or not has_source(kind):
            raise Opaque(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        left_out = PLACES if of_transformers(kind) else set()
        filled = [name for one in kind.__mro__ for name in slots(one) if hasattr(value, name)]
        state = {**{name: getattr(value, name) for name in filled}, **getattr(value, "__dict__", {})}
        attributes = [[n, self.tree(v, f"{where}.{n}")] for n, v in sorted(state.items()) if n not in left_out]
        held: Any = None
        if isinstance(value, dict):
            held = self._items(value, where)
            held.append(self.tree(getattr(value, "default_factory", None), where))
        elif isinstance(value, list):
            held = [self.tree(one, where) for one in list.__iter__(value)]
        elif isinstance(value, tuple):
            held = [self.tree(one, where) for one in tuple.__iter__(value)]
        elif isinstance(value, (int, str, float)):
            held = next(one for one in (int, str, float) if isinstance(value, one)).__repr__(value)
        elif isinstance(value, (set, deque)):
            raise Opaque(f"{where} is a {kind.__qualname__}, a set or a queue")
        described = json.dumps([self.classes.number(kind, where), attributes, held])
        return ["object", hashlib.sha256(described.encode()).hexdigest()]  # there may be one in every module

    def _python_module(self, module: ModuleType, where: str) -> Any:
        path = getattr(module, "__file__", None) or ""
        if is_source(path) and is_own(path):
            self.origins.file(path, getattr(module, "__package__", None) or "")
            self.escaped[id(module)] = module
            if type(module) is not ModuleType:
                return ["import", module.__name__, self.classes.number(type(module), where)]
        return ["import", module.__name__]

    def function(self, function: FunctionType, where: str) -> Any:
        """A function's code and what it holds: closure, defaults, attributes."""
        code = function.__code__
        if not is_source(code.co_filename):
            raise Opaque(f"{where} is the function {function.__qualname__}, which is in no file")
        self.origins.file(code.co_filename, _package(function))
        cells = [_content(cell) for cell in function.__closure__ or ()]
        closure = [self.tree(one, f"{where}: {name}") for name, one in zip(code.co_freevars, cells)]
        defaults = [self.tree(function.__defaults__, where), self.tree(function.__kwdefaults__, where)]
        attributes = self.tree(vars(function), where) if vars(function) else None
        return [function.__qualname__, facts(code).digest, closure, defaults, attributes]


def _array(value: np.ndarray | np.generic, where: str) -> Any:
    if value.dtype.hasobject:
        raise Opaque(f"{where} is an array of objects")
    return ["numpy", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]


def _package(function: FunctionType) -> str:
    return getattr(sys.modules.get(function.__module__ or ""), "__package__", None) or ""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
