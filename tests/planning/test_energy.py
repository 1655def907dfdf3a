"""The energy frontier against brute force over clocks, and its bound against every assignment."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from csc.analysis.clocks import ClockCurve, ClockProfile, Setting, curve_of, measured, relative
from csc.errors import InputError
from csc.ir.schedule import parse
from csc.planning.energy.clock_program import relaxed
from csc.planning.energy.frontier import EnergyProblem, frontier, point
from csc.planning.energy.step_graph import waits
from csc.planning.schedules import SCHEDULES
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork
from csc.simulation.simulate import compute_seconds, makespan, simulate
from tests.simulation import orders

WATTS = 80.0
INSTANT = Network()


def curve(seconds: float, watts: float = 400.0, clocks: int = 3, saved: float = 0.3) -> ClockCurve:
    """Slower clocks that draw less: 10 % longer for each step, and less than that share of the joules."""
    return ClockCurve(
        tuple(
            Setting(1400 - 100 * k, seconds * (1 + 0.1 * k), watts * seconds * (1 - saved * k / clocks))
            for k in range(clocks)
        )
    )


def problem(
    seconds: list[float], microbatches: int, name: str = "1f1b", clocks: int = 3, change: float = 0.0,
    network: Network = INSTANT, size: float = 0.0,
) -> EnergyProblem:  # fmt: skip
    """A chain of stages whose forward takes so long, backward twice."""
    stages = tuple(StageWork(each, 2 * each) for each in seconds)
    pipeline = Pipeline(stages, orders.chain(len(stages), size), network)
    schedule = SCHEDULES[name](pipeline, list(range(len(stages))), microbatches)
    known: dict[float, ClockCurve] = {}
    curves = tuple(
        tuple(known.setdefault(each, curve(each, clocks=clocks)) for each in listed)
        for listed in compute_seconds(pipeline, schedule)
    )
    return EnergyProblem(pipeline, schedule, curves, (WATTS,) * len(stages), change)


def joules(numbers: EnergyProblem, chosen: tuple[Setting, ...]) -> tuple[float, float]:
    """(seconds, joules) of an assignment, from the simulator alone."""
    left = iter(chosen)
    by_rank = [[next(left) for _ in listed] for listed in numbers.curves]
    step = makespan(numbers.pipeline, numbers.schedule, seconds=[[s.seconds for s in listed] for listed in by_rank])
    spent = sum(setting.joules for listed in by_rank for setting in listed)
    waited = sum(w * (step - sum(s.seconds for s in listed)) for w, listed in zip(numbers.watts, by_rank))
    return step, spent + waited


@pytest.mark.parametrize("seconds", [[1.0, 1.0], [1.0, 0.7], [0.6, 1.3]])
@pytest.mark.parametrize("slack", [0.0, 0.04, 0.11])
def test_no_assignment_is_below_the_bound_and_the_plan_is_near_the_best(seconds: list[float], slack: float) -> None:
    numbers = problem(seconds, 2)
    limit = numbers.fastest.seconds * (1 + slack)
    found = point(numbers, limit)
    every = (joules(numbers, chosen) for chosen in itertools.product(*(c.settings for c in numbers.flat)))
    best = min(spent for step, spent in every if step <= limit * (1 + 1e-9))
    assert found.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.joules <= best * 1.01
    assert found.seconds <= limit * (1 + 1e-9)
    assert found.joules < numbers.usual.joules


@settings(max_examples=60, deadline=None)
@given(orders.runs(), st.integers(0, 1000))
def test_the_graph_has_the_times_of_the_simulator(run, seed) -> None:
    pipeline, schedule, _ = run
    least = compute_seconds(pipeline, schedule)
    drawn = random.Random(seed)
    longer = [[own + drawn.choice([0, 0, 1, 3]) for own in listed] for listed in least]
    graph = waits(pipeline, schedule, least)
    for seconds in (least, longer):
        flat = [each for listed in seconds for each in listed]
        timeline = simulate(pipeline, schedule, seconds=seconds)
        starts = [event.start for events in timeline.ranks for event in events]
        assert graph.starts(flat)[: len(flat)] == pytest.approx(starts)
        assert graph.step(flat) == pytest.approx(timeline.makespan)


def test_the_graph_waits_for_parameters_and_busy_links() -> None:
    pipeline = Pipeline(
        (StageWork(1.0, 1.0, gathered=8.0, gather=3.0), StageWork(1.0, 1.0, gathered=8.0, gather=5.0)),
        {("F", 0, 1): 8.0, ("B", 1, 0): 8.0},
        Network(Link(0.5, 2.0)),
    )
    text = """
rank 0: GATHER 0 | F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 | RECV B 1>0 0 | B 0 0 | RECV B 1>0 1 | B 0 1 | REDUCE
rank 1: GATHER 1 | RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | RECV F 0>1 1 | F 1 1 | B 1 1 | SEND B 1>0 1 | REDUCE
"""
    schedule = parse(text.strip())
    least = compute_seconds(pipeline, schedule)
    flat = [each for listed in least for each in listed]
    assert waits(pipeline, schedule, least).step(flat) == makespan(pipeline, schedule)


@example([1.25, 1.0, 1.0, 1.5], 5, "1f1b", 5)  # bounds of two points are the same but for rounding
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0.5, 1.5), min_size=2, max_size=4),
    st.integers(2, 5),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    st.integers(2, 6),
)
def test_frontiers_fall_and_keep_their_promise(seconds, microbatches, name, clocks) -> None:
    numbers = problem(seconds, microbatches, name, clocks, network=Network(Link(0.01, 50.0)), size=1.0)
    found = frontier(numbers, (0.0, 0.03, 0.1, 0.2))
    spent = [each.joules for each in found.points]
    assert spent == sorted(spent, reverse=True)
    assert all(later.bound <= earlier.bound * (1 + 1e-12) for earlier, later in itertools.pairwise(found.points))
    for each in found.points:
        assert each.bound <= each.joules * (1 + 1e-9)
        assert each.seconds <= each.promised * (1 + 1e-9)


def test_the_bound_is_that_of_the_dual_prices() -> None:
    """It holds whatever the solver's answer: with free prices of 0 it would be the sum of the least worths."""
    numbers = problem([1.0, 0.8, 1.1], 4)
    answer = relaxed(numbers.waits, numbers.free, 3 * WATTS, numbers.fastest.seconds * 1.05)
    least = sum(min(w for _, w in block.options.sums) for block in numbers.free)
    assert least + 3 * WATTS * numbers.fastest.seconds <= answer.bound
    assert (answer.prices >= 0).all()


def test_zero_bubble_and_one_rank_have_frontiers() -> None:
    for numbers in (problem([1.0], 3), problem([1.0, 1.0], 3, "zb-h1")):
        found = frontier(numbers, (0.0, 0.1))
        assert found.saved(found.points[-1]) > 0


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_no_rank_changes_its_clock_more_often_than_it_may(most: int) -> None:
    numbers = problem([1.0, 0.7, 0.9], 6)
    found = frontier(numbers, (0.0, 0.05), changes=most)
    for each in found.points:
        assert max(each.changes) <= most
        for clocks, count in zip(each.clocks, each.changes):
            assert count == sum(clock != clocks[i - 1] for i, clock in enumerate(clocks))
        assert each.seconds <= each.promised * (1 + 1e-9)
        assert each.bound <= each.joules


def test_few_changes_fit_where_the_fastest_clocks_differ_by_kind() -> None:
    """The highest clock is not the fastest of forwards: without changes, a step is no shorter than at the highest."""
    numbers = problem([1.0, 1.0], 4)
    odd = replace(
        curve(1.0), settings=(Setting(1400, 1.0, 400.0), Setting(1300, 0.99, 390.0), Setting(1200, 1.1, 360.0))
    )
    curves = tuple(tuple(odd if each.highest.seconds == 1.0 else each for each in own) for own in numbers.curves)
    numbers = replace(numbers, curves=curves)
    assert numbers.fastest.seconds < numbers.usual.seconds
    found = frontier(numbers, (0.0, 0.05), changes=0)
    assert all(each.changes == (0, 0) for each in found.points)
    with pytest.raises(InputError, match="with so few changes of clock the step takes"):
        point(numbers, numbers.fastest.seconds, changes=0)


def test_a_change_that_costs_seconds_is_charged_and_made_less_often() -> None:
    free, dear = problem([1.0, 0.7], 6), problem([1.0, 0.7], 6, change=0.05)
    limit = free.fastest.seconds * 1.04
    cheap, charged = point(free, limit), point(dear, limit)
    assert sum(charged.changes) < sum(cheap.changes)
    assert charged.seconds <= limit * (1 + 1e-9)
    plain = replace(dear, change_seconds=0.0)
    flat = [c.at(k) for c, k in zip(plain.flat, itertools.chain.from_iterable(charged.clocks))]
    assert charged.seconds >= joules(plain, tuple(flat))[0]
    assert cheap.joules <= charged.joules


def test_a_straggler_is_waited_for_and_no_longer_than_pays() -> None:
    numbers = problem([1.0, 1.0], 4)
    alone, waiting = frontier(numbers), frontier(numbers, straggler=1.15)
    last = waiting.points[-1]
    assert last.until == pytest.approx(1.15 * numbers.usual.seconds)
    assert last.seconds <= last.until
    far = frontier(numbers, straggler=3.0).points[-1]
    assert far.seconds < far.until  # no clock is so slow that it pays
    assert alone.points[-1].seconds <= far.seconds


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([(1400, 1.0, 400.0)], "has 1 clock, so there is nothing to choose from"),
        ([(1400, 1.0, 400.0), (1400, 1.1, 300.0)], "1400 MHz is there twice"),
        ([(1400, 1.0, 400.0), (1300, 0.0, 300.0)], "at 1300 MHz it takes 0.0 s"),
        ([(1400, 1.0, 400.0), (1385, 1.0, 390.0), (1370, 1.1, 380.0), (900, 2.0, 99)], "a hole between 900 and 1370"),
        ([(1400, 1.0, 300.0), (1300, 1.0, 380.0)], "it draws 380 W at 1300 MHz and 300 W at 1400 MHz"),
    ],
)  # fmt: skip
def test_curves_that_cannot_be_right_are_refused(listed, message) -> None:
    with pytest.raises(InputError, match=message):
        measured([Setting(*each) for each in listed], "mine.toml")


def test_refuses_what_cannot_be() -> None:
    numbers = problem([1.0, 1.0], 2)
    with pytest.raises(InputError, match=r"the slack is -0\.1"):
        frontier(numbers, (-0.1,))
    with pytest.raises(InputError, match="no choice of measured clocks makes the step shorter"):
        point(numbers, 0.9 * numbers.fastest.seconds)
    with pytest.raises(InputError, match=r"a straggler takes 0\.5 times"):
        frontier(numbers, straggler=0.5)
    with pytest.raises(InputError, match="a waiting device of rank 0 draws 900"):
        replace(numbers, watts=(900.0, 80.0))
    with pytest.raises(InputError, match="2 clocks, 2 seconds and 1 watts"):
        relative([1400, 1300], [1.0, 1.1], [400.0], "mine.toml")


def test_curves_of_actions_are_shares_of_the_profile() -> None:
    base = relative([1300, 1400], [2.2, 2.0], [300.0, 400.0], "mine.toml")
    assert base.highest == Setting(1400, 1.0, 400.0)
    assert base.at(1300).seconds == pytest.approx(1.1)
    assert base.scaled(0.0).settings[0] == Setting(1400, 0.0, 0.0)
    with pytest.raises(InputError, match="1350 MHz was not measured"):
        base.at(1350)
    profile = ClockProfile("a test", 80.0, base, base.scaled(2.0), 0.0)
    assert curve_of(profile, "F", 3.0).at(1400) == Setting(1400, 3.0, 1200.0)
    assert curve_of(profile, "BW", 3.0).at(1400) == Setting(1400, 6.0, 2400.0)
