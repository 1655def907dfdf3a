"""What a model's code may read (csc.capture.reached), as plain text that is equal in every process for equal models.

What cannot be told is an error, and so is code that asks for what may differ at every start.

Terms
  tree       nested lists of numbers, strings, booleans and None: JSON
  told       described with all that it holds; each thing once, others refer to it by its number
  opaque     a value whose state Python cannot show (an object of a C extension, a code without a file)
  world      what lies outside of the process or changes by itself: the environment, files, the clock, random numbers. A
             module of Python's library counts as the world unless it is in PURE
"""

from __future__ import annotations

import array
import functools
import hashlib
import json
import logging
import re
import sys
from abc import ABCMeta
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Set
from enum import EnumMeta
from importlib.machinery import PathFinder
from operator import itemgetter
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn

from csc import devices
from csc.capture import batch
from csc.capture.code_names import digest, globals_read, line_of, modules_imported, names_read, texts
from csc.capture.reached import (
    BEHIND,
    CACHED,
    MOST,
    NOT_FOR_TRAINING,
    OF_C,
    Reached,
    are_attributes,
    is_holder,
    of_transformers,
    parts,
    slots_of,
)
from csc.capture.sources import distribution, file_of, home_of, is_own, is_source, is_users, module_of
from csc.torch_private.exported import OpOverload
from csc.torch_private.hooks import hooks_of_tensor

PLACES = {"name_or_path", "_name_or_path", "_commit_hash"}  # where weights came from
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_MODULES = {"training"} | {
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called", "_set"))
}
OF_CLASSES = {  # what Python and dataclasses put into every class
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__slots__", "__hash__",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__", "__parameters__", "_abc_impl",
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__",
    "__static_attributes__", "__type_params__", "__classcell__", "__replace__",
}  # fmt: skip
HELPING = ("transformers",)  # puts methods of its own into nn.Module when it makes its first model
OF_DYNAMO = ("__compiled_fn_", "__resume_at_", "__import_", "__builtins_dict__")  # put into modules that it compiles
MAKING = ("__init__", "__setstate__")  # of modules, where Dynamo puts its own once it has compiled anything
OF_CLASSES_IN_C = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType)
BASES = (object, dict, list, tuple, int, str, float, set, deque)  # in C, of classes whose objects can be told
NAMED = (torch.dtype, torch.layout, torch.memory_format, OpOverload)
SIMPLE = (complex, bytes, range, slice, type(Ellipsis), type(NotImplemented))
MEMORY = (bytearray, array.array)
HOLDING = (  # what is told by its parts
    list, tuple, deque, torch.Size, dict, MappingProxyType, OrderedDict, defaultdict, Counter, SimpleNamespace, CACHED,
    functools.partial, functools.partialmethod, functools.cached_property, MethodType, staticmethod, classmethod,
    property, ReferenceType, *BEHIND,
)  # fmt: skip
FIELD = type(vars(namedtuple("Pair", "one other"))["one"])
DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType, FIELD)


class Opaque(ValueError):
    """A value that has no description, or code whose result cannot be told beforehand; with its place."""


# --- Values and classes ----------------------------------------------------------------------------------------------


class Description:
    """reached: with all slots, through opaque modules too. device: the kind that parameters without data stand for."""

    def __init__(self, reached: Reached, model: nn.Module | None = None, device: str = "cpu") -> None:
        self._reached, self._model, self._device = reached, model, device
        self._numbers = {key: number for number, key in enumerate(reached.found)}
        self._members: dict[int, list[str]] = {}
        if model is not None:
            for path, module in model.named_modules():
                self._members.setdefault(id(module), ["module", path])
            for name, parameter in model.named_parameters():
                self._members.setdefault(id(parameter), ["parameter", name])

    def tree(self) -> Any:
        """All of it. Opaque, with the place in the model, for what cannot be told."""
        if not self._reached.is_whole:
            raise Opaque(f"it leads to more than {MOST} values")
        told = [self._told(path, value) for path, value in self._reached.found.values()]
        spaces = [
            [path, [[name, self._of(space.get(name))] for name, is_users in sorted(names.items()) if is_users]]
            for path, space, names in self._reached.spaces.values()
        ]
        return [self._of_model(), told, sorted(filter(_is_filled, spaces)), *self._of_libraries()]

    def _of_model(self) -> Any:
        if self._model is None:
            return []
        modules = [[path, self._module(module)] for path, module in self._model.named_modules()]
        parameters = [[name, self._parameter(name, one)] for name, one in self._model.named_parameters()]
        return [modules, parameters]

    def _of_libraries(self) -> list[Any]:
        """Versions of those that code comes from; functions and numbers in the modules of the model's classes."""
        values = [value for _, value in self._reached.found.values()]
        classes = [value for value in values if isinstance(value, type)]
        files = {value.__code__.co_filename for value in values if isinstance(value, FunctionType)}
        versions = sorted(set(map(distribution, files | set(map(file_of, classes)))))
        homes = {module_of(kind) for kind in classes if issubclass(kind, nn.Module) and distribution(file_of(kind))}
        lines = [[home, _members_of(sys.modules[home])] for home in sorted(homes) if not _is_torch(home)]
        return [versions, lines]

    def _parameter(self, name: str, parameter: nn.Parameter) -> Any:
        if type(parameter) is not nn.Parameter:
            raise Opaque(f"parameter {name} is a {type(parameter).__name__}")
        data = parameter.data
        device = data.device.type if data.device.type != "meta" else self._device
        hooks = [self._of(hook) for hook in hooks_of_tensor(parameter)]
        return [str(data.dtype), list(data.shape), list(data.stride()), device, hooks, self._said_of(parameter)]

    def _said_of(self, tensor: torch.Tensor) -> Any:
        return [[name, self._of(value)] for name, value in sorted(vars(tensor).items()) if name not in NOT_FOR_TRAINING]

    def _module(self, module: nn.Module) -> Any:
        slots = vars(module)
        left_out = OF_MODULES | (PLACES | NOT_FOR_TRAINING if of_transformers(type(module)) else set())
        attributes = [[n, self._of(value)] for n, value in sorted(slots.items()) if n not in left_out]
        attributes = [[n, told] for n, told in attributes if not is_holder(n, slots[n])]
        held = [
            [[n, self._of(one)] for n, one in slots[name].items()] for name in ("_parameters", "_buffers", "_modules")
        ]
        hooks = [
            [[self._of(hook), key in slots.get(f"{kind}_with_kwargs", ())] for key, hook in slots[kind].items()
             if not batch.is_recorder(hook)]
            for kind in HOOKS
        ]  # fmt: skip
        return [self._of(type(module)), module.training, attributes, held, hooks]

    def _of(self, value: Any) -> Any:
        """A plain value, or which of the told ones it is; of library's things their names."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return ["float", value.hex()]
        if kind in SIMPLE or isinstance(value, NAMED):
            return [kind.__name__, str(value)]
        if kind is torch.device:
            return ["device", value.type]
        if isinstance(value, np.generic):
            return ["numpy", str(value.dtype), value.tobytes().hex()]
        if id(value) in self._members:
            return self._members[id(value)]
        if id(value) in self._numbers:
            return ["told", self._numbers[id(value)]]
        return _named(value)

    def _told(self, path: str, value: Any) -> Any:
        where, kind = path.removeprefix("attribute "), type(value)
        if isinstance(value, type):
            return self._class(where, value)
        if isinstance(value, FunctionType):
            return self._function(where, value)
        if isinstance(value, ModuleType):
            return ["import", value.__name__, self._of(kind)]
        if isinstance(value, nn.Module):
            return ["apart", self._module(value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(where, value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return ["numpy", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if kind in SIMPLE or kind is torch.device or isinstance(value, (np.generic, *NAMED)):
            return self._of(value)
        if kind in DESCRIPTORS:
            return _named(value)
        if kind in MEMORY:
            return [kind.__name__, hashlib.sha256(memoryview(value).tobytes()).hexdigest()]
        if isinstance(value, re.Pattern):
            return ["pattern", self._of(value.pattern), value.flags]
        if isinstance(value, (PurePath, logging.Logger)):
            return [kind.__name__, value.name if isinstance(value, logging.Logger) else str(value)]
        if kind in (set, frozenset):
            return ["set", self._set(where, value)]
        if isinstance(value, OF_C):
            return [*_named(value), [self._of(one) for part in parts(value) for one in part.values]]
        if kind in HOLDING:
            return [kind.__name__, self._parts(value)]
        return self._object(where, value)

    def _parts(self, value: Any) -> Any:
        """What it holds, in order; attributes by name."""
        left_out = PLACES if of_transformers(type(value)) else set()
        told: list[Any] = [[self._of(key) for key in dict.keys(value)]] if isinstance(value, dict) else []
        for part in parts(value):
            held = [self._of(one) for one in part.values]
            if are_attributes(value, part):
                told.append(
                    [pair for pair in sorted(zip(part.names, held), key=itemgetter(0)) if pair[0] not in left_out]
                )
            else:
                told.append(held)
        return told

    def _set(self, where: str, value: Set[Any]) -> list[str]:
        told = [self._of(item) for item in value]
        if any(isinstance(item, list) and item[0] == "told" for item in told):
            raise Opaque(f"{where} is a set of objects, which have no order")
        return sorted(map(json.dumps, told))

    def _tensor(self, where: str, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise Opaque(f"{where} is a {type(tensor).__name__} of layout {tensor.layout}")
        kind = [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.device.type, self._said_of(tensor)]
        if tensor.device.type == "meta":
            return ["tensor", *kind]
        data = tensor.detach().cpu().contiguous().reshape(-1)
        content = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return ["tensor", *kind, hashlib.sha256(content).hexdigest()]

    def _function(self, where: str, function: FunctionType) -> Any:
        """A function's code and what it holds: closure, defaults, attributes."""
        code, name = function.__code__, function.__name__
        by_decorator = code.co_filename.startswith("<") and name.startswith("__")  # such as that of dataclasses
        if not (is_source(code.co_filename) or by_decorator):
            raise Opaque(f"{where} is the function {function.__qualname__}, which is in no file")
        if not (is_own(home_of(function)) or is_own(function.__module__)):
            return _named(function)
        cells = [self._of(_content(cell)) for cell in function.__closure__ or ()]
        held = [function.__defaults__, function.__kwdefaults__, vars(function)]
        return [function.__qualname__, digest(code), cells, *map(self._of, held)]

    def _object(self, where: str, value: Any) -> Any:
        """An object of Python classes is what is in its attributes, and in the container that it is."""
        kind = type(value)
        in_c = [base for base in kind.__mro__ if not _has_source(base)]
        fits = all(base in BASES or base.__module__ in ("typing", "abc", "collections", "enum") for base in in_c)
        if not fits or in_c == [kind] or not _has_source(kind):
            raise Opaque(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        base = next((base for base in (int, str, float) if isinstance(value, base)), None)
        content = self._set(where, value) if isinstance(value, set) else []
        return ["object", self._of(kind), base.__repr__(value) if base else "", content, self._parts(value)]

    def _class(self, where: str, kind: type) -> Any:
        """A class, its bases, and its members; of the user's classes those that code names."""
        path = file_of(kind)
        if not path:
            if module_of(kind) == "__main__" or module_of(kind) not in sys.modules:
                raise Opaque(f"{where}: {kind.__qualname__} is in no file")
            return [module_of(kind), kind.__qualname__]
        of_users, members = is_users(kind), vars(kind)
        name = kind.__qualname__ if of_users else f"{module_of(kind)}.{kind.__qualname__}"
        bases = [self._of(base) for base in (type(kind), *kind.__mro__[1:-1])]
        if of_users:
            called = self._reached.named | set(kind.__members__ if isinstance(kind, EnumMeta) else ())
            told = [[n, self._of(members[n])] for n in sorted(called & members.keys() - OF_CLASSES)]
        else:
            told = [[n, self._member(m)] for n, m in sorted(members.items()) if not _is_inert(n, m, kind)]
        return [name, bases, told]

    def _member(self, member: Any) -> Any:
        """Of an installed class: that code of the user's may have been put there."""
        known = id(member) in self._numbers or type(member) in (bool, int, float, str)
        return self._of(member) if known else [_named(one) for one in (*_functions_in(member), type(member))]


def _is_filled(space: list[Any]) -> bool:
    return bool(space[1])


def _is_inert(name: str, member: Any, kind: type) -> bool:
    """Whether a member of an installed class says nothing: what libraries put there once they are used."""
    functions = list(_functions_in(member))
    if not functions:
        told = (MethodDescriptorType, *OF_C) if _is_torch(module_of(kind)) else (bool, int, float, str, *OF_C)
        return not isinstance(member, told) or name in OF_CLASSES
    file = functions[0].__code__.co_filename
    put_by_others = distribution(file).startswith(HELPING) or (name in MAKING and _is_torch(home_of(functions[0])))
    return _is_torch(module_of(kind)) and put_by_others


def _named(value: Any) -> list[Any]:
    """What a thing of a library is, by its name; of functions also what they do."""
    if isinstance(value, FunctionType):
        return [str(home_of(value)), value.__qualname__, digest(value.__code__)]
    if isinstance(value, (type, *OF_C, *DESCRIPTORS)):
        return [str(getattr(value, "__module__", "")), getattr(value, "__qualname__", type(value).__qualname__)]
    if isinstance(value, (bool, int, float, str, bytes)):
        return [type(value).__qualname__, repr(value)]
    return [module_of(type(value)), type(value).__qualname__]


def _members_of(module: ModuleType) -> list[Any]:
    """Functions, classes and numbers that a module of a library has: some may have been put there."""
    members = [(name, value) for name, value in sorted(vars(module).items()) if not name.startswith(OF_DYNAMO)]
    told = [(name, value) for name, value in members if isinstance(value, (FunctionType, type))]
    numbers = [[name, value] for name, value in members if type(value) in (bool, int, float) and name[:2] != "__"]
    return [[[name, _named(value)] for name, value in told], numbers]


def _functions_in(member: Any) -> Iterator[FunctionType]:
    """The functions that a member of a class is or wraps."""
    for one in (member.fget, member.fset) if isinstance(member, property) else (member,):
        function = getattr(one, "func", getattr(one, "__func__", one))
        while isinstance(function, FunctionType) or type(function) is CACHED:
            if isinstance(function, FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)


def _has_source(kind: type) -> bool:
    """True for a class that Python code defines: what its objects hold is in their attributes."""
    return bool(file_of(kind)) and not _of_c(kind)


def _of_c(kind: type) -> bool:
    """A class of an extension may name a module of Python code as its own. It shows in methods and attributes that are
    not Python's, in objects that are larger than attributes make them, or in a class of classes of its own.
    """
    if type(kind) is not type and not isinstance(kind, (ABCMeta, EnumMeta)) and not _has_source(type(kind)):
        return True
    for name, member in vars(kind).items():
        is_of_c = isinstance(member, OF_CLASSES_IN_C) and member.__objclass__ is kind
        if is_of_c and name not in ("__dict__", "__weakref__"):
            return True
        if isinstance(member, BuiltinFunctionType) and member.__self__ is kind:
            return True
    words = len(slots_of(kind)) + 2  # and those of __dict__ and __weakref__
    return kind.__base__ is not None and kind.__basicsize__ > kind.__base__.__basicsize__ + 8 * words


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


# --- What lies outside of a process or changes by itself -------------------------------------------------------------
#
# Code that asks for it gives one program now and another at the next start, whatever is written in the code.


PURE = {
    "__future__", "_abc", "_collections", "_collections_abc", "_functools", "_operator", "_struct", "_warnings",
    "_weakref", "_weakrefset", "abc", "array", "bisect", "builtins", "cmath", "collections", "colorsys", "contextlib",
    "contextvars", "copy", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "inspect", "itertools",
    "json", "keyword", "logging", "math", "numbers", "operator", "pprint", "re", "reprlib", "statistics", "string",
    "struct", "textwrap", "traceback", "types", "typing", "unicodedata", "warnings", "weakref",
}  # fmt: skip
OF_SYS = {"byteorder", "float_info", "hexversion", "implementation", "maxsize", "platform", "version_info"}
BUILTINS = {"open", "input", "globals", "locals", "eval", "exec", "compile", "__import__", "breakpoint"}
ATTRIBUTES = {"read_text", "read_bytes", "open", "exists", "is_file", "iterdir"}  # of files and paths
READERS = {"load_file", "safe_open", "fromfile", "loadtxt", "genfromtxt", "memmap", "imread", "read_csv", "from_file"}
MODULES = {"torch.random", "torch.distributed", "torch.hub", "numpy.random"}
OF_LIBRARIES = {
    "torch": {"load", "initial_seed", "seed", "get_rng_state", "get_num_threads", "get_num_interop_threads"},
    **devices.ASKED,
    "torch.jit": {"load"},
    "numpy": {"load"},
}  # what these modules say of the world


def refuse_asking(reached: Reached) -> None:
    """Opaque if code of the user's that forward reaches asks the world for something."""
    named = ((name, space.get(name)) for _, space, names in reached.spaces.values() for name in names if names[name])
    outside = {name: request for name, value in named if (request := _asked(value))}
    for _, function in reached.found.values():
        if not isinstance(function, FunctionType) or not is_users(function):
            continue
        code, space = function.__code__, function.__globals__
        names, global_names = names_read(code), globals_read(code)
        asking = {name: f"uses {outside[name]}" for name in names & outside.keys()}
        asking |= {name: f"reads files (`{name}`)" for name in ATTRIBUTES & names - global_names}
        asking |= {name: f"calls `{name}`" for name in BUILTINS & global_names - space.keys()}
        every = names | set(texts(code))
        for name in global_names & space.keys():
            if isinstance(space[name], ModuleType) and (request := _asked_of(space[name], every)):
                asking[name] = f"uses {request}"
        for name in modules_imported(code, space.get("__package__") or ""):
            module = sys.modules.get(name)
            request = _asked_of(module, every) if isinstance(module, ModuleType) else ""
            if request or (module is None and _is_unloaded(name)):
                asking[name] = f"uses {request}" if request else f"imports {name}, which was not loaded before"
        for name in sorted(asking):
            place = f"{PurePath(code.co_filename).name}:{line_of(code, name)}: {function.__qualname__}"
            raise Opaque(f"{place} {asking[name]}, which may differ at every start")


def _is_unloaded(name: str) -> bool:
    """Whether a module is a file of the user's that no code has imported yet."""
    parent = sys.modules.get(name.rpartition(".")[0])
    if "." in name and (parent is None or name.rpartition(".")[2] in vars(parent)):
        return False
    spec = PathFinder.find_spec(name, getattr(parent, "__path__", None) if "." in name else None)
    return spec is not None and is_own(name) and is_source(str(spec.origin)) and not distribution(str(spec.origin))


def _asked(value: Any) -> str:
    """What of the world a function, class or object is; "" for nothing."""
    if isinstance(value, PurePath):
        return "a path"
    named = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
    name = getattr(value, "__qualname__", None)
    if not isinstance(named, str) or not isinstance(name, str):
        named, name = type(value).__module__, type(value).__qualname__
    if _outside(named) or name in OF_LIBRARIES.get(named, ()) or (name in READERS and callable(value)):
        return f"{named}.{name}"
    return ""


def _asked_of(module: ModuleType, names: Set[str], deep: int = 3) -> str:
    """What of the world code may ask a module for that uses these names; "" for nothing."""
    found = module.__name__
    if found.partition(".")[0] == "csc":
        return ""
    if found == "sys":
        return ", ".join(f"sys.{name}" for name in sorted(names & vars(sys).keys() - OF_SYS))
    if _outside(found) or found in MODULES:
        return found
    asking = names & (OF_LIBRARIES.get(found, set()) | READERS) & vars(module).keys()
    inner = [vars(module)[name] for name in sorted(names & vars(module).keys())] if deep else []
    within = [_asked_of(one, names, deep - 1) for one in inner if isinstance(one, ModuleType) and one is not module]
    return ", ".join([f"{found}.{name}" for name in sorted(asking)] + list(filter(None, within)))


def _outside(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in PURE and top != "sys"
