"""Plans beside a plan: each is the plan of its own problem, in its time, or a sentence."""

from __future__ import annotations

from dataclasses import replace

from csc.planning.plan import EFFORT, Variation, plan, tried
from csc.planning.problem import Problem
from csc.simulation.simulate import makespan
from tests.planning.graphs import mllm

PROBLEM = mllm([(6, 1.0)], (6, 2.0), 3, microbatches=6, memory=60.0, frozen=("encoder",))


def test_each_is_the_plan_of_its_problem() -> None:
    twice = replace(PROBLEM, microbatches=12)
    found = tried(
        [
            Variation("1f1b", lambda: PROBLEM, "1f1b"),
            Variation("12", lambda: twice),
            Variation("3", lambda: PROBLEM, "auto", 3),
        ],
        60.0,
        lambda name: None,
    )
    expected = [plan(PROBLEM, "1f1b"), plan(twice, effort=EFFORT), plan(PROBLEM, chunks=3, effort=EFFORT)]
    for outcome, other in zip(found, expected):
        assert outcome.plan is not None and not outcome.why and not outcome.cut
        assert outcome.plan.makespan == other.makespan == makespan(outcome.plan.pipeline, outcome.plan.schedule)
    assert [outcome.microbatches for outcome in found] == [6, 12, 6]
    assert len(found[2].plan.placement) == 9  # type: ignore[union-attr]


def test_what_fits_nowhere_and_what_fails_has_a_sentence() -> None:
    """Also where making the problem fails, as another compilation may."""
    small = replace(PROBLEM, memory=1.0)
    told: list[str] = []
    names = ["small", "many", "zb-v"]
    small_, many, odd = tried(
        [
            Variation(names[0], lambda: small),
            Variation(names[1], lambda: PROBLEM, "auto", 40),
            Variation(names[2], lambda: PROBLEM, "zb-v", 3),
        ],
        60.0,
        told.append,
    )
    assert small_.plan is many.plan is odd.plan is None and told == names
    assert "nothing fits" in small_.why and "cannot fill 120 stages" in many.why and "3 stages on a rank" in odd.why


def test_what_there_is_no_time_for_is_left() -> None:
    made = 0

    def problem() -> Problem:
        nonlocal made
        made += 1
        return PROBLEM

    assert tried([Variation("a", problem), Variation("b", problem)], 0.0, lambda name: None) == []
    assert made == 0


def test_a_search_that_ends_early_says_so() -> None:
    large = mllm([(24, 0.02)], (32, 0.1), 8, microbatches=64, frozen=("encoder",))
    (found,) = tried([Variation("auto", lambda: large)], 0.05, lambda name: None)
    assert found.cut and found.plan is not None
    (named,) = tried([Variation("1f1b", lambda: large, "1f1b")], 0.05, lambda name: None)
    assert not named.cut  # a named schedule is what it is
