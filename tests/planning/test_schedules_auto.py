"""The search: against brute force, its own bound and every named schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.ir.schedule import verify
from csc.planning.schedules import SCHEDULES, auto, lower_bound, placement
from csc.planning.schedules.auto import improve
from csc.planning.schedules.work import WorkTables, least, peaks, room
from csc.planning.schedules.work import makespan as replayed
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, StageWork, peak_memory
from csc.simulation.simulate import makespan
from tests.planning.schedule_cases import Case, cases, chain

TRIALS = 150  # evaluations of each action in random tests


def small(case: Case) -> int:
    return TRIALS * 3 * len(case.placement) * case.microbatches


@pytest.mark.slow
@settings(deadline=None)
@given(cases(), st.sampled_from([1.0, 1.3, 2.0, None]))
def test_valid_within_memory_and_never_slower_than_a_named_schedule(case: Case, spare: float | None) -> None:
    pipeline = case.pipeline
    work = WorkTables.of(pipeline, case.placement, case.microbatches)
    memory = None if spare is None else [limit * spare for limit in least(work)]
    schedule = auto(pipeline, case.placement, case.microbatches, memory, budget=small(case))
    verify(schedule, pipeline.messages, pipeline.has_b, pipeline.has_w, case.microbatches)
    found = makespan(pipeline, schedule)
    if memory is not None:
        assert all(peak <= limit * (1 + 1e-6) + 1e-6 for peak, limit in zip(peak_memory(pipeline, schedule), memory))
    assert found >= lower_bound(work, room(work, memory)) * (1 - 1e-9)
    for name in SCHEDULES:
        try:
            other = SCHEDULES[name](pipeline, case.placement, case.microbatches, memory)
        except InputError:
            continue
        if name != "auto":
            assert found <= makespan(pipeline, other) * (1 + 1e-9), name


def rank_orders(work: WorkTables, rank: int, room: float | None) -> Iterator[list[int]]:
    """Every order of one rank with one stage, microbatches in turn, that keeps to the room."""
    lanes = work.lanes_of[rank]

    def extend(order: list[int], head: dict[int, int], alive: float) -> Iterator[list[int]]:
        if len(order) == len(lanes) * work.microbatches:
            yield list(order)
        for i, lane in enumerate(lanes):
            k = head[lane]
            if k == work.microbatches or (i and k >= head[lanes[i - 1]]):
                continue
            taken = alive + work.growth[lane][k]
            if room is not None and taken > room * (1 + 1e-9):
                continue
            head[lane] += 1
            order.append(lane)
            yield from extend(order, head, taken)
            order.pop()
            head[lane] -= 1

    return extend([], dict.fromkeys(lanes, 0), 0.0)


def brute_force(work: WorkTables, allowed: list[float] | None) -> float:
    """The least makespan over all orders. Equal microbatches may as well run in turn, by an exchange of the two."""
    choices = [list(rank_orders(work, r, None if allowed is None else allowed[r])) for r in range(work.ranks)]
    return min(replayed(work, orders) for orders in product(*choices))


def small_case(seed: int) -> tuple[WorkTables, list[float] | None]:
    """2 stages and 3 or 4 microbatches, or 3 stages and 2 or 3; some with a frozen first or last stage."""
    rng = random.Random(seed)
    stages, microbatches = rng.choice([(2, 3), (2, 4), (3, 2), (3, 3)])
    frozen = rng.choice(["nothing", "nothing", "first", "weights"])
    made = []
    for s in range(stages):
        turns = not (frozen == "first" and s == 0)
        trained = turns and not (frozen == "weights" and s > 0)
        f, b, w = (rng.choice([0.5, 1.0, 1.5, 2.0, 3.0]) for _ in range(3))
        made.append(StageWork(f, b * turns, w * trained, turns, trained, 1.0 * turns, 0.5 * trained))
    if (stages, microbatches) == (3, 3) and frozen == "nothing":
        microbatches = 2  # 42 ** 3 orders take too long for every run
    messages = {("F", s, s + 1): 1.0 for s in range(stages - 1)}
    messages |= {("B", s + 1, s): 1.0 for s in range(stages - 1) if made[s].has_b}
    link = Link(0.0, rng.choice([float("inf"), 4.0]))
    work = WorkTables.of(Pipeline(tuple(made), messages, Network(link)), range(stages), microbatches)
    spare = rng.choice([None, 1.0, 2.0, 2.5])
    return work, None if spare is None else [spare] * stages


@pytest.mark.slow
def test_as_good_as_brute_force_on_small_cases() -> None:
    gaps = []
    for seed in range(40):
        work, memory = small_case(seed)
        best = brute_force(work, memory)
        found = makespan(work.pipeline, auto(work.pipeline, work.placement, work.microbatches, memory))
        assert lower_bound(work, memory) <= best * (1 + 1e-9)
        assert found >= best * (1 - 1e-9)
        gaps.append(found / best - 1)
    optimal = sum(gap < 1e-9 for gap in gaps)
    assert optimal >= 38 and max(gaps) < 0.03, f"{optimal} of {len(gaps)} optimal, largest gap {max(gaps):.1%}"


def heterogeneous(seed: int, stages: int) -> Pipeline:
    """Stages of about equal work, the first third frozen; messages of 2 % of a forward."""
    rng = random.Random(seed)
    made = []
    for s in range(stages):
        noise = rng.uniform(0.85, 1.15)
        if s < stages // 3:
            made.append(StageWork(3.0 * noise, has_b=False, has_w=False))
        else:
            made.append(StageWork(noise, noise * 1.05, noise * 0.95, saved=noise, stashed=noise / 2))
    messages = {("F", s, s + 1): 1.0 for s in range(stages - 1)}
    messages |= {("B", s + 1, s): 1.0 for s in range(stages - 1) if made[s].has_b}
    return Pipeline(tuple(made), messages, Network(Link(0.01, 100.0)))


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(6, 24), (12, 24)])
def test_close_to_the_bound(stages: int, microbatches: int) -> None:
    """Under the memory of a device on which 1F1B just fits, and under twice its activations."""
    for seed in range(2):
        pipeline = heterogeneous(seed, stages)
        work = WorkTables.of(pipeline, range(stages), microbatches)
        one = max(peak_memory(pipeline, SCHEDULES["1f1b"](pipeline, range(stages), microbatches)))
        for memory, gap in ((one, 1.06), (2 * one, 1.03)):
            schedule = auto(pipeline, range(stages), microbatches, memory, budget=500 * len(work.lanes) * microbatches)
            assert max(peak_memory(pipeline, schedule)) <= memory * (1 + 1e-9)
            assert makespan(pipeline, schedule) <= gap * lower_bound(work)


def test_reaches_the_published_bubbles() -> None:
    pipeline = chain(8, StageWork(1.0, 1.0, 1.0, saved=1.0, stashed=1.0))
    assert makespan(pipeline, auto(pipeline, range(8), 16, 8.0)) == 3 * 16 + 7
    folded = chain(8, StageWork(0.5, 0.5, 0.5, saved=0.5, stashed=0.5))
    assert makespan(folded, auto(folded, placement("zb-v", 4), 12, 4.0)) == 3 * 12 + 1.5


def test_small_microbatches_first_and_last() -> None:
    """One large microbatch among small ones: in the middle it costs the least, and all stages agree on it."""
    alike = Pipeline((StageWork(1.0, 1.0, 1.0),) * 4, chain(4, StageWork(1.0)).messages)
    pipeline = replace(alike, loads=Loads.scaled(alike.stages, alike.messages, (3.0, 1.0, 1.0, 1.0, 1.0, 1.0)))
    schedule = auto(pipeline, range(4), 6)
    orders = {tuple(a.microbatch for a in actions if a.kind == "F") for actions in schedule.ranks}
    assert len(orders) == 1 and orders.pop()[0] != 0
    in_turn = auto(pipeline, range(4), 6, in_turn=True)
    assert {tuple(a.microbatch for a in actions if a.kind == "F") for actions in in_turn.ranks} == {tuple(range(6))}
    assert makespan(pipeline, schedule) < makespan(pipeline, in_turn)


def test_the_same_seed_gives_the_same_schedule() -> None:
    pipeline = heterogeneous(3, 6)
    first, second = (auto(pipeline, range(6), 10, budget=100_000, seed=5) for _ in range(2))
    assert first == second


def test_no_budget_still_gives_a_schedule() -> None:
    pipeline = heterogeneous(4, 5)
    work = WorkTables.of(pipeline, range(5), 7)
    schedule = auto(pipeline, range(5), 7, least(work), budget=0)
    verify(schedule, pipeline.messages, pipeline.has_b, pipeline.has_w, 7)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 5))
def test_local_search_keeps_to_the_rules_and_never_gets_worse(case: Case, seed: int) -> None:
    work = WorkTables.of(case.pipeline, case.placement, case.microbatches)
    allowed = room(work, None)
    orders = [list(order) for order in _all_forwards_first(work)]
    before = replayed(work, orders)
    limit = peaks(work, orders)
    after, seconds = improve(work, orders, limit, 60, random.Random(seed))
    assert allowed is None
    assert seconds <= before * (1 + 1e-9) and replayed(work, after) == pytest.approx(seconds)
    assert [sorted(order) for order in after] == [sorted(order) for order in orders]
    assert all(peak <= most * (1 + 1e-6) + 1e-9 for peak, most in zip(peaks(work, after), limit))


def _all_forwards_first(work: WorkTables) -> list[list[int]]:
    return [
        [lane for lane in sorted(own, key=work.upstream_first.index) for _ in range(work.microbatches)]
        for own in work.lanes_of
    ]
