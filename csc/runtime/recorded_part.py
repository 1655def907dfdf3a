"""One part of a stage's work (F, B, W or BW) as a device records it once and launches it again.

Terms: a *recorder* records what code launches (csc.devices.DeviceGraphs; tests have one for CPUs). What *leaves* a part
is copied out of the recorder's memory, within the recording, into places that all microbatches share; what it *keeps*
stays in that memory, for parts of the same microbatch.

    Recorder                                     what is asked of one
    run(leave) -> kept                           a part as code: it calls leave(name, tensor) in order
    part = RecordedPart(recorder, run, pool, leaving, device)     warms up, records; UnfitError, any of the recorder's
    part.launch()                                part.leaving() -> (name, copy) pairs, one by one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from csc.kernels.recordable import unfit
from csc.runtime.graph_places import UnfitError, tensors_in, thin

Name = tuple[str, str]  # what it is, and how the stage calls it
Leave = Callable[[Name, torch.Tensor], None]
Run = Callable[[Leave], Any]
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Recorder(Protocol):
    """See csc.devices.DeviceGraphs."""

    def pool(self) -> Any: ...

    def warm(self, run: Callable[[], None]) -> None: ...

    def record(self, run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]: ...


class LeavingPlaces:
    """Where one kind of part of a stage puts what leaves, whichever microbatch it is of: it is taken away at once.

    They are made for the first one that is recorded.
    """

    def __init__(self) -> None:
        self.names: list[Name] | None = None
        self.places: list[torch.Tensor] = []

    def expect(self, names: list[Name], like: Sequence[Layout], device: torch.device) -> None:
        """UnfitError if others came before."""
        if self.names is None:
            made = (torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in like)
            self.places, self.names = [torch.empty_like(one, device=device) for one in made], names
        elif names != self.names or [size for size, _, _ in like] != [one.shape for one in self.places]:
            raise UnfitError("what leaves it is not the same for each microbatch")


class RecordedPart:
    """See the module. pool: of the recorder, for what it makes and keeps."""

    def __init__(self, recorder: Recorder, run: Run, pool: Any, leaving: LeavingPlaces, device: torch.device) -> None:
        self._leaving = leaving
        names: list[Name] = []
        like: list[Layout] = []

        def note(name: Name, tensor: torch.Tensor) -> None:
            names.append(name)
            like.append((tensor.shape, tensor.stride(), tensor.dtype))

        def warm() -> None:
            with only_fit(device):
                tensors_in(run(note))

        def record() -> Any:
            left = iter(leaving.places)
            return run(lambda _, tensor: _put(next(left), tensor))

        recorder.warm(warm)
        leaving.expect(names, like, device)
        self.launch, self.kept = recorder.record(record, pool)

    def leaving(self) -> Iterator[tuple[Name, torch.Tensor]]:
        """Copies of what has left with the last launch of a part of this kind."""
        for name, place in zip(self._leaving.names or (), self._leaving.places, strict=True):
            yield name, place.clone()

    @property
    def left(self) -> list[torch.Tensor]:
        """That itself, until the next launch."""
        return self._leaving.places


def _put(place: torch.Tensor, tensor: torch.Tensor) -> None:
    thin(place).copy_(thin(tensor))


def only_fit(device: torch.device) -> Any:
    """A context in which an unfit call (csc.kernels.recordable) is UnfitError, before it runs."""
    from csc.torch_private.traces import TorchDispatchMode, pytree

    class OnlyFit(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            why = unfit(operator, given, device)
            if not why:
                results = operator(*args, **(kwargs or {}))
                made = [one for one in pytree.tree_leaves(results) if isinstance(one, torch.Tensor)]
                if any(one.device != device for one in made):
                    why = f"{operator._schema.name}: it makes tensors of another device than {device}"
            if why:
                raise UnfitError(why)
            return results

    return OnlyFit()
