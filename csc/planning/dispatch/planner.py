"""Dispatch blocks of tokens to context-parallel ranks.

Terms: see workload.py and evaluate.py. A *start* is a dispatch in closed form or by bisection; the most promising
ones are improved by swaps; the best of everything seen is the plan, so it is never worse than a start.

    plan(workload, slack=0) -> Dispatch
    evaluate(workload, ranks_of_blocks) -> Dispatch: the same report of somebody else's dispatch
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csc.errors import InputError
from csc.planning.dispatch import kv_collectives
from csc.planning.dispatch.bisect import Bisector, by_reach
from csc.planning.dispatch.evaluate import Measured, Prepared, measure, prepare, seconds
from csc.planning.dispatch.load_bound import lower_bound
from csc.planning.dispatch.starts import by_load, contiguous, round_robin, zigzag
from csc.planning.dispatch.swaps import improve
from csc.planning.dispatch.workload import Workload

STEPS = 20  # swaps for 1024 blocks on 8 ranks; fewer blocks make a step cheaper, so there are more
CLOSE = 1.0005  # so near to the lower bound, no other start is taken up
ROOM = 1.03  # imbalance of loads that swaps are expected to remove, when starts are compared
TRIED = 2  # starts that are improved
LEAST = 8  # steps that make it worth while to take up another one, or the best once more
LOOSE = (0.3, 1.0)  # imbalances that are allowed to bisections where links are what takes long
WAITS = 1.1  # a dispatch waits for links if they make it take so many times as long
UNEVEN = 1.5  # what swaps are expected to leave of the busiest link over the mean


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Which rank computes which block, and what that takes by the model.

    ranks_of_blocks: int64 [nQ]. origin: what made it. seconds: of all layers, forward and backward, with exact sets.
    measured: of each mask, loads, needed sets (bool [P, nK]) and volumes by rank.
    """

    prepared: Prepared
    ranks_of_blocks: np.ndarray
    measured: tuple[Measured, ...]
    seconds: float
    origin: str

    @property
    def blocks(self) -> list[np.ndarray]:
        """Of each rank, its blocks in ascending order: the order of its tokens."""
        return [np.flatnonzero(self.ranks_of_blocks == rank) for rank in range(self.prepared.workload.ranks)]

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that every dispatch with equal counts takes (docs/dispatch.md)."""
        return lower_bound(self.prepared)

    @property
    def imbalance(self) -> float:
        """Load of the heaviest rank over the mean; the worst mask."""
        return max(m.load / max(float(m.loads.mean()), 1e-30) for m in self.measured)

    @property
    def volume_over_all_gather(self) -> float:
        """Foreign keys that all ranks need, over those that an all-gather moves; all layers."""
        masks = list(zip(self.prepared.masks, self.measured))
        moved = sum(mask.layers * float(m.received.sum()) for mask, m in masks)
        ranks = self.prepared.workload.ranks
        return moved / max(sum(mask.layers * float(mask.shares.sum()) * (ranks - 1) for mask, _ in masks), 1e-30)

    @cached_property
    def collectives(self) -> dict[str, float]:
        """Seconds by collective."""
        return kv_collectives.compare(self.prepared, list(self.measured))

    @property
    def collective(self) -> str:
        """The cheapest one."""
        return kv_collectives.cheapest(self.collectives, list(self.measured))


def evaluate(workload: Workload, ranks_of_blocks: np.ndarray) -> Dispatch:
    """The report of a given dispatch: int [nQ], a rank for each block. Counts need not be equal.

    Raises InputError where a block has no rank of this workload.
    """
    given = np.asarray(ranks_of_blocks)
    if given.shape != (workload.blocks,) or given.min() < 0 or given.max() >= workload.ranks:
        what = f"{workload.blocks} blocks need a rank below {workload.ranks} each, and what was given is not that"
        raise InputError(what, "evaluate", "Give one rank for each block")
    return _report(prepare(workload), given.astype(np.int64), "given")


def _report(prepared: Prepared, ranks_of_blocks: np.ndarray, origin: str) -> Dispatch:
    measured = measure(prepared, ranks_of_blocks)
    return Dispatch(prepared, ranks_of_blocks, tuple(measured), seconds(prepared, measured), origin)


def starts(prepared: Prepared, slack: float) -> dict[str, np.ndarray]:
    """Name -> int64 [nQ]: the closed forms, and bisections of two orders."""
    n, ranks = prepared.workload.blocks, prepared.workload.ranks
    loads = np.sum([mask.layers * mask.loads for mask in prepared.masks], axis=0)
    natural = Bisector(prepared, np.arange(n))
    made = {
        "contiguous": contiguous(n, ranks),
        "zigzag": zigzag(n, ranks),
        "by load": by_load(loads, ranks),
        "round robin": round_robin(loads, ranks),
        "bisection": natural.cut(slack / 2),
    }
    if _waits(prepared, made["bisection"]):
        made |= {f"bisection within {tolerance:.0%}": natural.cut(tolerance) for tolerance in LOOSE}
    elif (np.diff(reach := by_reach(prepared)) < 0).any():
        made["bisection by reach"] = Bisector(prepared, reach).cut(slack / 2)
    return made


def _waits(prepared: Prepared, ranks_of_blocks: np.ndarray) -> bool:
    """Whether this dispatch waits for its links, so that a worse balance may be worth fewer keys."""
    measured = measure(prepared, ranks_of_blocks)
    rates = prepared.workload.rates
    computed = sum(mask.layers * rates.seconds(m.load, 0.0) for mask, m in zip(prepared.masks, measured))
    return seconds(prepared, measured) > WAITS * computed


def _promise(dispatch: Dispatch) -> tuple[float, float]:
    """What is to be expected once swaps have balanced it; then what its busiest link and what all links move."""
    work = dispatch.prepared.workload
    time = moved = 0.0
    for mask, m in zip(dispatch.prepared.masks, dispatch.measured):
        load, mean = max(float(m.loads.mean()), m.load / ROOM), float(m.received.mean())
        time += mask.layers * work.rates.seconds(load, min(m.volume, UNEVEN * mean))
        moved += mask.layers * (m.volume + mean)
    return time, moved


def plan(workload: Workload, slack: float = 0.0) -> Dispatch:
    """Minimise the modelled time; among equal times, what is moved.

    slack: a share of the time that may be given up where that moves less: 0.02 takes, of what the search has seen
        within 2 % of the best, the dispatch that moves least, and lets the search end that near to the lower bound.
    Deterministic. With 1024 blocks and 8 ranks under 20 ms of one core (docs/measurements.md).
    Raises InputError for a negative slack.
    """
    if not slack >= 0:
        raise InputError(f"a slack of {slack} is no share of the time", "plan", "Give 0 or a little more, such as 0.02")
    prepared = prepare(workload)
    seen = [_report(prepared, ranks, name) for name, ranks in starts(prepared, slack).items()]
    enough = lower_bound(prepared) * (1 + slack)
    left = STEPS * min(max(1024 // workload.blocks, 1), 4) * max(workload.ranks // 8, 1)
    improved: list[Dispatch] = []
    for start in sorted(seen, key=_promise)[:TRIED]:
        if not improved or (left >= LEAST and improved[0].seconds > enough * CLOSE):
            left -= _swap(prepared, start, enough, left, improved)
    best = min(improved, key=_merit)
    if left >= LEAST and best.seconds > enough * CLOSE:
        _swap(prepared, best, enough, left, improved)
    seen += improved
    best = min(seen, key=_merit)
    near = [dispatch for dispatch in seen if dispatch.seconds <= best.seconds * (1 + slack)]
    return min(near, key=lambda dispatch: _merit(dispatch)[::-1]) if slack > 0 else best


def _merit(dispatch: Dispatch) -> tuple[float, float]:
    return dispatch.seconds, dispatch.volume_over_all_gather


def _swap(prepared: Prepared, start: Dispatch, enough: float, steps: int, improved: list[Dispatch]) -> int:
    """Improve one dispatch, add the result to `improved` and return how many steps were tried."""
    result = improve(prepared, start.ranks_of_blocks, enough, steps)
    origin = f"{start.origin}, {result.steps} swaps" if result.steps else start.origin
    improved.append(_report(prepared, result.ranks_of_blocks, origin))
    return result.tried
