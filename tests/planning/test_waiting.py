"""Memory with the messages that wait: what a search counts is what the simulator counts, and plans keep to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.joint import splits
from csc.planning.plan import plan
from csc.planning.problem import Problem, Stages, pipeline
from csc.planning.schedules import SCHEDULES, placement
from csc.planning.schedules.work import WorkTables, orders_of, peaks_with_messages, start_times
from csc.planning.ways import partitions
from csc.simulation import pipeline as messages
from csc.simulation.pipeline import Link, Network, states
from csc.simulation.simulate import simulate
from tests.planning.graphs import chain, problem_of, problems

NAMES = [("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("interleaved-zb", 3), ("zb-v", 2)]


@settings(max_examples=150, deadline=None)
@given(problems(most=9, ranks=3), st.sampled_from(NAMES), st.booleans(), st.sampled_from([0.0, 0.5]), st.data())
def test_peaks_are_those_of_the_simulated_run(
    problem: Problem, asked: tuple[str, int], answered: bool, latency: float, data: st.DataObject
) -> None:
    name, chunks = asked
    network = Network(Link(latency, 4.0), Link(2 * latency, 1.0), 2, (), answered)
    problem = replace(problem, network=network, waiting=True)
    home = placement(name, problem.ranks, chunks)
    if len(home) > len(problem.units):
        return
    stages = data.draw(st.sampled_from(partitions(problem, home, [None])))
    numbers = pipeline(problem, stages)
    schedule = SCHEDULES[name](numbers, home, problem.microbatches)
    work = WorkTables.of(numbers, home, problem.microbatches)
    orders = orders_of(schedule)
    starts = start_times(work, orders)
    assert starts is not None
    run = simulate(numbers, schedule)
    expected = messages.peaks(numbers, schedule, run)
    mine = [most + state for most, state in zip(peaks_with_messages(work, orders, starts), states(numbers, schedule))]
    assert mine == pytest.approx(expected)


def own_peak(problem: Problem, stages: Stages, name: str, home: list[int]) -> tuple[float, float]:
    """Seconds of a published schedule, and bytes of its fullest rank, messages counted."""
    numbers = pipeline(problem, stages)
    schedule = SCHEDULES[name](numbers, home, problem.microbatches)
    run = simulate(numbers, schedule)
    return run.makespan, max(messages.peaks(numbers, schedule, run))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    problems(most=9, ranks=3, microbatches=(2, 4)),
    st.sampled_from(NAMES[:2] + NAMES[3:]),
    st.sampled_from([0.3, 4.0]),
    st.data(),
)
def test_no_published_schedule_is_faster_in_its_own_bytes(
    problem: Problem, asked: tuple[str, int], bandwidth: float, data: st.DataObject
) -> None:
    """On splits that are blind to what is frozen, by work, or by csc's bound; messages are as large as activations."""
    name, chunks = asked
    problem = replace(problem, network=Network(Link(0.1, bandwidth)), waiting=True)
    home = placement(name, problem.ranks, chunks)
    if len(home) > len(problem.units) or problem.ranks == 1:
        return
    stages = data.draw(st.sampled_from(splits(problem, tuple(home))))
    seconds, most = own_peak(problem, stages, name, home)
    limited = replace(problem, memory=most)
    mine = plan(limited, effort=0.05)
    assert mine.makespan <= seconds * (1 + 1e-9)
    assert max(mine.peak_memory) <= most * (1 + 1e-9)
    assert list(mine.peak_memory) == pytest.approx(
        messages.peaks(mine.pipeline, mine.schedule, simulate(mine.pipeline, mine.schedule))
    )


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_one_full_rank_takes_nothing_from_the_others(schedule: str) -> None:
    """Eight units, of which one makes a message of half the memory: only the ranks at its ends have less room."""
    problem = problem_of(chain(range(8)), [(1.0, True)] * 8, 4, 8, [(1.0, 0.0)] * 8)
    values = [replace(value, size=8.0 if value.maker == 3 else 0.1, gradient_size=0.1) for value in problem.values]
    problem = replace(problem, values=tuple(values), network=Network(Link(0.01, 100.0)), waiting=True, memory=20.0)
    found = plan(problem, schedule, chunks=1, effort=0.2)
    assert max(found.peak_memory) <= 20.0
    assert found.makespan <= 1.02 * plan(replace(problem, memory=None), schedule, chunks=1, effort=0.2).makespan


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "interleaved-1f1b"])
@pytest.mark.long_cases("1f1b", "auto")
def test_messages_that_fit_nowhere_are_said(schedule: str) -> None:
    problem = problem_of(chain(range(8)), [(1.0, True)] * 8, 4, 8, [(1.0, 0.0)] * 8)
    values = [replace(value, size=50.0, gradient_size=50.0) for value in problem.values]
    with pytest.raises(InputError, match="with the messages that wait"):
        plan(replace(problem, values=tuple(values), waiting=True, memory=20.0), schedule, effort=0.1)
