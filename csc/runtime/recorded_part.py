"""One part of a stage's work (F, B, W or BW) as a device records it once and launches it again.

Terms: a *recorder* records what code launches (csc.devices.DeviceGraphs; tests have one for CPUs). What *leaves* a part
is copied out of the recorder's memory, within the recording, into places that all parts share; what it *keeps*
stays in that memory, for parts of the same microbatch.

    Recorder                                     what is asked of one
    run(leave) -> kept                           a part as code: it calls leave(name, tensor) in order
    part = RecordedPart(recorder, run, pool, places, device)     warms up, records; UnfitError, any of the recorder's
    part.launch()                                part.leaving() -> (name, copy) pairs, one by one
"""

from __future__ import annotations

from collections import Counter
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

    def finish(self) -> None: ...


class LeavingPlaces:
    """Where parts put what leaves, all those of a trainer in the same places: it is taken away at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[tuple[Layout, int], torch.Tensor] = {}  # the several of one layout by number

    def of(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """A place for each: dense ones."""
        count: Counter[Layout] = Counter()
        found = []
        for layout in layouts:
            key = layout, count[layout]
            count[layout] += 1
            if key not in self._places:
                size, stride, dtype = layout
                like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
                self._places[key] = torch.empty_like(like, device=self._device)
            found.append(self._places[key])
        return found


class RecordedPart:
    """See the module. pool: of the recorder, for what it makes and keeps. before: the same for the warm-up, if `run`
    writes over what it is given.
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
