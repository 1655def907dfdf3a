"""What no assignment of a step's samples beats under its order of work.

    bound(step) -> seconds

For each rank: its work for all samples, shared by the replicas, behind the fastest way in (a microbatch of the cheapest
sample, feature by feature) and before the fastest way out. Rounding is left out: it only adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csc.planning.assign.step import SampleCosts
from csc.planning.schedules.makespan_bound import heads_and_tails, way_back
from csc.planning.schedules.work import WorkTables


def bound(step: SampleCosts) -> float:
    """Seconds of the step that no assignment to these replicas and microbatches is below."""
    cheapest = np.array([1.0, *step.samples.min(axis=0)])
    work = step.work(np.tile(cheapest, (step.microbatches, 1)))
    features = np.array([step.microbatches * step.replicas, *step.samples.sum(axis=0)])
    busy = features @ step.rank_rates / step.replicas
    head, tail = heads_and_tails(work)
    return max(_before(work, order, head) + float(busy[rank]) + _after(work, order, tail)
               for rank, order in enumerate(step.orders))  # fmt: skip


def _before(work: WorkTables, order: Sequence[int], head: Sequence[float]) -> float:
    return head[work.lane_of[order[0]]]


def _after(work: WorkTables, order: Sequence[int], tail: Sequence[float]) -> float:
    """Behind the order's last action; where that is B and W in one, behind both."""
    last = order[-1]
    return way_back(work, tail, work.lane_of[last]) if last >= work.size else tail[last]
