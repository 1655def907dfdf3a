"""Plans: what is promised holds, whatever is searched; and on models of the usual shapes they are near the bound."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import parse, verify
from csc.planning import plan as plans
from csc.planning.partition import candidates, partition
from csc.planning.partition_bound import lower_bound, shared_lower_bound
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules import SCHEDULES, placement
from csc.planning.screen import Budget
from csc.simulation.pipeline import Link, Network
from csc.simulation.simulate import makespan, simulate
from tests.planning.graphs import chain, mllm, problem_of, problems
from tests.tiers import long


def check(problem: Problem, found: PipelinePlan) -> None:
    """What a plan says about itself is true."""
    numbers = pipeline(problem, found.stages)
    assert found.pipeline == numbers
    verify(found.schedule, numbers.messages, numbers.has_b, numbers.has_w, problem.microbatches)
    assert tuple(found.schedule.placement.values()) == found.placement
    timeline = simulate(numbers, found.schedule)
    assert found.makespan == pytest.approx(timeline.makespan)
    assert found.peak_memory == pytest.approx(timeline.peak_memory)
    assert found.bubble == pytest.approx(timeline.bubble_share)
    if problem.memory is not None:
        assert max(found.peak_memory) <= problem.memory * (1 + 1e-9)
    assert found.makespan >= found.shared_bound * (1 - 1e-9)
    alone = len(found.stages) == problem.ranks
    assert (found.bound is not None) == alone
    if found.bound is not None:
        assert found.bound == pytest.approx(lower_bound(problem).seconds)
        assert found.makespan >= found.bound * (1 - 1e-9)
    assert found.gap == pytest.approx(found.makespan / (found.bound or found.shared_bound) - 1)
    assert ("stages on" in found.layout.split("; ")[-1] and "ranks" in found.layout) != alone


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(problems(microbatches=(1, 2, 4)), st.sampled_from(["auto", "1f1b", "gpipe", "zb-h1"]), st.booleans())
def test_a_plan_keeps_its_promises(problem: Problem, schedule: str, limited: bool) -> None:
    if limited:
        found = plan(problem, "1f1b")
        problem = replace(problem, memory=max(found.peak_memory))
    try:
        found = plan(problem, schedule, effort=0.1)
    except InputError:
        assert limited and schedule in ("gpipe", "zb-h1")  # the others make do with what 1F1B needs
        return
    check(problem, found)
    assert found == plan(problem, schedule, effort=0.1)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(problems(microbatches=(2, 4)), st.integers(1, 3))
def test_auto_is_no_slower_than_named_schedules_in_its_memory(problem: Problem, times: int) -> None:
    problem = replace(problem, memory=times * max(plan(problem, "1f1b").peak_memory))
    mine = plan(problem, "auto", effort=0.2)
    for stages in candidates(replace(problem, memory=None)):
        numbers = pipeline(problem, stages)
        for name in ("1f1b", "zb-h1", "zb-h2", "eager-1f1b"):
            with suppress(InputError):  # more memory than there is
                schedule = SCHEDULES[name](numbers, range(problem.ranks), problem.microbatches, problem.memory)
                assert mine.makespan <= makespan(numbers, schedule) * (1 + 1e-9)


@pytest.mark.parametrize(("frozen", "parts", "known"), [(("encoder",), 60, 380.0), (("encoder", "llm"), 40, 285.0)])
def test_the_worked_cases(frozen: tuple[str, ...], parts: int, known: float) -> None:
    """Four ranks, 16 microbatches, F = 20 in the encoder and 20 in the LLM; 530 and 360 with an equal split."""
    trains = [(u >= parts and "llm" not in frozen) or u == parts for u in range(2 * parts + 1)]
    forward = [20 / parts] * parts + [1e-6] + [20 / parts] * parts
    problem = problem_of(chain(range(2 * parts + 1)), list(zip(forward, trains)), 4, 16)
    units = [
        replace(unit, backward_input=unit.forward if unit.backward_input else 0.0, saved=1.0 if unit.has_b else 0.0)
        for unit in problem.units
    ]
    problem = replace(problem, units=tuple(units))
    assert plan(problem, "1f1b").makespan <= known * 1.001
    assert plan(problem, chunks=1).makespan <= known * 1.001


NEAR = [
    long(mllm([(24, 0.3)], (32, 1.5), 6, ("encoder", "llm"), 16), 1.10, 1.06),
    long(mllm([(24, 1.0)], (24, 1.5), 6, ("encoder",), 16), 1.12, 1.08),
    (mllm([(12, 1.0), (12, 0.5)], (24, 1.5), 6, (), 16), 1.15, 1.05),
]


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "tight", "ample"), NEAR)
def test_models_of_the_usual_shapes_are_near_the_bound(problem: Problem, tight: float, ample: float) -> None:
    """With the memory that 1F1B takes on the best partition for it, and with twice its activations."""
    stages = partition(problem)
    numbers = pipeline(problem, stages)
    one = plan(problem, "1f1b", stages=stages)
    bound = lower_bound(problem).seconds
    for times, limit in ((1, tight), (2, ample)):
        memory = max(s.state + times * (peak - s.state) for s, peak in zip(numbers.stages, one.peak_memory))
        found = plan(replace(problem, memory=memory), chunks=1)
        check(replace(problem, memory=memory), found)
        assert found.makespan <= limit * bound
        assert found.makespan <= one.makespan


def test_several_stages_on_a_rank_are_not_held_against_the_other_bound() -> None:
    problem = mllm([], (16, 1.0), 4, (), recompute=False, microbatches=8)
    for name in ("interleaved-1f1b", "interleaved-zb", "zb-v"):
        found = plan(problem, name)
        check(problem, found)
        assert found.placement == tuple(placement(name, 4))
        assert found.bound is None and found.shared_bound == shared_lower_bound(problem).seconds
    free = plan(problem)
    assert free.makespan <= plan(problem, chunks=1).makespan
    check(problem, free)


def test_given_stages_are_kept() -> None:
    problem = mllm([(4, 1.0)], (5, 1.0), 3, ())
    stages = ((0, 1, 2), (3, 4, 5, 6, 7), (8, 9, 10, 11))
    for name in ("auto", "1f1b"):
        found = plan(problem, name, stages=stages)
        assert found.stages == stages
        check(problem, found)
    two = plan(
        problem, "auto", stages=[(0, 1), (2, 3), (4, 5), (6, 7, 8), (9, 10), (11,)], placement=[0, 1, 2, 2, 1, 0]
    )
    assert two.placement == (0, 1, 2, 2, 1, 0)
    check(problem, two)


def test_a_whole_schedule_is_kept() -> None:
    problem = mllm([], (6, 1.0), 2, (), microbatches=3)
    written = parse(str(plan(problem, "zb-h1").schedule))
    found = plan(problem, written)
    assert found.schedule == written
    check(problem, found)
    best = min(makespan(pipeline(problem, stages), written) for stages in candidates(problem))
    assert found.makespan <= best
    with pytest.raises(ScheduleError, match="is missing"):
        plan(replace(problem, microbatches=4), written)


def test_messages_move_the_cuts() -> None:
    """A value of a gigabyte between units 3 and 4 on a slow link: no plan sends it."""
    problem = problem_of(chain(range(8)), [(1.0, True)] * 8, 2, 4)
    values = list(problem.values)
    values[3] = replace(values[3], size=1e9, gradient_size=1e9)
    slow = Network(Link(0.0, 1e8), Link(0.0, 1e8))
    found = plan(replace(problem, values=tuple(values), network=slow), chunks=1)
    assert any({3, 4} <= set(units) for units in found.stages)
    check(replace(problem, values=tuple(values), network=slow), found)


def test_less_memory_than_1f1b_needs_still_gives_a_plan() -> None:
    problem = mllm([(6, 1.0)], (6, 2.0), 4, (), microbatches=6)
    with pytest.raises(InputError) as error:
        plan(replace(problem, memory=1.0))
    least = float(str(error.value).split("(")[-1].split(" bytes")[0])
    found = plan(replace(problem, memory=least))
    check(replace(problem, memory=least), found)
    with pytest.raises(InputError, match="nothing fits"):
        plan(replace(problem, memory=least - 1))
    with pytest.raises(InputError, match="nothing fits"):
        plan(replace(problem, memory=least), "gpipe")


def test_bad_input() -> None:
    problem = problem_of(chain(range(4)), [(1.0, True)] * 4, 2, 2)
    with pytest.raises(InputError, match="4 regions cannot fill 5 stages"):
        plan(replace(problem, ranks=5))
    with pytest.raises(InputError, match="there is no schedule 'best'"):
        plan(problem, "best")
    with pytest.raises(InputError, match="every unit once"):
        plan(problem, stages=[(0, 1), (2,)])
    with pytest.raises(InputError, match="u1 is in stage 0 and needs u0 of stage 1"):
        plan(problem, stages=[(1,), (0, 2, 3)])
    with pytest.raises(InputError, match="do not spread evenly over 2 ranks"):
        plan(problem, stages=[(0,), (1,), (2, 3)])
    with pytest.raises(InputError, match="does not give each of 2 ranks a stage"):
        plan(problem, placement=[0, 0])
    with pytest.raises(InputError, match="8 stages"):
        plan(problem, chunks=4)


def test_what_the_runtime_takes_for_an_action_counts_for_each() -> None:
    """Ten microbatches through one stage: F, B and W of each. Where it takes much, more chunks are not worth it."""
    problem = replace(problem_of(chain(range(8)), [(1.0, True)] * 8, 1, 10), action=0.5)
    busy = sum(unit.work for unit in problem.units) * 10
    assert plan(problem, "1f1b").makespan == pytest.approx(busy + 0.5 * 3 * 10)
    many = replace(problem, ranks=2, microbatches=4)
    free, dear = plan(replace(many, action=0.0), effort=0.2), plan(replace(many, action=5.0), effort=0.2)
    assert len(dear.stages) < len(free.stages)
    check(replace(many, action=5.0), dear)


def test_what_a_message_takes_of_both_ranks_counts_for_each() -> None:
    """Two ranks: each has one end of an F and of a B message of every microbatch; one stage beside it has none."""
    problem = problem_of(chain(range(2)), [(1.0, True)] * 2, 2, 3)
    told = replace(problem, handling=0.25)
    for stages, home, ends in ((((0,), (1,)), (0, 1), 1), (((0,), (1,)), (0, 0), 0)):
        bare, own = pipeline(problem, stages), pipeline(told, stages, home)
        for one, other in zip(bare.stages, own.stages):
            assert other.forward == one.forward + 0.25 * ends
            assert other.backward_input == one.backward_input + 0.25 * ends
            assert other.backward_weight == one.backward_weight
    sizes = replace(told, scale=(0.0, 1.0, 4.0), action=0.5)
    numbers = pipeline(sizes, ((0,), (1,)))
    bare = pipeline(problem, ((0,), (1,)))
    for microbatch, factor in enumerate((0.0, 1.0, 4.0)):  # what the runtime takes does not depend on the size
        assert numbers.stages_of(microbatch)[0].forward == factor * bare.stages[0].forward + 0.75
        assert numbers.size(("F", 0, 1), microbatch) == factor * bare.messages["F", 0, 1]


def test_one_limit_holds_for_a_plan_and_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    given: list[float | None] = []

    def budget(actions: float, seconds: float | None, tell: object) -> Budget:
        given.append(seconds)
        clock[0] += 4.0
        return Budget(actions, None, None)

    problem = replace(problem_of(chain(range(4)), [(1.0, True)] * 4, 2, 4), waiting=True, memory=1e-6)
    monkeypatch.setattr(plans, "Budget", budget)
    monkeypatch.setattr(plans.time, "monotonic", lambda: clock[0])
    with pytest.raises(InputError):
        plan(problem, limit=10.0)
    assert given[:3] == [10.0, 6.0, 2.0] and set(given[3:]) == {0.0}


def test_all_schedules_can_be_planned() -> None:
    problem = mllm([(3, 1.0)], (5, 1.0), 2, ("encoder",), microbatches=4)
    spans = {name: plan(problem, name).makespan for name in SCHEDULES}
    assert min(spans.values()) == spans["auto"]
    assert not any(math.isinf(seconds) for seconds in spans.values())
