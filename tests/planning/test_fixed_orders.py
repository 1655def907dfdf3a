"""Many tables of work timed under the same orders: bit for bit what each takes alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import ScheduleError
from csc.planning.assign.step import SampleCosts
from csc.planning.schedules.work import FixedOrders, WorkTables, makespan, peaks
from csc.simulation.pipeline import Loads
from tests.planning.assign.random_steps import steps
from tests.planning.assign.test_assign import chain_of_four
from tests.planning.schedule_cases import Case, cases
from tests.planning.test_fusing import greedy


def sizes(work: WorkTables) -> list[list[float]]:
    """Seconds on the wire of each channel in its order, by position; nothing where it leads to the same rank."""
    found = []
    for kind, source, end in sorted(work.pipeline.messages):
        lane, fed = (3 * stage + "FBW".index(kind) for stage in (source, end))
        found.append(next(wire for to, _, _, wire in work.feeds[lane] if to == fed))
    return found


@settings(max_examples=120, deadline=None)
@given(cases(5, 4), st.permutations("FBW").map("".join), st.booleans(), st.randoms(use_true_random=False))
def test_all_in_one_walk_are_what_each_is_alone(case: Case, urgency: str, fused: bool, random: object) -> None:
    _, orders, _ = greedy(case, math.inf, urgency, fused)
    works = []
    for _ in range(3):
        factors = [random.choice([0.0, 0.3, 1.0, 2.7]) for _ in range(case.microbatches)]  # type: ignore[attr-defined]
        loads = Loads.scaled(case.pipeline.stages, case.pipeline.messages, factors)
        works.append(WorkTables.of(replace(case.pipeline, loads=loads), case.placement, case.microbatches))
    fixed = FixedOrders(works[0], orders)
    seconds = np.stack([np.array(work.seconds) for work in works], axis=-1)
    wires = np.stack([np.array(sizes(work)).reshape(-1, case.microbatches) for work in works], axis=-1)
    assert fixed.makespans(seconds, wires).tolist() == [makespan(work, orders) for work in works]
    for work in works:
        assert fixed.peaks(np.array(work.growth), np.array(work.moment)) == peaks(work, orders)


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 7))
def test_ways_to_fill_microbatches_take_what_each_takes_alone(case: tuple[SampleCosts, object], count: int) -> None:
    step, _ = case
    own = range(step.microbatches)
    ways = [[[*range(m, len(step.samples), step.microbatches)][way % 2 :] or [m] for m in own] for way in range(count)]
    assert step.seconds_of_ways(ways) == [step.seconds_of(step.features(groups)) for groups in ways]
    for groups in ways:
        features = step.features(groups)
        assert step.activations(features) == peaks(step.work(features), step.orders)


def test_orders_that_wait_for_each_other() -> None:
    step, _ = chain_of_four(4, 1)
    backwards = FixedOrders(step.work(np.ones((1, 2))), [[1, 0], [3, 4], [6, 7], [9, 10]])
    with pytest.raises(ScheduleError, match="the ranks' orders wait for each other"):
        backwards.makespans(np.zeros((16, 1, 1)), np.zeros((6, 1, 1)))
