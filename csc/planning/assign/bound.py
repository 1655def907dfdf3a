"""What no assignment of a step's samples beats under its order of work.

    bound(step) -> seconds                         cheap
    divided_bound(step, room) -> seconds           tighter, and by a linear program: seconds, for 256 samples

For each rank: its work for all samples, shared by the replicas, behind the fastest way in (a microbatch of the cheapest
sample, feature by feature) and before the fastest way out. The linear program lets samples be cut, each part in another
microbatch, but has every microbatch hold parts of one sample's worth at least; replicas are alike in it, which no step
is shorter for, since seconds are convex in amounts. Rounding is left out: it only adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from csc.planning.assign.linear_step import LinearStep
from csc.planning.assign.step import SampleCosts
from csc.planning.schedules.auto import heads_and_tails, way_back
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


def divided_bound(step: SampleCosts, room: Sequence[float] | None = None) -> float:
    """The same where samples can be cut. room: bytes for activations by rank, None: no limit; inf if nothing fits."""
    count = step.microbatches
    mean = np.maximum(step.samples.sum(axis=0) / (count * step.replicas), 1e-300)
    program = LinearStep(step, np.diag(mean), room)
    parts = [[program.variable() for _ in step.samples] for _ in range(count)]
    for sample in zip(*parts):
        program.equal([(part, 1.0) for part in sample], 1.0 / step.replicas)
    for k, own in enumerate(parts):
        program.at_most([(part, -1.0) for part in own], -1.0)
        for kind, column in enumerate((step.samples / mean).T):
            terms = [(part, float(size)) for part, size in zip(own, column) if size]
            program.equal([*terms, (program.amount(k, kind), -1.0)], 0.0)
    found = program.solved(method="highs-ipm")
    return math.inf if found is None else float(found[program.end])


def _before(work: WorkTables, order: Sequence[int], head: Sequence[float]) -> float:
    return head[work.lane_of[order[0]]]


def _after(work: WorkTables, order: Sequence[int], tail: Sequence[float]) -> float:
    """Behind the order's last action; where that is B and W in one, behind both."""
    last = order[-1]
    return way_back(work, tail, work.lane_of[last]) if last >= work.size else tail[last]
