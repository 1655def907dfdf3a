"""Run csc's planner and its rivals on a case.

Terms: *balanced*: csc's planner when communication costs nothing and 2 % of the time may be given up for less of it.
That is how the aims for volumes were measured: swap until the heaviest rank is within 2 % of the mean, with few keys.

    Dispatched: one dispatch and its figures;   Row: a case and all its dispatches
    run(cases, hardware, partial, progress) -> list[Row]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.context_parallel.cases import Case, Hardware, Tiles, tiles, workload
from benchmarks.context_parallel.rivals import RIVALS
from csc.planning.dispatch import Dispatch, evaluate, plan

CSC, BALANCED = "csc", "csc, balanced"
SLACK = 0.019
REPEATS = 3


@dataclass(frozen=True)
class Dispatched:
    """tile, area: heaviest rank over the mean. volume: foreign keys over an all-gather's. seconds: with exact sets.
    gathered: with an all-gather. planner: CPU seconds of one thread; of csc's, the best of three runs."""

    tile: float
    area: float
    volume: float
    seconds: float
    gathered: float
    planner: float
    origin: str
    collective: str


@dataclass(frozen=True)
class Row:
    case: Case
    share: float  # of pairs that are visible
    bound: float  # seconds
    plans: dict[str, Dispatched]  # csc's and the rivals', by name


def run(chosen: list[Case], hardware: Hardware, partial: float, progress: Callable[[str, int, int], None]) -> list[Row]:
    rows = []
    for number, case in enumerate(chosen, 1):
        rows.append(_row(case, tiles(case.mask, case.tokens, case.seed), hardware, partial))
        progress("cases", number, len(chosen))
    return rows


def _row(case: Case, counted: Tiles, hardware: Hardware, partial: float) -> Row:
    work = workload(case, counted, hardware, partial)
    free = replace(work, rates=replace(work.rates, block_seconds=0.0))
    found, took = _timed(plan, work)
    plans = {CSC: _plan(found, counted, took)}
    balanced, took = _timed(plan, free, SLACK, repeats=1)
    plans[BALANCED] = _plan(evaluate(work, balanced.ranks_of_blocks), counted, took)
    for name, rival in RIVALS.items():
        given, took = _timed(rival, counted.classes, case.ranks, repeats=1)
        plans[name] = _plan(evaluate(work, given), counted, took)
    return Row(case, counted.share, found.lower_bound, plans)


def _timed(call: Callable[..., Any], *arguments: Any, repeats: int = REPEATS) -> tuple[Any, float]:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = call(*arguments)
        seconds.append(time.process_time() - start)
    return result, min(seconds)


def _plan(dispatch: Dispatch, counted: Tiles, took: float) -> Dispatched:
    given, ranks = dispatch.ranks_of_blocks, dispatch.prepared.workload.ranks
    nonempty = np.count_nonzero(counted.classes, axis=1)
    return Dispatched(
        tile=_imbalance(given, nonempty, ranks),
        area=_imbalance(given, counted.areas, ranks),
        volume=dispatch.volume_over_all_gather,
        seconds=dispatch.seconds,
        gathered=dispatch.collectives["all-gather"],
        planner=took,
        origin=dispatch.origin,
        collective=dispatch.collective,
    )


def _imbalance(given: np.ndarray, weights: np.ndarray, ranks: int) -> float:
    loads = np.bincount(given, weights=weights, minlength=ranks)
    return float(loads.max() / loads.mean())
