"""Guards on the model itself: what a capture assumed of it, besides its parameters' values.

Terms
  slots      where a model holds what its forward may read: attributes of modules and of their configurations,
             parameters, buffers, submodules, hooks
  rest       what slots hold in turn, and classes, functions, globals (csc.capture.reached)
  structure  slots as they were: attributes, submodules, buffers with the versions of their values, hooks, modes
  parameters the parameters' identities, and which of them train
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.capture.quantised_weights import QuantisedValues
from csc.capture.reached import Reached
from csc.capture.watches import (
    Holds,
    Namespace,
    TensorValues,
    Versioned,
    counted,
    hidden,
    items,
    members_hold,
    namespaces,
)
from csc.torch_private.hooks import any_gradient_hooks, gradient_hooks, hooks_of_all_modules

CONTAINERS = (list, dict, set, tuple)
OWN = ("_parameters", "_buffers", "_modules")  # an nn.Module's dicts that are slots of their own
DEPTH = 3  # of configurations within configurations
TRAINS, KEPT_AS = attrgetter("requires_grad"), attrgetter("dtype", "device", "shape")
Slot = tuple[str, str]  # the path of what holds it, its name there
BESIDE = "<beside>"  # in place of a path: of what a forward writes that is no slot, in words


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
        parts = list(self.structure)
        if self.parameters:
            parts.append(f"{_some(self.parameters)} replaced")
        if self.trainable:
            parts.append(f"requires_grad of {_some(self.trainable)}")
        return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")


def _some(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class ModelGuards:
    """A model as it is now. `ignored`: slots that the model's own forward writes; `world`: tells switches of torch's,
    as [name, state]. `opaque_reads`: slots of opaque modules that the rest of the model reads.
    """

    def __init__(
        self,
        model: nn.Module,
        ignored: Set[Slot] = frozenset(),
        world: Callable[[], list[Any]] = list,
        opaque_reads: Set[Slot] = frozenset(),
    ) -> None:
        self.opaque_reads = frozenset(opaque_reads)
        self._world, self._switches = world, world()
        self.ignored = frozenset(ignored)
        self._model, self._ignored = model, _of_equals(model, ignored)
        holders = dict(_holders(model))
        self._before = {path: dict(attributes) for path, attributes in holders.items()}
        self.was_training, self.was_autocast = model.training, autocasts()
        self._kinds = _kinds(model)
        self._of_all_modules = [(kind, hooks, dict(hooks)) for kind, hooks in hooks_of_all_modules()]
        every = [*holders.values(), *(hooks for _, hooks, _ in self._of_all_modules)]
        self._empty = [attributes for attributes in every if not attributes]
        held: list[tuple[Any, Holds]] = [
            (attributes, partial(members_hold, attributes, list(attributes), list(dict.values(attributes))))
            for attributes in every
            if attributes
        ]
        self._contents = {
            (path, name): (value, _copied(value))
            for path, attributes in holders.items()
            for name, value in attributes.items()
            if isinstance(value, (list, dict, set))
            and not _is_holder(name, value)
            and (path, name) not in self._ignored
        }
        for value, before in self._contents.values():
            if type(value) in CONTAINERS and not value:
                self._empty.append(value)
            else:
                held.append((value, partial(_same, value, before)))
        self._counted = Versioned((attributes, holds) for attributes, holds in held if counted(attributes))
        self._others = [holds for attributes, holds in held if not counted(attributes)]
        self._buffers = TensorValues((f"buffer {name}", buffer) for name, buffer in _buffers(model))
        self._tensors = {  # that are attributes, neither parameters nor buffers
            (path, name): value
            for path, attributes in holders.items()
            for name, value in attributes.items()
            if isinstance(value, torch.Tensor)
            and not path.endswith(OWN)
            and not value.is_inference()
            and not self._is_ignored(path, str(name))
        }
        self._written = TensorValues((_place(*slot), tensor) for slot, tensor in self._tensors.items())
        self._parameters = list(model.parameters())
        self._quantised = QuantisedValues(model)
        self._trainable, self._kept = self._trains(), self._kept_as()
        self._modules = list(model.modules())
        self._own = list(map(vars, self._modules))
        self._classes = list(map(type, self._modules))
        watched = frozenset(map(id, chain(every, (value for value, _ in self._contents.values()))))
        beside = {text for path, text in ignored if path == BESIDE}
        self._rest = reached(model, watched, self._is_ignored, beside, namespaces(model, opaque_reads))

    def holds(self) -> bool:
        """Whether nothing was replaced or written to since. May be False where a value was replaced by an equal one."""
        return (
            not any(self._empty)
            and self._counted.hold()
            and all(holds() for holds in self._others)
            and self._trains() == self._trainable
            and not any_gradient_hooks(self._parameters)  # as when it was compiled: csc refuses them
            and self._buffers.hold()
            and self._written.hold()
            and self._quantised.hold()
            and all(map(is_, map(vars, self._modules), self._own))
            and self._kept_as() == self._kept
            and list(map(type, self._modules)) == self._classes
            and self._rest.holds()
            and self._world() == self._switches
        )

    def _trains(self) -> list[bool]:
        return list(map(TRAINS, self._parameters))

    def _kept_as(self) -> list[Any]:
        return list(map(KEPT_AS, self._parameters))

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
                if _written_by_saving(after, name, old, new, self._kept):
                    continue
                if path.endswith("._parameters") and new is not old:
                    parameters.append(f"{path.removesuffix('_parameters')}{name}".lstrip("."))
                elif not _equal(old, self._contents.get((path, name), (old, old))[1], new):
                    structure.append(_place(path, name))
        structure += [*self._buffers.changed(), *self._written.changed(), *self._quantised.changed()]
        structure += [f"{path or 'the model'} has another structure" for path in now.keys() ^ self._before.keys()]
        if parameters and _kinds(self._model) != self._kinds:
            structure.append(
                f"{_some(tuple(parameters))} replaced by one of another class, shape, dtype or device, or shared"
            )
        hooked = (name for name, parameter in self._model.named_parameters() if gradient_hooks(parameter))
        structure += [f"a hook on the gradient of {name}" for name in hooked]
        hooks_of_all = (kind for kind, hooks, before in self._of_all_modules if not _same(hooks, before))
        structure += [f"a hook of all modules ({kind})" for kind in hooks_of_all]
        structure += self._modes()
        structure += self._rest.changed()
        structure += [f"torch's {name}" for (name, now), (_, was) in zip(self._world(), self._switches) if now != was]
        if not parameters:
            structure += self._kinds_changed()
        flags = zip(self._model.named_parameters(), self._trainable) if not parameters else ()
        trainable = tuple(name for (name, parameter), before in flags if parameter.requires_grad != before)
        return Changed(tuple(dict.fromkeys(structure)), tuple(parameters), trainable)

    def _is_ignored(self, path: str, name: str) -> bool:
        module, _, kind = path.rpartition(".")
        if (path, name) in self._ignored or (BESIDE, _place(path, name)) in self._ignored:
            return True
        return "_hooks" in kind and (module, kind) in self._ignored

    def _kinds_changed(self) -> list[str]:
        """Parameters of another dtype, device or shape (`weight.data = other` keeps the parameter), modules of another
        class.
        """
        kinds = zip(self._model.named_parameters(), self._kept)
        changes = [f"dtype, device or shape of {name}" for (name, p), before in kinds if KEPT_AS(p) != before]
        classes = zip(self._model.named_modules(), self._classes)
        return changes + [
            f"class of {path or 'the model'}" for (path, cls), before in classes if type(cls) is not before
        ]

    def _modes(self) -> list[str]:
        """Modules whose mode is another, seen from the model's own: a model in eval mode trains as a whole."""
        changes = []
        for path, module in self._model.named_modules():
            before = self._before.get(path, {}).get("training")
            if before is None or not self._model.training:
                continue
            if module.training != (before or not self.was_training):
                changes.append(f"{path or 'the model'} is in {'train' if module.training else 'eval'} mode")
        return changes


def reached(
    model: nn.Module,
    watched: Set[int] = frozenset(),
    is_ignored: Callable[[str, str], bool] = lambda path, name: False,
    beside: Set[str] = frozenset(),
    spaces: Sequence[Namespace] = (),
) -> Reached:
    """What the slots of modules lead to. watched: identities of containers that are compared anyway; is_ignored: of a
    slot; beside: what else the model's forward writes, in words. spaces: what else it reads, by these names.
    """
    roots = [
        *((f"{path}.{name}", space[name]) for path, space, names in spaces for name in names if name in space),
        *(
            (f"attribute {path}.{name}".replace(" .", " "), value)
            for path, module in _seen_through(model)
            for name, value in vars(module).items()
            if not _is_holder(name, value) and not is_ignored(path, name)
        ),
    ]
    elsewhere = frozenset(map(id, chain(model.modules(), model.parameters())))
    return Reached(roots, map(type, model.modules()), watched, beside, elsewhere, spaces)


def autocasts() -> bool:
    """Whether torch.autocast is on, for any device that csc runs on."""
    return any(map(torch.is_autocast_enabled, devices.TYPES))


def _kinds(model: nn.Module) -> list[Any]:
    """Of each parameter its name, class, shape, dtype and device, and by which name it was met first."""
    first: dict[int, str] = {}
    return [
        (name, first.setdefault(id(p), name), type(p), p.shape, p.dtype, p.device)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def _of_equals(model: nn.Module, slots: Set[Slot]) -> Set[Slot]:
    """Slots of modules, and the same ones of all modules of these modules' classes: equal layers are run once only."""
    modules = dict(model.named_modules())
    classes = {(type(modules[path]), name) for path, name in slots if path in modules}
    names = {name for _, name in classes}
    pairs = {(path, name) for path, module in modules.items() for name in names if (type(module), name) in classes}
    return pairs | set(slots)


def _written_by_saving(slots: Mapping[str, Any], name: str, old: Any, new: Any, dtypes: Sequence[Any]) -> bool:
    """Whether a slot of a configuration of transformers is what save_pretrained puts there, on one rank alone: the
    name of the class, and in words the dtype that the model has. dtypes: KEPT_AS of its parameters.
    """
    if not slots.keys() >= {"architectures", "transformers_version"}:
        return False
    if name != "dtype":
        return name == "architectures"
    was, now = (str(value).removeprefix("torch.") for value in (old, new))
    return was in (now, "None") and any(now == str(dtype).removeprefix("torch.") for dtype, *_ in dtypes)


def _seen_through(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a trace goes through, with their paths."""
    opaque = hidden(model)
    return ((path, module) for path, module in model.named_modules() if id(module) not in opaque)


def _buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """By name, each as often as it has one."""
    return [
        (f"{path}.{name}".lstrip("."), buffer)
        for path, module in _seen_through(model)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _holders(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, slots) of modules, their parameters, buffers, submodules and hooks, and of their configurations."""
    seen: set[int] = set()
    opaque = hidden(model)
    for path, module in model.named_modules():
        attributes = vars(module)
        if id(module) in opaque:
            yield f"{path}._parameters", attributes["_parameters"]
            continue
        yield path, attributes
        for name, value in attributes.items():
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
    slots = value if type(value) is dict else getattr(value, "__dict__", None)
    if isinstance(value, plain) or not isinstance(slots, dict) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    yield path, slots
    for name, inner in list(slots.items()):
        yield from _configurations(f"{path}.{name}", inner, seen, depth - 1)


def _copied(value: Any) -> Any:
    """What a container has, in its order."""
    if isinstance(value, dict):
        return dict(items(value))
    return list(value) if isinstance(value, list) else set(value)


def _same(value: Any, before: Any) -> bool:
    """Whether a container has the things that it had: the same ones, or plain ones that are equal."""
    if isinstance(value, dict):
        now, were = items(value), items(before)
        return len(now) == len(were) and all(map(_alike, chain(*now), chain(*were)))
    if len(value) != len(before):
        return False
    return all(map(_alike, value, before)) if not isinstance(value, set) else value == before


def _alike(left: Any, other: Any) -> bool:
    if left is other:
        return True
    if isinstance(left, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    try:
        return type(left) is type(other) and bool(left == other)
    except Exception:  # comparing is the user's code
        return False


def _equal(before: Any, contents: Any, now: Any) -> bool:
    """Whether a slot has what it had; contents: of a container, as they were."""
    if isinstance(before, CONTAINERS) and isinstance(now, CONTAINERS):
        return type(before) is type(now) and _same(now, contents)
    return _alike(before, now)


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
