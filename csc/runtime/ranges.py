"""Ranges for torch.profiler (and NVTX through it): what a rank runs, by action, stage, microbatch and region.

Terms: a *range* is a torch.profiler.record_function. They are made while a profiler is on, and cost nothing else.

    ranges = Ranges(stages)
    ranges.over(weights)                        weights that tell which region reads them
    with ranges.of(action): ...                 "F stage 2 microbatch 5 [layers.4 ... layers.7]", and in it "layers.4"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from csc.ir.schedule import Action
from csc.runtime.specs import StageSpec


class Ranges(Mapping[str, torch.Tensor]):
    """The weights of a rank. A region's functions are called with those below its name, which is when it begins."""

    def __init__(self, stages: Mapping[int, StageSpec]) -> None:
        self._weights: Mapping[str, torch.Tensor] = {}
        self._stages = stages
        self._region: record_function | None = None

    def over(self, weights: Mapping[str, torch.Tensor]) -> Ranges:
        """Those that the next action reads."""
        self._weights = weights
        return self

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """While an action runs."""
        with record_function(self._name(action)):
            try:
                yield
            finally:
                self._leave()

    def enters(self, region: str) -> None:
        """A region begins, and the one before it is done."""
        self._leave()
        self._region = record_function(region)
        self._region.__enter__()

    def _leave(self) -> None:
        if self._region is not None:
            self._region.__exit__(None, None, None)
            self._region = None

    def _name(self, action: Action) -> str:
        if not action.computes:
            return str(action)
        regions = self._stages[action.stage].regions
        named = regions[0] if len(regions) == 1 else " ... ".join((regions[0], regions[-1])) if regions else "nothing"
        return f"{action.kind} stage {action.stage} microbatch {action.microbatch} [{named}]"
