"""A recorder for CPUs: what is wrong with a recording on a GPU is wrong with one here.

It keeps each call of an operator with the tensors that it was given and makes them again into the same memory. As on a
GPU, recording computes nothing: what was made holds noise until the first launch. A pool is taken at its worst: where
memory was let go of before another recording began, that one has taken it, so a launch leaves noise there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from csc.kernels.recordable import unfit

from csc import devices
from csc.torch_private.traces import TorchDispatchMode, pytree

Storage = int


class Recording:
    """What was called, and the memory that was taken: a tensor over each storage, and who may still look at it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.made: dict[Storage, torch.Tensor] = {}
        self._seen: dict[Storage, list[weakref.ref[torch.Tensor]]] = {}
        self.written: list[torch.Tensor] = []  # places outside of the pool
        self.before_written: list[torch.Tensor] = []
        self.before: list[tuple[Recording, set[Storage]]] = []  # of the pool, and what they held when this one was done

    def sees(self, tensor: torch.Tensor) -> None:
        self._seen.setdefault(_storage(tensor), []).append(weakref.ref(tensor))

    def held(self) -> set[Storage]:
        """Storages that someone can still read."""
        return {one for one, refs in self._seen.items() if any(ref() is not None for ref in refs)}

    def spoil(self, kept: set[Storage] = frozenset()) -> None:  # type: ignore[assignment]
        for storage, tensor in self.made.items():
            if storage not in kept:
                noise(tensor)

    def run(self) -> None:
        for operator, args, kwargs, results in self.calls:
            args, kwargs = views((args, kwargs))  # on which no kernel has kept anything
            found = [one for one in pytree.tree_leaves(operator(*args, **kwargs)) if isinstance(one, torch.Tensor)]
            for place, one in zip(results, found, strict=True):
                if _storage(place) in self.made and _storage(one) != _storage(place):
                    place.copy_(one)


class CpuRecorder:
    """As csc.devices.DeviceGraphs. launches: how often each recording was launched."""

    def __init__(self) -> None:
        self.pools: list[list[Recording]] = []
        self.launches: list[int] = []

    def pool(self) -> Any:
        self.pools.append([])
        return self.pools[-1]

    def warm(self, run: Callable[[], None]) -> None:
        run()

    def finish(self) -> None:
        """All has run."""

    def record(self, run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        recording = Recording()
        with _Recorded(recording):
            made = run()
        recording.before = [(one, one.held()) for one in pool]
        own = recording.held()
        pool.append(recording)
        recording.spoil()
        for one, before in zip(recording.written, recording.before_written, strict=True):
            one.copy_(before)  # when it is launched, not before
        number = len(self.launches)
        self.launches.append(0)

        def launch() -> None:
            self.launches[number] += 1
            recording.run()
            recording.spoil(own)
            for other, held in recording.before:
                other.spoil(held)
            for later in pool[pool.index(recording) + 1 :]:
                later.spoil()  # it may lie where this one works

        return launch, made


class _Recorded(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        why = unfit(operator, given, torch.device("cpu"))
        if why:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        own = {_storage(one) for one in given}
        if operator._schema.is_mutable and _storage(given[0]) not in self._recording.made:
            self._recording.written.append(given[0].detach())
            self._recording.before_written.append(given[0].clone())
        results = operator(*args, **kwargs)
        made = [one for one in pytree.tree_leaves(results) if isinstance(one, torch.Tensor)]
        for one in made:
            if _storage(one) not in own and _storage(one) not in self._recording.made:
                self._recording.made[_storage(one)] = _whole(one)
            if _storage(one) in self._recording.made:
                self._recording.sees(one)
        self._recording.calls.append((operator, *views((args, kwargs)), [one.detach() for one in made]))
        return results


def views(nested: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda one: one.detach(), nested)


def _storage(tensor: torch.Tensor) -> Storage:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All that its storage holds."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[arg-type]


def noise(tensor: torch.Tensor) -> None:
    """What nobody may read."""
    if tensor.numel():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 113 if tensor.dtype != torch.bool else True)


def recorded_on_cpus(monkeypatch: Any) -> CpuRecorder:
    """CPUs have graphs from now on."""
    recorder = CpuRecorder()
    monkeypatch.setattr(devices, "graphs", lambda device: recorder)
    return recorder
