"""What the user's own code reads beside its arguments and the model: globals, and attributes of what they hold.

Terms
  own     a function of a file that is not installed: what libraries read follows from their version
  place   where such a value stands: a module's globals or a class, and the name there

    read = Globals(model)              everything that the model's own code names, from each forward on
    read.holds() -> bool               microseconds: identities, contents of containers, versions of tensors
    read.changed() -> ["TEMPERATURE"]  in words
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator, Set
from pathlib import PurePath
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from csc.capture.contents import alike, copied, same

STANDARD = tuple({sysconfig.get_paths()[which] for which in ("stdlib", "platstdlib")})
PACKAGES = ("torch", "csc", *sys.stdlib_module_names)
Space = dict[str, Any] | MappingProxyType[str, Any]


class Globals:
    """The places that own code names, as they are now. ignored: names of those that a forward writes itself."""

    def __init__(self, model: nn.Module, ignored: Set[str] = frozenset()) -> None:
        places = {(id(space), name): (space, name) for space, name in _places(model) if name not in ignored}
        self._values = [(space, name, space[name]) for space, name in places.values()]
        self._contents = [
            (space, name, value, copied(value))
            for space, name, value in self._values
            if type(value) in (list, dict, set)
        ]
        self._versions = [
            (name, tensor, tensor._version)
            for _, name, value in self._values
            for tensor in (value if type(value) in (list, tuple) else (value,))
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        ]

    def holds(self) -> bool:
        """Whether nothing was replaced or written to since."""
        return (
            all(space.get(name) is value for space, name, value in self._values)
            and all(same(value, before) for _, _, value, before in self._contents)
            and all(tensor._version == version for _, tensor, version in self._versions)
        )

    def changed(self) -> list[str]:
        """The names of what was, but for values equal to those before."""
        found = [name for space, name, value in self._values if not alike(space.get(name), value)]
        found += [name for _, name, value, before in self._contents if not same(value, before)]
        found += [name for name, tensor, version in self._versions if tensor._version != version]
        return list(dict.fromkeys(found))


def _places(model: nn.Module) -> Iterator[tuple[Space, str]]:
    """Of each value that code reached from a forward names; code that is reached otherwise is not followed."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if _is_own_class(cls)}
    waiting: list[Any] = [vars(cls)["forward"] for cls in classes if "forward" in vars(cls)]
    waiting += [one for module in model.modules() for one in vars(module).values() if isinstance(one, FunctionType)]
    seen: set[int] = set()
    while waiting:
        function = _plain(waiting.pop())
        if function is None or id(function) in seen or not _is_own(function):
            continue
        seen.add(id(function))
        loaded, names = _names(function.__code__)
        waiting += [vars(cls)[name] for cls in classes for name in names.intersection(vars(cls))]
        waiting += map(_content, function.__closure__ or ())
        for name in loaded.intersection(function.__globals__):
            value = function.__globals__[name]
            yield function.__globals__, name
            waiting.append(value)
            held = _attributes(value)
            if isinstance(held, MappingProxyType) and not issubclass(value, nn.Module):
                classes.add(value)
            elif not isinstance(value, (type, ModuleType)) and held:
                classes.add(type(value))
            for each in names.intersection(held):
                yield held, each
                waiting.append(held[each])


def _attributes(value: Any) -> Space:
    """Of a class, a module or an object of the user's; of anything else none."""
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, ModuleType):
        return {} if value.__name__.partition(".")[0] in PACKAGES else vars(value)
    if isinstance(value, (nn.Module, torch.Tensor, FunctionType)) or not _is_own_class(kind):
        return {}
    return getattr(value, "__dict__", {})


def _plain(one: Any) -> FunctionType | None:
    """The function in what a class or a module has under a name."""
    one = getattr(one, "__wrapped__", one)
    one = one.__func__ if isinstance(one, (MethodType, staticmethod, classmethod)) else one
    one = one.fget if isinstance(one, property) else one
    return one if isinstance(one, FunctionType) else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The globals, and the attributes, that a function names, those of functions in it included."""
    loaded, names = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _names(inner)
            loaded |= more[0]
            names |= more[1]
    return loaded, names


def _is_own(function: FunctionType) -> bool:
    file = PurePath(function.__code__.co_filename)
    installed = {"site-packages", "dist-packages"}.intersection(file.parts)
    return not installed and not str(file).startswith((*STANDARD, "<frozen"))


def _is_own_class(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in PACKAGES
