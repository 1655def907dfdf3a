"""Guards on the model itself: what a capture assumed of it, besides its parameters' values.

Terms
  slots      where a model holds what its forward may read: attributes of modules, of their configurations and of
             plain objects (in lists and with __slots__ too), parameters, buffers, submodules, hooks
  structure  slots as they were: attributes, submodules, buffers with the versions of their values, hooks, modes
  parameters the parameters' identities, and which of them train

    state = State(model, ignored)
    state.holds() -> bool                    microseconds: identities and version counters
    state.changed() -> Changed               what differs, in words; nothing where a value was replaced by an equal one
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from csc.capture.contents import CONTAINERS, alike, copied, same
from csc.capture.globals_read import Globals

GLOBAL = "<globals>"  # stands for a path in the slots of what code reads beside the model
OWN = ("_parameters", "_buffers", "_modules")  # an nn.Module's dicts that are slots of their own
LIBRARIES = {"torch", *sys.stdlib_module_names}  # whose objects with __slots__ are none of the model's
DEPTH = 3  # of configurations within configurations
LONGEST = 256  # entries of a list that are looked into
Slot = tuple[str, str]  # the path of what holds it, its name there


@dataclass(frozen=True)
class Changed:
    """structure: what changed that a capture depends on; parameters: names of those that are others now; trainable: of
    those whose requires_grad is another. All in words of the model.
    """

    structure: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.structure or self.parameters or self.trainable)

    def __str__(self) -> str:
        told = list(self.structure)
        if self.parameters:
            told.append(f"{_some(self.parameters)} replaced")
        if self.trainable:
            told.append(f"requires_grad of {_some(self.trainable)}")
        return "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")


def _some(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class State:
    """A model as it is now. `ignored`: slots that the model's own forward writes."""

    def __init__(self, model: nn.Module, ignored: Set[Slot] = frozenset()) -> None:
        self._model, self._ignored = model, _of_equals(model, ignored)
        holders = dict(_holders(model))
        self._before = {path: dict(own) for path, own in holders.items()}
        self.was_training = model.training
        self._kinds = _kinds(model)
        self._all = list(holders.values())
        self._sizes = list(map(len, self._all))
        self._filled = [own for own in self._all if own]
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self._contents = {
            (path, name): (value, copied(value))
            for path, own in holders.items()
            for name, value in own.items()
            if isinstance(value, (list, dict, set))
            and not _is_holder(name, value)
            and (path, name) not in self._ignored
        }
        self._held = list(self._contents.values())
        self._buffers = [b for _, b in model.named_buffers(remove_duplicate=False)]
        self._versions = [buffer._version for buffer in self._buffers]
        self._parameters = list(model.parameters())
        trained = set(map(id, self._parameters))
        self._tensors = [  # that are attributes or in lists that are, neither parameters nor buffers
            (path, name, tensor)
            for path, own in holders.items()
            for name, value in own.items()
            for tensor in (value if type(value) in (list, tuple) else (value,))
            if isinstance(tensor, torch.Tensor)
            and not path.endswith(OWN)
            and id(tensor) not in trained
            and not tensor.is_inference()
            and not self._is_ignored(path, str(name))
        ]
        self._written = [(tensor, tensor._version) for _, _, tensor in self._tensors]
        self._slotted = [
            (one, name, getattr(one, name, None)) for one in _slotted(holders) for name in _names_of_slots(one)
        ]
        self._written += [(t, t._version) for _, _, t in self._slotted if isinstance(t, torch.Tensor)]
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        self._globals = Globals(model, {name for path, name in ignored if path == GLOBAL})

    def holds(self) -> bool:
        """Whether nothing was replaced or written to since. May be False where a value was replaced by an equal one."""
        return (
            list(map(len, self._all)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._values))
            and [parameter.requires_grad for parameter in self._parameters] == self._trainable
            and [buffer._version for buffer in self._buffers] == self._versions
            and all(tensor._version == version for tensor, version in self._written)
            and all(same(value, before) for value, before in self._held)
            and all(getattr(one, name, None) is value for one, name, value in self._slotted)
            and self._globals.holds()
        )

    def changed(self) -> Changed:
        """What differs. Attributes that the model's forward writes itself, and values equal to those before, do not."""
        now = dict(_holders(self._model))
        structure: list[str] = []
        parameters: list[str] = []
        for path, after in now.items():
            before = self._before.get(path)
            if before is None:
                continue
            for name in dict.fromkeys((*before, *after)):
                old, new = before.get(name), after.get(name)
                if self._is_ignored(path, name) or name == "training" or _is_holder(name, old):
                    continue
                if path.endswith("._parameters") and new is not old:
                    parameters.append(f"{path.removesuffix('_parameters')}{name}".lstrip("."))
                elif not _equal(old, self._contents.get((path, name), (old, old))[1], new):
                    structure.append(_place(path, name))
        for (name, buffer), version in zip(self._model.named_buffers(remove_duplicate=False), self._versions):
            if buffer._version != version and _place("._buffers", name) not in structure:
                structure.append(f"buffer {name}")
        for (path, name, tensor), (_, version) in zip(self._tensors, self._written):
            if tensor._version != version:
                structure.append(_place(path, name))
        versions = {id(tensor): version for tensor, version in self._written}
        for one, name, value in self._slotted:
            if not alike(value, getattr(one, name, None)) or versions.get(id(value)) != getattr(
                value, "_version", None
            ):
                structure.append(f"attribute {name} of a {type(one).__name__}")
        structure += [f"global {name}" for name in self._globals.changed()]
        structure += [f"{path or 'the model'} has another structure" for path in now.keys() ^ self._before.keys()]
        if parameters and _kinds(self._model) != self._kinds:
            structure.append(f"{_some(tuple(parameters))} replaced by one of another shape, dtype or device, or shared")
        structure += self._modes()
        flags = zip(self._model.named_parameters(), self._trainable) if not parameters else ()
        trainable = tuple(name for (name, parameter), before in flags if parameter.requires_grad != before)
        return Changed(tuple(dict.fromkeys(structure)), tuple(parameters), trainable)

    def _is_ignored(self, path: str, name: str) -> bool:
        module, _, kind = path.rpartition(".")
        return (path, name) in self._ignored or ("_hooks" in kind and (module, kind) in self._ignored)

    def _modes(self) -> list[str]:
        """Modules whose mode is another, seen from the model's own: a model in eval mode trains as a whole."""
        found = []
        for path, module in self._model.named_modules():
            before = self._before.get(path, {}).get("training")
            if before is None or not self._model.training:
                continue
            if module.training != (before or not self.was_training):
                found.append(f"{path or 'the model'} is in {'train' if module.training else 'eval'} mode")
        return found


def _kinds(model: nn.Module) -> list[Any]:
    """Of each parameter its name, shape, dtype and device, and by which name it was met first."""
    first: dict[int, str] = {}
    return [
        (name, first.setdefault(id(p), name), p.shape, p.dtype, p.device)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def _of_equals(model: nn.Module, slots: Set[Slot]) -> Set[Slot]:
    """Slots of modules, and the same ones of all modules of these modules' classes: equal layers are run once only."""
    modules = dict(model.named_modules())
    classes = {(type(modules[path]), name) for path, name in slots if path in modules}
    names = {name for _, name in classes}
    found = {(path, name) for path, module in modules.items() for name in names if (type(module), name) in classes}
    return found | set(slots)


def _holders(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, slots) of modules, their parameters, buffers, submodules and hooks, and of their configurations."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = vars(module)
        yield path, own
        for name, value in own.items():
            if _is_holder(name, value):
                yield f"{path}.{name}", value
            elif id(value) not in seen:
                yield from _configurations(f"{path}.{name}".lstrip("."), value, seen, DEPTH)


def _is_holder(name: Any, value: Any) -> bool:
    """name: of a slot of a module, or the key of a mapping, which may be anything."""
    return name in OWN or (isinstance(value, dict) and "_hooks" in str(name))


def _configurations(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Slots of plain objects with attributes, and of those in them."""
    plain = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, torch.dtype, torch.device)
    if isinstance(value, plain) or id(value) in seen or not depth:
        return
    if type(value) in (list, tuple):
        for place, inner in enumerate(value[:LONGEST]):
            yield from _configurations(f"{path}[{place}]", inner, seen, depth - 1)
        return
    slots = value if type(value) is dict else getattr(value, "__dict__", None)
    if not isinstance(slots, dict):
        return
    seen.add(id(value))
    yield path, slots
    for name, inner in list(slots.items()):
        yield from _configurations(f"{path}.{name}", inner, seen, depth - 1)


def _slotted(holders: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The objects with __slots__ that slots, or lists in them, hold."""
    values = chain.from_iterable(own.values() for path, own in holders.items() if not path.endswith(OWN))
    every = chain.from_iterable(value[:LONGEST] if type(value) in (list, tuple) else (value,) for value in values)
    return list({id(one): one for one in every if _names_of_slots(one)}.values())


def _names_of_slots(one: Any) -> list[str]:
    """Of an instance of a class of the user's."""
    if isinstance(one, (type, nn.Module, torch.Tensor)) or type(one).__module__.partition(".")[0] in LIBRARIES:
        return []
    names = (vars(cls).get("__slots__", ()) for cls in type(one).__mro__)
    every = chain.from_iterable((own,) if isinstance(own, str) else own for own in names)
    return [name for name in every if name not in ("__dict__", "__weakref__")]


def _equal(before: Any, contents: Any, now: Any) -> bool:
    """Whether a slot has what it had; contents: of a container, as they were."""
    if isinstance(before, CONTAINERS) and isinstance(now, CONTAINERS):
        return type(before) is type(now) and same(now, contents)
    return alike(before, now)


def _place(path: str, name: str) -> str:
    """A slot in words."""
    where, _, kind = path.rpartition(".")
    full = f"{where}.{name}".lstrip(".")
    if kind == "_buffers":
        return f"buffer {full}"
    if kind == "_modules":
        return f"module {full}"
    if kind.endswith("hooks"):
        return f"a hook ({kind}) of {where or 'the model'}"
    return f"attribute {path}.{name}".replace(" .", " ")
