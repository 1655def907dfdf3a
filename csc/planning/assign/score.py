"""What ways to fill microbatches take, many at a time: bytes beyond the room first, then seconds.

score = Score(step, room)
score.each(ways) -> figures                        score.below(ways, least) -> those that cost no more, the best first
score.best_of_each(ways by replica) -> for each replica (groups, figures, which of its ways)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from csc.planning.assign.step import Groups, SampleCosts

Figures = tuple[float, float]  # by how many bytes the room is exceeded, seconds
Lists = list[list[int]]


@dataclass(frozen=True)
class Score:
    """Of ways to fill a replica's microbatches. room: bytes by rank; None: no limit."""

    step: SampleCosts
    room: Sequence[float] | None

    def best_of_each(self, replicas: Sequence[Sequence[Lists]]) -> list[tuple[Lists, Figures, int]]:
        """The first of the best of each replica's ways, all timed in one go."""
        seconds = iter(self.step.seconds_of_ways(list(chain.from_iterable(replicas))))
        return [self._first(ways, [next(seconds) for _ in ways]) for ways in replicas]

    def below(self, ways: Sequence[Lists], least: Figures) -> list[tuple[Figures, int]]:
        """Which of the ways cost no more, the best first."""
        seconds = self.step.seconds_of_ways(ways)
        found = ((self._figures(way, took, least), place) for place, (way, took) in enumerate(zip(ways, seconds)))
        return sorted(one for one in found if one[0] <= least)

    def each(self, ways: Sequence[Lists]) -> list[Figures]:
        """Of each way."""
        return [self._figures(way, took, None) for way, took in zip(ways, self.step.seconds_of_ways(ways))]

    def _first(self, ways: Sequence[Lists], seconds: Sequence[float]) -> tuple[Lists, Figures, int]:
        best, least = 0, self._figures(ways[0], seconds[0], None)
        for place in sorted(range(1, len(ways)), key=seconds.__getitem__):
            figures = self._figures(ways[place], seconds[place], least)
            if figures < least:
                best, least = place, figures
        return ways[best], least, best

    def _figures(self, groups: Groups, seconds: float, least: Figures | None) -> Figures:
        """least: what is to be beaten; of what does not, bytes are left out."""
        if self.room is None:
            return 0.0, seconds
        if least is not None and not least[0] and seconds > least[1]:
            return math.inf, seconds
        taken = self.step.activations(self.step.features(groups))
        return max(0.0, *(peak - limit for peak, limit in zip(taken, self.room))), seconds
