"""Guards on the model itself: what a capture assumed of it, besides its parameters' values.

Terms
  structure  what csc.capture.reached finds, as it was: attributes, submodules, hooks, buffers and other tensors by the
             versions of their values, classes, functions, globals; modes of modules and switches of torch
  parameters the parameters' identities, and which of them train
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.capture.quantised_weights import QuantisedValues
from csc.capture.reached import Reached, alike
from csc.capture.watches import ABSENT, FileState, copied, file_state, namespaces, put_back
from csc.errors import InputError
from csc.torch_private.hooks import any_gradient_hooks, gradient_hooks

TRAINS, KEPT_AS = attrgetter("requires_grad"), attrgetter("dtype", "device", "shape")
PARAMETER = "parameter "  # so begins what is said of one that was replaced
Slot = tuple[str, str]  # the path of what holds it, its name there
NO_FILES: Mapping[str, FileState] = {}
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
    """A model as it is now. `written`: slots that the model's own forward writes; `world`: tells switches of torch's,
    as [name, state]. `opaque_reads`: slots of opaque modules that the rest of the model reads. `ignored`: what the
    forward writes whenever it runs, in words. `files`: that it read, as they were then.
    """

    def __init__(
        self,
        model: nn.Module,
        written: Set[Slot] = frozenset(),
        world: Callable[[], list[Any]] = list,
        opaque_reads: Set[Slot] = frozenset(),
        ignored: Set[str] = frozenset(),
        files: Mapping[str, FileState] = NO_FILES,
    ) -> None:
        self.written, self.opaque_reads, self.ignored = frozenset(written), frozenset(opaque_reads), frozenset(ignored)
        self._world, self._switches, self.files = world, world(), files
        self._model = model
        self.was_training, self.was_autocast = model.training, autocasts()
        self._modes_before = {path: module.training for path, module in model.named_modules()}
        self._kinds = _kinds(model)
        self._parameters = list(model.parameters())
        self._quantised = QuantisedValues(model)
        self._trainable, self._kept = self._trains(), self._kept_as()
        self._modules = list(model.modules())
        self._classes = list(map(type, self._modules))
        slots = _of_equals(model, written)
        self._written = {slot: name if slot[0] == BESIDE else _place(*slot) for slot in slots for name in slot[1:]}
        held = {slot: holder.get(slot[1], ABSENT) for slot, holder in _holders(model, slots)}
        self._values = {slot: (value, copied(value)) for slot, value in held.items()}
        self._reached = Reached(model, ignored=self.ignored, spaces=namespaces(model, opaque_reads))
        homes = {kind.__module__ for kind in self._classes}  # elsewhere much is reached that forward never calls
        for function, what, line in self._reached.unnamed:
            if function.__module__ not in homes:
                continue
            raise InputError(
                f"{function.__qualname__} asks `{what}` for what csc cannot know without running it, and so would not "
                "notice that it changes between steps", f"{function.__code__.co_filename}:{line}",
                "name what it reads: a global, an attribute, or a text that is written out (`globals()['SCALE']`); or "
                "pass it as an entry of the batch",
            )  # fmt: skip

    def holds(self) -> bool:
        """Whether nothing was replaced or written to since. May be False where a value was replaced by an equal one."""
        return (
            self._trains() == self._trainable
            and not any_gradient_hooks(self._parameters)  # as when it was compiled: csc refuses them
            and self._quantised.hold()
            and self._kept_as() == self._kept
            and list(map(type, self._modules)) == self._classes
            and self._reached.holds()
            and self._world() == self._switches
            and all(file_state(path) == before for path, before in self.files.items())
        )

    def _trains(self) -> list[bool]:
        return list(map(TRAINS, self._parameters))

    def _kept_as(self) -> list[Any]:
        return list(map(KEPT_AS, self._parameters))

    def changed(self) -> Changed:
        """What differs. Attributes that the model's forward writes itself, and values equal to those before, do not."""
        differing = self._reached.changed(self._excused)
        structure = [text for text in differing if not text.startswith(PARAMETER)]
        parameters = [text.removeprefix(PARAMETER) for text in differing if text.startswith(PARAMETER)]
        structure += self._quantised.changed()
        if parameters and _kinds(self._model) != self._kinds:
            structure.append(
                f"{_some(tuple(parameters))} replaced by one of another class, shape, dtype or device, or shared"
            )
        hooked = (name for name, parameter in self._model.named_parameters() if gradient_hooks(parameter))
        structure += [f"a hook on the gradient of {name}" for name in hooked]
        structure += self._modes()
        structure += [f"torch's {name}" for (name, now), (_, was) in zip(self._world(), self._switches) if now != was]
        structure += [f"file {path}" for path, before in self.files.items() if file_state(path) != before]
        if not parameters:
            structure += self._kinds_changed()
        flags = zip(self._model.named_parameters(), self._trainable) if not parameters else ()
        trainable = tuple(name for (name, parameter), before in flags if parameter.requires_grad != before)
        return Changed(tuple(dict.fromkeys(structure)), tuple(parameters), trainable)

    def by_itself(self, changes: Changed) -> bool:
        """Whether all that changed is what the model's own forward writes."""
        places = tuple(self._written.values())
        own = (_within(_place_in(text), places) or text in places for text in changes.structure)
        return bool(changes.structure) and not (changes.parameters or changes.trainable) and all(own)

    def makes_the_same(self, changes: Changed, run: Callable[[], object]) -> bool:
        """Whether the forward, which `run` runs once, makes what changed of what was there before: then that was made
        on demand, in a run of the user's. The model is left in whatever state.
        """
        changed = [slot for slot, place in self._written.items() if _is_in(place, changes.structure)]
        holders = dict(_holders(self._model, changed))
        now = {slot: copied(holder.get(slot[1], ABSENT)) for slot, holder in holders.items()}
        for slot, holder in holders.items():
            name = slot[1]
            holder.pop(name, None)
            if self._values[slot][0] is not ABSENT:
                holder[name] = put_back(*self._values[slot])
        if set(self.changed().structure).intersection(changes.structure):  # more was written to than that
            return False
        run()
        return all(alike(now[slot], holder.get(slot[1], ABSENT)) for slot, holder in holders.items())

    def _excused(self, holder: Mapping[Any, Any], name: str, old: Any, new: Any) -> bool:
        """A module's mode, which has a sentence of its own; and what saving a model writes."""
        return (name == "training" and "_parameters" in holder) or _written_by_saving(
            holder, name, old, new, self._kept
        )

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
            before = self._modes_before.get(path)
            if before is None or not self._model.training:
                continue
            if module.training != (before or not self.was_training):
                changes.append(f"{path or 'the model'} is in {'train' if module.training else 'eval'} mode")
        return changes


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


def _holders(model: nn.Module, slots: Iterable[Slot]) -> Iterator[tuple[Slot, dict[str, Any]]]:
    """Slots of modules, each with the dict that it is in."""
    modules = dict(model.named_modules())
    for path, name in slots:
        where, _, kind = path.rpartition(".")
        holders: dict[str, dict[str, Any]] = {path: modules[path].__dict__} if path in modules else {}
        if kind == "_buffers" and where in modules:
            holders[path] = modules[where]._buffers
        if path in holders:
            yield (path, name), holders[path]


def _place_in(text: str) -> str:
    """The place of which a change is told."""
    return text.removeprefix("what ").removesuffix(" holds")


def _within(place: str, holders: Iterable[str]) -> bool:
    """Whether a place is one of these, or in one of them."""
    return any(place == holder or place.startswith((f"{holder}.", f"{holder} ")) for holder in holders)


def _is_in(place: str, changes: Iterable[str]) -> bool:
    """Whether one of the changes is of a place, or of what it holds."""
    return any(_within(_place_in(text), (place,)) for text in changes)


def _place(path: str, name: str) -> str:
    """A slot in words."""
    where, _, kind = path.rpartition(".")
    full = f"{where}.{name}".lstrip(".")
    return f"buffer {full}" if kind == "_buffers" else f"attribute {path}.{name}".replace(" .", " ")
