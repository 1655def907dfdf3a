"""The order that is fastest on average where computes and messages are now and then held up.

Terms: see work.py and csc.simulation.simulate. A *draw* is one seed's delays; all orders meet the same draws.

A warm-up as deep as the memory allows lets a rank go on while one before it is held up; a fixed order of that kind
comes within a few parts in a hundred of one that takes at run time whatever is ready, at equal memory, and needs no
agreement between ranks about what is next. What it costs is memory: of orders that are about as fast the one that
holds the least is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from csc.errors import CscError, InputError
from csc.ir.schedule import Schedule
from csc.planning.schedules.auto import auto, finish
from csc.planning.schedules.named import ORDERS, eager
from csc.planning.schedules.work import WorkTables, room
from csc.simulation.pipeline import Pipeline, peak_memory
from csc.simulation.simulate import Jitter, makespan

DRAWS = 8
TIMES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, math.inf)  # depths of warm-up
ALIKE = 1.002  # times the least mean: orders that take no more are about as fast
BUDGET = 100  # simulated actions for each action of the step, of the search without jitter


def mean_makespan(pipeline: Pipeline, schedule: Schedule, jitter: Jitter, draws: int = DRAWS) -> float:
    """Of so many draws: seeds jitter.seed, jitter.seed + 1, ..."""
    if draws < 1:
        raise InputError(f"a mean of {draws} draws is none", "robust", "Ask for 1 or more")
    if not jitter.probability or not jitter.alpha:
        return makespan(pipeline, schedule)
    seeds = range(jitter.seed, jitter.seed + draws)
    return sum(makespan(pipeline, schedule, replace(jitter, seed=seed)) for seed in seeds) / draws


def robust(
    pipeline: Pipeline,
    placement: Sequence[int],
    microbatches: int,
    memory: Sequence[float] | float | None = None,
    jitter: Jitter | None = None,
    draws: int = DRAWS,
    names: Sequence[str] = tuple(ORDERS),
) -> Schedule:
    """The schedule of least mean makespan: named ones, eager ones of deeper warm-up, with B and W fused or apart, and
    the one that `auto` finds without jitter.

    Args:
        pipeline: Stages, messages and network.
        placement: The rank of each stage.
        microbatches: Of a step.
        memory: Bytes of each rank, or of all, for state and activations; None: no limit.
        jitter: The delays; None or J0: none.
        draws: Over which the mean is taken.
        names: Of named schedules that are tried; those that want their stages elsewhere or do not fit are left out.

    Returns:
        A schedule in whose name its warm-up stands, such as `eager-1f1b 4x`.

    Raises:
        InputError: Nothing fits into the memory: what would.
    """
    jitter = Jitter(0.0, 0.0, 0.0) if jitter is None else jitter
    work = WorkTables.of(pipeline, placement, microbatches)
    tried = []
    for schedule in _candidates(work, memory, names):
        tried.append((mean_makespan(pipeline, schedule, jitter, draws), schedule))
    least = min(seconds for seconds, _ in tried)
    return _lightest(pipeline, [row for row in tried if row[0] <= least * ALIKE])


def _lightest(pipeline: Pipeline, alike: Sequence[tuple[float, Schedule]]) -> Schedule:
    """The one that holds the least on its fullest rank; of equals the fastest, then the first."""
    numbered = [(max(peak_memory(pipeline, orders)), seconds, n) for n, (seconds, orders) in enumerate(alike)]
    return alike[min(numbered)[2]][1]


def _candidates(
    work: WorkTables, memory: Sequence[float] | float | None, names: Sequence[str]
) -> Iterator[Schedule]:  # fmt: skip
    allowed = room(work, memory)  # InputError if nothing fits
    budget = BUDGET * len(work.lanes) * work.microbatches
    yield auto(work.pipeline, work.placement, work.microbatches, memory, budget, in_turn=True)
    seen: list[list[list[int]]] = []
    for name in names:
        with suppress(CscError):
            yield finish(name, work, ORDERS[name](work, allowed), memory)
    for times, late in product(TIMES, (False, True)):
        orders = eager(work, allowed, times, late)
        if orders not in seen:
            seen.append(orders)
            text = "all" if math.isinf(times) else f"{times:g}x"
            with suppress(CscError):
                yield finish(f"eager-1f1b {text}{', W late' if late else ''}", work, orders, memory)
