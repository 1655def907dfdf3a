"""One part of a stage's work (F, B, W or BW) as a device records it once and launches it again, and what it reads."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch

from csc.kernels.recordable import unfit
from csc.runtime.specs import ParameterSpec

# --- Tensors at lasting addresses, which recorded work reads and writes, and nested values as it is given them -------
#
# Terms: a *place* is a tensor that is filled from others of its layout. A *nested* value is a tensor, or a tuple, list
# or dict of nested values, None among them.


class UnfitError(Exception):
    """Why something is not recorded, in a clause."""


class FixedPlaces:
    """like: what they are filled from first; its values are not read."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they are laid out alike."""
        return len(tensors) == len(self.tensors) and all(map(_alike, tensors, self.tensors))

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy them here. ValueError if there are more, fewer, or others."""
        for place, tensor in zip(self.tensors, tensors, strict=True):
            if place.shape != tensor.shape or place.dtype != tensor.dtype:
                came, was = ([tensor.dtype, list(tensor.shape)] for tensor in (tensor, place))
                raise ValueError(f"{came} came where {was} was recorded")
            thin(place).copy_(thin(tensor))


class NestedCopy:
    """A nested value once more, for a function that may write over it."""

    def __init__(self, nested: Any) -> None:
        self._nested, self._places = nested, FixedPlaces(tensors_in(nested))

    def take(self) -> Any:
        """As the value is now."""
        self._places.fill(tensors_in(self._nested))
        tensors = iter(self._places.tensors)
        return _mapped(self._nested, lambda _: next(tensors).detach())


def _mapped(nested: Any, view: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """With a view for each tensor, in order."""
    if isinstance(nested, torch.Tensor):
        return view(nested)
    if isinstance(nested, dict):
        return {name: _mapped(value, view) for name, value in nested.items()}
    if isinstance(nested, (tuple, list)):
        return type(nested)(_mapped(item, view) for item in nested)
    return nested


def _alike(left: torch.Tensor, other: torch.Tensor) -> bool:
    """The stride of a dimension with one place means nothing."""
    return left.shape == other.shape and left.dtype == other.dtype and left.device == other.device and all(
        a == b or size == 1 for a, b, size in zip(left.stride(), other.stride(), left.shape)
    )  # fmt: skip


def thin(tensor: torch.Tensor) -> torch.Tensor:
    """Each entry of an expanded tensor once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """In order."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    if nested is None:
        return []
    if isinstance(nested, (tuple, list, dict)):
        several = nested.values() if isinstance(nested, dict) else nested
        return [tensor for value in several for tensor in tensors_in(value)]
    raise UnfitError(f"it keeps a {type(nested).__name__}, which is no tensor")


def fresh(nested: Any) -> Any:
    """Whoever takes something out of a list leaves the other one as it was. Operators keep on a tensor what they have
    made of it (csc.kernels.packing); of a new view they make it again, within the recording.
    """
    views: dict[int, torch.Tensor] = {}
    return _mapped(nested, lambda tensor: views.setdefault(id(tensor), tensor.detach()))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of what is no number."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


# --- The parameters of a stage as recordings read them: where they are, or in places of their own --------------------
#
# Terms: a parameter *lasts* if a step computes with its own memory; one that is computed with in another dtype is made
# anew for each step, and *moves*: it has a place that is filled in each step.


Tensors = Mapping[str, torch.Tensor]


class GraphWeights:
    """The parameters of a stage as recordings read them. specs: of the stage's parameters. given: what a step computes
    with, by name. copies: the places of parameters that move, of all stages, by name. `values` is what recordings read.
    """

    def __init__(self, specs: Iterable[ParameterSpec], given: Tensors, copies: dict[str, FixedPlaces]) -> None:
        present = [spec for spec in specs if spec.name in given]
        self._moving = [spec.name for spec in present if spec.compute not in (None, spec.dtype)]
        self._lasting = [spec.name for spec in present if spec.compute in (None, spec.dtype)]
        self._places = {name: copies.setdefault(name, FixedPlaces([given[name]])) for name in self._moving}
        self.values = {name: given[name] for name in self._lasting}
        self.values |= {name: place.tensors[0] for name, place in self._places.items()}
        self._memory = [_memory(given[name]) for name in self._lasting]
        self._step: weakref.ref[torch.Tensor] | None = None  # a tensor that each step has anew

    def take(self, given: Tensors) -> bool:
        """Copies the parameters that move to their places, before each F. Returns False, with nothing copied, where one
        is missing, a lasting one lies elsewhere, or a moving one does not fit its place.
        """
        first = next((given.get(name) for name in (*self._moving, *self._lasting)), None)
        if first is not None and self._step is not None and self._step() is first:
            return True
        if not all(name in given for name in (*self._lasting, *self._moving)):
            return False
        if [_memory(given[name]) for name in self._lasting] != self._memory:
            return False
        if not all(place.fits([given[name]]) for name, place in self._places.items()):
            return False
        for name, place in self._places.items():
            place.fill([given[name]])
        self._step = weakref.ref(first) if first is not None else None
        return True


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal where two lie in the same memory in the same way."""
    return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype, tensor.device


# --- One part of a stage's work (F, B, W or BW) as a device records it once and launches it again --------------------
#
# Terms: a *recorder* records what code launches (csc.devices.DeviceGraphs; tests have one for CPUs). What *leaves* a
# part is copied out of the recorder's memory, within the recording, into places that all parts share; what it *keeps*
# stays in that memory, for parts of the same microbatch.


Name = tuple[str, str]  # what it is, and how the stage calls it
Leave = Callable[[Name, torch.Tensor], None]
Run = Callable[[Leave], Any]
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Recorder(Protocol):
    """What is asked of a recorder: see csc.devices.DeviceGraphs."""

    def pool(self) -> Any: ...

    def warm(self, run: Callable[[], None]) -> None: ...

    def record(self, run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]: ...

    def finish(self) -> None: ...


class LeavingPlaces:
    """Where parts put what leaves, all those of a trainer in the same places: it is taken away at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[tuple[Layout, int], torch.Tensor] = {}  # the several of one layout by number

    def of(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """A place for each: dense ones."""
        count: Counter[Layout] = Counter()
        places = []
        for layout in layouts:
            key = layout, count[layout]
            count[layout] += 1
            if key not in self._places:
                size, stride, dtype = layout
                like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
                self._places[key] = torch.empty_like(like, device=self._device)
            places.append(self._places[key])
        return places


class RecordedPart:
    """A part of a stage's work, warmed up and recorded when it is made, and launched by `launch`. run: the part as
    code, which calls leave(name, tensor) in order and returns what it keeps. pool: of the recorder, for what it makes
    and keeps. before: the same for the warm-up, if `run` writes over what it is given. Raises UnfitError for a call
    that cannot be recorded, and whatever the recorder raises.
    """

    def __init__(
        self, recorder: Recorder, run: Run, pool: Any, places: LeavingPlaces, device: torch.device,
        before: Run | None = None,
    ) -> None:  # fmt: skip
        self._names: list[Name] = []
        like: list[Layout] = []

        def note(name: Name, tensor: torch.Tensor) -> None:
            self._names.append(name)
            like.append((tensor.shape, tensor.stride(), tensor.dtype))

        def warm() -> None:
            with only_fit(device):
                tensors_in((before or run)(note))

        def record() -> Any:
            left = iter(self.left)
            return run(lambda _, tensor: _put(next(left), tensor))

        recorder.warm(warm)
        self.left = places.of(like)  # what has left, until the next launch
        self.launch, self.kept = recorder.record(record, pool)

    def leaving(self) -> Iterator[tuple[Name, torch.Tensor]]:
        """Copies of what has left with the last launch."""
        for name, place in zip(self._names, self.left, strict=True):
            yield name, place.clone()


def _put(place: torch.Tensor, tensor: torch.Tensor) -> None:
    thin(place).copy_(thin(tensor))


def only_fit(device: torch.device) -> Any:
    """A context in which an unfit call (csc.kernels.recordable) is UnfitError, before it runs."""
    from csc.torch_private.traces import TorchDispatchMode, pytree

    class OnlyFit(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            why = unfit(operator, tensors, device)
            if not why:
                results = operator(*args, **(kwargs or {}))
                results_made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
                if any(tensor.device != device for tensor in results_made):
                    why = f"{operator._schema.name}: it makes tensors of another device than {device}"
            if why:
                raise UnfitError(why)
            return results

    return OnlyFit()


# --- A stage's F without what it makes of the batch alone: masks, position tables, labels come from outside ----------
#
# Terms: *tables* are what functions of layers/tables.py return. They are made as they are, outside of what a device
# records: packing a mask waits for values. A recording reads them where it reads the batch.


Forward = Callable[..., Any]
LAYERS = "layers"  # the name by which a rank's file has its layer files


class Asked:
    """Runs F as it is, and notes what it asks for: `sent` and `saved` are what F returns, `tables` the results of each
    function of layers/tables.py, `entries` the names of the batch entries that it reads.
    """

    def __init__(
        self, forward: Forward, batch: Mapping[str, Any], received: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self.tables: dict[str, tuple[torch.Tensor, ...]] = {}
        noting = _Noting(batch)

        def make(name: str) -> tuple[torch.Tensor, ...]:
            self.tables[name] = table(forward, name)(batch, constants)
            return self.tables[name]

        self.sent, self.saved = _with(forward, make)(noting, received, weights, constants)
        self.entries = list(noting.read)


def table(forward: Forward, name: str) -> Callable[..., Any]:
    """A function of layers/tables.py."""
    function: Callable[..., Any] = getattr(_tables_of(forward), name)
    return function


def handed(forward: Forward, tables: Mapping[str, tuple[torch.Tensor, ...]]) -> Forward:
    """Returns a forward in which the functions of layers/tables.py return these tables, whatever they are given."""
    return _with(forward, tables.__getitem__)


def _tables_of(forward: Forward) -> Any:
    return getattr(_globals(forward).get(LAYERS), "tables", None)


def _globals(forward: Forward) -> dict[str, Any]:
    return forward.__globals__ if isinstance(forward, FunctionType) else {}


def _with(forward: Forward, make: Callable[[str], tuple[torch.Tensor, ...]]) -> Forward:
    """The same code, over `layers` whose tables are made so: other ranks of this process share the module itself."""
    if LAYERS not in _globals(forward):
        return forward
    assert isinstance(forward, FunctionType)
    names = {**forward.__globals__, LAYERS: _Layers(forward.__globals__[LAYERS], make)}
    function = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


class _Layers:
    """The layer files, but for the tables."""

    def __init__(self, layers: Any, make: Callable[[str], tuple[torch.Tensor, ...]]) -> None:
        self._layers, self.tables = layers, _Tables(make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)


class _Tables:
    """Functions that are made so."""

    def __init__(self, make: Callable[[str], tuple[torch.Tensor, ...]]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda batch, constants: self._make(name)


class _Noting(Mapping[str, Any]):
    """The batch, and the names of what was read of it."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._batch, self.read = batch, dict[str, None]()

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)
