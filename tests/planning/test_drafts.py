"""Drafts: plans without a search, true in all that they say, and never better than what a plan finds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.gathers import seconds_waited_for
from csc.planning.joint import CLOSER_DRAFTS, drafts
from csc.planning.partition_bound import lower_bound
from csc.planning.plan import PipelinePlan, draft, plan
from csc.planning.problem import Problem, Unit, Value
from csc.planning.screen import Budget
from csc.planning.ways import placements
from csc.simulation.pipeline import Link, peaks
from csc.simulation.simulate import simulate
from tests.planning.graphs import chain, mllm, problem_of, problems
from tests.planning.test_plan import check


def checked(problem: Problem, found: PipelinePlan | None) -> PipelinePlan:
    """What a draft says about itself is true; it says nothing of the bound of one stage on each rank."""
    assert found is not None and found.bound is None
    alone = len(found.stages) == problem.ranks
    check(problem, replace(found, bound=lower_bound(problem).seconds if alone else None))
    return found


@settings(max_examples=60, deadline=None)
@given(problems(most=12), st.booleans())
def test_a_draft_keeps_its_promises(problem: Problem, limited: bool) -> None:
    if limited:
        problem = replace(problem, memory=max(plan(problem, "1f1b", effort=0.05).peak_memory))
    found = draft(problem)
    assert found is not None or limited
    if found is not None:
        checked(problem, found)


@settings(max_examples=60, deadline=None)
@given(problems(most=12))
def test_messages_that_wait_have_room_beside_a_draft(problem: Problem) -> None:
    problem = replace(problem, memory=max(plan(problem, "1f1b", effort=0.05).peak_memory), waiting=True)
    found = draft(problem)
    if found is not None:
        run = simulate(found.pipeline, found.schedule)
        assert found.peak_memory == pytest.approx(peaks(found.pipeline, found.schedule, run))
        assert max(found.peak_memory) <= (problem.memory or 0.0) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_plan_is_as_good_as_a_draft(ranks: int) -> None:
    """With a fifth of the effort: of many stages on a rank it would order few, or none."""
    problem = problem_of(chain(range(8 * ranks)), [(float(1 + u % 3), True) for u in range(8 * ranks)], ranks, 12)
    found = checked(problem, draft(problem))
    assert len(found.stages) > 2 * ranks
    assert plan(problem, effort=0.2).makespan <= found.makespan * (1 + 1e-9)


def test_a_deep_pipeline_of_many_microbatches() -> None:
    """The search of partitions alone takes longer than all that is drafted."""
    times = [(0.5, False)] * 12 + [(float(2 + u % 2), True) for u in range(36)]
    problem = problem_of(chain(range(48)), times, 12, 48)
    begun = time.process_time()
    found = checked(problem, draft(problem))
    drafted = time.process_time() - begun
    planned = plan(problem, effort=0.1)
    assert planned.makespan <= found.makespan * (1 + 1e-9)
    assert drafted < time.process_time() - begun - drafted


def test_what_is_frozen_is_looked_at() -> None:
    """Cuts are even in what is computed: a frozen encoder has no B and no W."""
    problem = mllm([(24, 1.0)], (24, 1.0), 4, (0,), recompute=False, microbatches=8)
    found = checked(problem, draft(problem))
    assert max(found.bubble) < 0.25


def gathering(count: int, memory: float) -> Problem:
    units = tuple(
        Unit(f"u{i}", "llm", 1.0, 1.0, 1.0, saved=0.1, stashed=0.05, state=0.2, gathered=1.0) for i in range(count)
    )
    values = tuple(Value(i, (i + 1,), (True,), 0.1, 0.1) for i in range(count - 1))
    return Problem(units, values, 4, 8, memory, gathering=Link(0.0, 0.25))


def test_stages_stay_whole_where_there_is_room() -> None:
    """A gather takes four times as long as an F: to keep all that was gathered is worth its memory."""
    roomy, tight = gathering(16, 14.0), gathering(16, 6.0)
    kept = draft(roomy)
    assert kept is not None and max(kept.peak_memory) <= 14.0
    less = draft(tight)
    assert less is None or (max(less.peak_memory) <= 6.0 + 1e-9 and less.makespan > kept.makespan)
    assert seconds_waited_for(kept.pipeline, kept.schedule) < 0.5 * kept.makespan


@pytest.mark.parametrize(("count", "memory"), [(12, 5.4), (12, 5.7), (20, 8.4), (20, 10.2), (20, 20.0)])
def test_messages_that_wait_have_room_beside_what_is_gathered(count: int, memory: float) -> None:
    """But for the last, what is drafted without a look at messages exceeds the memory; another draft fits."""
    problem = gathering(count, memory)
    values = tuple(replace(value, size=0.5, gradient_size=0.5) for value in problem.values)
    found = draft(replace(problem, values=values, waiting=True))
    assert found is not None and max(found.peak_memory) <= memory * (1 + 1e-9)


@pytest.mark.parametrize("memory", [4.0, 5.0, 6.0, 8.0, 14.0])
def test_a_plan_is_as_good_as_a_draft_where_stages_are_gathered(memory: float) -> None:
    """Whether or not there is room to keep them: its search does not see gathers."""
    problem = gathering(16, memory)
    found = draft(problem)
    assert found is not None
    assert plan(problem, effort=0.1).makespan <= found.makespan * (1 + 1e-9)


def test_nothing_fits_in_too_little_memory() -> None:
    assert draft(gathering(16, 1.0)) is None


def test_more_ranks_than_units() -> None:
    with pytest.raises(InputError, match="3 regions cannot fill 4 stages"):
        draft(problem_of(chain(range(3)), [(1.0, True)] * 3, 4, 2))


def looked_at(problem: Problem, budget: Budget, fixed: Sequence[Sequence[int]] | None = None) -> dict[int, int]:
    """How many cuts into so many stages came to something."""
    ways = placements(problem, "auto", None, None, None) if fixed is None else [tuple(range(len(fixed)))]
    stages = None if fixed is None else tuple(tuple(units) for units in fixed)
    counts: dict[int, int] = {}
    for trial in drafts(problem, ways, stages, budget):
        counts[len(trial.stages)] = counts.get(len(trial.stages), 0) + 1
    return counts


def test_more_cuts_of_the_placements_that_are_fast() -> None:
    problem = problem_of(chain(range(32)), [(float(1 + u % 3), True) for u in range(32)], 4, 8)
    counts = looked_at(problem, Budget())
    assert len(counts) > 2 and 2 <= sum(count > 1 for count in counts.values()) <= CLOSER_DRAFTS
    assert looked_at(problem, Budget(1.0)) == {4: 1}  # something, whatever the budget
    given = [[0, 1, 2], [*range(3, 20)], [20, 21], [*range(22, 32)]]
    assert looked_at(problem, Budget(), given) == {4: 1}
