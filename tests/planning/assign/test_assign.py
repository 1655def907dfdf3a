"""Assignments of samples: each once, as fast as they say, never below the bound, no slower than plain LPT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance.rivals import RIVALS, Question
from csc.errors import InputError, ScheduleError
from csc.ir.schedule import Schedule, parse
from csc.planning.assign.portfolio import Assignment, assign, filled
from csc.planning.assign.step import SampleCosts, bound, divided_bound
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules.named import one_f_one_b
from csc.planning.schedules.work import WorkTables, actions, orders_of
from csc.simulation.pipeline import Loads, StageWork, peak_memory
from csc.simulation.simulate import makespan
from tests.planning.assign.random_steps import of_rates, steps
from tests.planning.schedule_cases import Case, cases


def simulated(step: SampleCosts, schedule: Schedule, groups: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Seconds and peaks of one replica by the simulator, features added up sample by sample."""
    features = []
    for group in groups:
        sums = [sum(step.samples[i][f] for i in group) for f in range(step.samples.shape[1])]
        padded = [s if m <= 1 else -(-s // m) * m for s, m in zip(sums, step.multiple)]
        features.append((1.0, *map(float, padded)))
    loads = step.pipeline.loads
    assert loads is not None
    pipeline = replace(step.pipeline, loads=Loads(tuple(features), loads.stages, loads.messages))
    return makespan(pipeline, schedule), peak_memory(pipeline, schedule)


def check(step: SampleCosts, schedule: Schedule, found: Assignment) -> None:
    everyone = sorted(i for own in found.groups for group in own for i in group)
    assert everyone == list(range(len(step.samples)))
    assert len(found.groups) == step.replicas
    assert all(len(own) == step.microbatches and all(own) for own in found.groups)
    right = [simulated(step, schedule, own) for own in found.groups]
    assert found.seconds == pytest.approx(max(seconds for seconds, _ in right), rel=1e-12)
    assert found.peaks == pytest.approx([max(each) for each in zip(*(peaks for _, peaks in right))], rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(steps(), st.sampled_from([0, 10]))
def test_each_sample_once_in_the_time_that_it_says(case: tuple[SampleCosts, Schedule], rounds: int) -> None:
    step, schedule = case
    found = assign(step, rounds=rounds)
    check(step, schedule, found)
    assert found == assign(step, rounds=rounds)
    assert found.seconds >= bound(step) * (1 - 1e-9)
    assert rounds == 0 or found.seconds <= assign(step, rounds=0).seconds * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(steps())
def test_no_step_of_one_replica_is_longer_than_those_of_others(case: tuple[SampleCosts, Schedule]) -> None:
    """Whose assignments csc can price."""
    step = replace(case[0], replicas=1)
    whole = (step.samples @ step.rank_rates[1:]).sum(axis=1)
    asked = Question(step, np.zeros(len(whole)), whole, 0, 0.0)
    own = assign(step, rounds=0).seconds
    for name in ("LPT", "DistTrain") if whole.sum() else ():
        assert own <= step.seconds_of(RIVALS[name](asked)[0]) * (1 + 1e-9), name


def assignments(step: SampleCosts) -> Iterator[list[list[list[int]]]]:
    """All, by brute force."""
    places = list(product(range(step.replicas), range(step.microbatches)))
    for chosen in product(range(len(places)), repeat=len(step.samples)):
        if len(set(chosen)) == len(places):
            groups: list[list[list[int]]] = [[[] for _ in range(step.microbatches)] for _ in range(step.replicas)]
            for sample, place in enumerate(chosen):
                replica, position = places[place]
                groups[replica][position].append(sample)
            yield groups


@settings(max_examples=25, deadline=None)
@given(steps(most_samples=4, most=2))
def test_no_assignment_beats_the_bound(case: tuple[SampleCosts, Schedule]) -> None:
    step, schedule = case
    least = min(max(simulated(step, schedule, own)[0] for own in groups) for groups in assignments(step))
    assert bound(step) <= least * (1 + 1e-9)
    assert divided_bound(step) <= least * (1 + 1e-6)
    assert assign(step, rounds=20).seconds >= least * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0]), min_size=3, max_size=7), st.integers(1, 3))
def test_longest_first_is_within_a_third_of_the_best(sizes: list[float], bins: int) -> None:
    """Graham's bound, 4/3 - 1/(3 m), against all ways; no bin is empty."""
    found = filled(np.array(sizes)[:, None] / sum(sizes), np.ones(bins))
    assert set(found) == set(range(bins))
    levels = [sum(size for size, b in zip(sizes, found) if b == k) for k in range(bins)]
    best = min(
        max(sum(size for size, b in zip(sizes, chosen) if b == k) for k in range(bins))
        for chosen in product(range(bins), repeat=len(sizes))
    )
    assert max(levels) <= best * (4 / 3 - 1 / (3 * bins)) * (1 + 1e-9)


def test_small_microbatches_at_both_ends_beat_equal_ones() -> None:
    """What the portfolio is for: four ranks in a row, all samples alike, three for each microbatch."""
    found = chain_of_four(48, 16)
    step, schedule = found
    plain = [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(16)]
    own = assign(step)
    check(step, schedule, own)
    assert own.seconds < simulated(step, schedule, plain)[0]
    sizes = [len(group) for group in own.groups[0]]
    assert sizes[0] < 3 and max(sizes) > 3


def chain_of_four(samples: int, microbatches: int) -> tuple[SampleCosts, Schedule]:
    nothing, one = StageWork(0.0), StageWork(1.0, 1.0, 1.0, saved=1.0, stashed=0.5)
    messages = {c: (0.0, 0.0) for s in range(3) for c in (("F", s, s + 1), ("B", s + 1, s))}
    pipeline = of_rates(((nothing, one),) * 4, messages)
    schedule = SCHEDULES["1f1b"](replace(pipeline, loads=None), range(4), microbatches)
    orders = tuple(map(tuple, orders_of(schedule)))
    return SampleCosts(np.ones((samples, 1)), pipeline, (0, 1, 2, 3), orders, 1, microbatches, (1.0,)), schedule


def test_memory_is_kept_to() -> None:
    step, schedule = chain_of_four(48, 16)
    free = assign(step, rounds=0)
    room = [0.9 * max(free.peaks)] * 4
    found = assign(step, room, rounds=0)
    check(step, schedule, found)
    assert all(peak <= limit for peak, limit in zip(found.peaks, room))
    assert found.seconds >= free.seconds


def test_what_is_refused() -> None:
    step, _ = chain_of_four(8, 16)
    with pytest.raises(InputError, match="8 samples do not fill 16 microbatches"):
        assign(step)
    step, _ = chain_of_four(48, 16)
    samples = step.samples.copy()
    samples[17] = 100.0
    with pytest.raises(InputError, match=r"sample 17 alone takes 100 bytes on rank 0, which has room for 50"):
        assign(replace(step, samples=samples), room=[50.0] * 4)
    with pytest.raises(InputError, match="no assignment was found whose activations fit"):
        assign(step, room=[2.0] * 4)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_orders_of_a_schedule_are_those_that_it_was_made_of(case: Case) -> None:
    work = WorkTables.of(case.pipeline, case.placement, case.microbatches)
    orders = one_f_one_b(work)
    schedule = Schedule("made", tuple(map(tuple, actions(work, orders))))
    assert orders_of(schedule) == [list(order) for order in orders]


def test_a_schedule_that_takes_microbatches_out_of_turn() -> None:
    with pytest.raises(ScheduleError, match="'F 0 1' comes where microbatch 0 would be next"):
        orders_of(parse("rank 0: F 0 1 | F 0 0"))


def test_features_are_the_sums_of_groups_empty_ones_too() -> None:
    step, _ = chain_of_four(6, 3)
    step = replace(step, samples=np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]))
    groups = [[], [2, 0], [], [5], []]
    assert step.features(groups).tolist() == [[1.0, 0.0], [1.0, 4.0], [1.0, 0.0], [1.0, 6.0], [1.0, 0.0]]
