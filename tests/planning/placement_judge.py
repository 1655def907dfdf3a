"""The best of all placements of a small problem, by brute force that shares no code with the planner.

Every unit may stand on any rank, on its own: as messages take no time and actions nothing of their own, stages of
several units only wait for more, so no partition is better. Lanes run their microbatches in order, which costs nothing
as these are alike.

    best_placement(problem, below) -> (seconds, the rank of each unit)     (below, None) if nothing takes less
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from csc.planning.problem import Problem
from tests.planning.graphs import Op, edges_of, seconds_of

Times = tuple[float, ...]


def best_placement(problem: Problem, below: float) -> tuple[float, tuple[int, ...] | None]:
    """Over all ranks of all units and all orders. Ranks and microbatches are alike."""
    best, found = below, None
    homes = [home for home in _homes(len(problem.units), problem.ranks) if len(set(home)) == problem.ranks]
    work = [unit.forward + unit.backward_input + unit.backward_weight for unit in problem.units]
    homes.sort(key=lambda home: max(_loads(home, work)))
    for home in homes:
        if max(_loads(home, work)) * problem.microbatches >= best:
            break
        seconds = _Orders(problem, home).least(best)
        if seconds < best:
            best, found = seconds, home
    return best, found


def _homes(units: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Each way to put units on ranks once: ranks are numbered by their first units."""
    for home in itertools.product(range(ranks), repeat=units):
        first = [home.index(rank) for rank in sorted(set(home))]
        if first == sorted(first):
            yield home


def _loads(home: tuple[int, ...], work: list[float]) -> list[float]:
    found = [0.0] * (max(home) + 1)
    for rank, seconds in zip(home, work):
        found[rank] += seconds
    return found


class _Orders:
    """All active schedules (Giffler and Thompson 1960): of the actions that could come next take the one that would end
    first, and try each that its rank could start before that. What is no better than the same actions done before is
    left out.
    """

    def __init__(self, problem: Problem, home: tuple[int, ...]) -> None:
        lanes: list[Op] = [(kind, u) for kind in "FBW" for u in range(len(problem.units))]
        self.count, self.ranks = problem.microbatches, max(home) + 1
        self.seconds = [seconds_of(problem, lane) for lane in lanes]
        self.home = [home[u] for _, u in lanes]
        number = {lane: i for i, lane in enumerate(lanes)}
        self.ahead: list[list[int]] = [[] for _ in lanes]
        self.behind: list[list[int]] = [[] for _ in lanes]
        for a, b in sorted(set(edges_of(problem))):
            self.ahead[number[b]].append(number[a])
            self.behind[number[a]].append(number[b])
        self.tail = [0.0] * len(lanes)  # the longest path after the lane's action, of one microbatch
        for _ in lanes:
            for i, later in enumerate(self.behind):
                self.tail[i] = max((self.seconds[j] + self.tail[j] for j in later), default=0.0)
        self.seen: dict[tuple[int, ...], list[Times]] = {}

    def least(self, below: float) -> float:
        """Seconds of the best order, or `below`."""
        self.best = below * (1 - 1e-9)
        self._extend([0] * len(self.seconds), [[] for _ in self.seconds], [0.0] * self.ranks)
        return self.best if self.best < below * (1 - 1e-9) else below

    def _extend(self, done: list[int], ends: list[list[float]], free: list[float]) -> None:
        lanes = range(len(done))
        starts: dict[int, float] = {}
        for i in lanes:
            k = done[i]
            if k < self.count and all(done[a] > k for a in self.ahead[i]):
                starts[i] = max([free[self.home[i]], *(ends[a][k] for a in self.ahead[i])])
        if not starts:
            self.best = min(self.best, max(free))
            return
        if self._hopeless(done, starts, free) or self._known(done, ends, free):
            return
        first = min(starts, key=lambda i: (starts[i] + self.seconds[i], i))
        limit, rank = starts[first] + self.seconds[first], self.home[first]
        chosen = [i for i in starts if self.home[i] == rank and (starts[i] < limit or i == first)]
        for i in sorted(chosen, key=lambda i: (starts[i], -self.tail[i])):
            was = free[rank]
            free[rank] = starts[i] + self.seconds[i]
            done[i] += 1
            ends[i].append(free[rank])
            self._extend(done, ends, free)
            ends[i].pop()
            done[i] -= 1
            free[rank] = was

    def _hopeless(self, done: list[int], starts: dict[int, float], free: list[float]) -> bool:
        """Whether some rank, or what one ready action leads to, takes as long as the best."""
        left, tails = [0.0] * self.ranks, [float("inf")] * self.ranks
        for i, k in enumerate(done):
            if k < self.count:
                rank = self.home[i]
                left[rank] += (self.count - k) * self.seconds[i]
                tails[rank] = min(tails[rank], self.tail[i])
        begin = [float("inf")] * self.ranks
        for i, start in starts.items():
            if start + self.seconds[i] * (self.count - done[i]) + self.tail[i] >= self.best:
                return True
            begin[self.home[i]] = min(begin[self.home[i]], start)
        return any(now + more + tail >= self.best for now, more, tail in zip(free, left, tails) if more)

    def _known(self, done: list[int], ends: list[list[float]], free: list[float]) -> bool:
        """Whether the same actions were done before with nothing later."""
        times = (*free, *(row[k] for row, i in zip(ends, range(len(done))) for k in self._awaited(i, done)))
        earlier = self.seen.setdefault(tuple(done), [])
        if any(all(a <= b for a, b in zip(other, times)) for other in earlier):
            return True
        earlier[:] = [other for other in earlier if not all(b <= a for a, b in zip(other, times))]
        earlier.append(times)
        return False

    def _awaited(self, lane: int, done: list[int]) -> range:
        """Microbatches whose results some action still needs."""
        return range(min((done[b] for b in self.behind[lane]), default=done[lane]), done[lane])
