"""The search of `auto` on any scale: more chunks, a budget, an answer when it is over, and numbers that are none."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.partition import balance, candidates
from csc.planning.partition_bound import lower_bound
from csc.planning.plan import plan
from csc.planning.problem import Problem, RankKind, branches, lumped, pipeline, unequal
from csc.planning.schedules import SCHEDULES, placement
from csc.planning.screen import Budget
from csc.planning.ways import partitions, spread
from csc.simulation.pipeline import Link, Network, RankNodes, peak_memory
from csc.simulation.simulate import makespan
from tests.planning.graphs import chain, mllm, problem_of, problems
from tests.planning.test_plan import check


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_no_chunks_of_a_frozen_agnostic_split_are_faster(chunks: int) -> None:
    """Plain interleaved 1F1B, B and W fused, on an even split, against the plan in that very memory."""
    problem = mllm([], (16, 1.0), 4, (), recompute=False, microbatches=8)
    starts = balance([round(1e9 * unit.forward) for unit in problem.units], 4 * chunks)
    stages = [tuple(range(a, b)) for a, b in pairwise([*starts, len(problem.units)])]
    numbers = pipeline(problem, stages)
    rival = SCHEDULES["interleaved-1f1b"](numbers, placement("interleaved-1f1b", 4, chunks), 8)
    limited = replace(problem, memory=max(peak_memory(numbers, rival)))
    mine = plan(limited, effort=0.2)
    check(limited, mine)
    assert mine.makespan <= makespan(numbers, rival) * (1 + 1e-9)


def test_more_chunks_are_taken_where_they_are_faster() -> None:
    """Four microbatches on four ranks: the ramp is most of the step, and chunks shorten it."""
    problem = problem_of(chain(range(24)), [(1.0, True)] * 24, 4, 4)
    found = plan(problem, effort=0.2)
    check(problem, found)
    assert len(found.stages) > 8
    assert found.makespan < plan(problem, chunks=2, effort=0.2).makespan


@settings(max_examples=30, deadline=None)
@given(problems(microbatches=(1, 2)), st.integers(1, 4))
def test_stages_that_even_out_ranks_hold_every_unit_once_in_order(problem: Problem, chunks: int) -> None:
    home = placement("interleaved-1f1b", problem.ranks, chunks)
    found = spread(problem, home)
    assert bool(found) == (len(home) <= len(problem.units))
    for stages in found:
        assert len(stages) == len(home) and all(stages)
        assert [u for stage in stages for u in stage] == list(range(len(problem.units)))


@settings(max_examples=30, deadline=None)
@given(problems(microbatches=(2,)), st.integers(1, 30))
def test_lumps_hold_every_unit_once_and_can_be_stages(problem: Problem, most: int) -> None:
    found = lumped(problem, most)
    assert sorted(u for lump in found.members for u in lump) == list(range(len(problem.units)))
    assert sum(unit.work for unit in found.problem.units) == pytest.approx(sum(unit.work for unit in problem.units))
    stages = found.stages(candidates(found.problem, shares=(0.5,), layouts=False)[0])
    home = [next(s for s, units in enumerate(stages) if u in units) for u in range(len(problem.units))]
    assert all(home[a] <= home[u] for u, before in enumerate(branches(problem).before) for a in before)


def test_three_encoders_are_taken_together() -> None:
    problem = mllm([(12, 1.0), (12, 0.5), (10, 0.7)], (12, 1.5), 4, ("encoder",), 4)
    found = lumped(problem, 100)
    assert len(found.problem.units) < len(problem.units)
    assert math.prod(len(each) + 1 for each in branches(found.problem).chains[:-1]) <= 400
    assert lumped(problem, 10**6).problem is problem


def test_a_large_problem_is_evened_out_instead_of_searched() -> None:
    problem = mllm([(60, 1.0)], (240, 1.5), 160, ("encoder",), 4)
    found = partitions(problem, tuple(range(160)), [None])
    assert 1 <= len(found) <= 3
    assert all(len(stages) == 160 and all(stages) for stages in found)


def test_there_is_a_plan_when_the_time_is_over_at_once() -> None:
    problem = mllm([(6, 1.0)], (8, 1.5), 4, ("encoder",), 6)
    lines: list[tuple[str, float]] = []
    found = plan(problem, limit=0.0, tell=lambda what, seconds: lines.append((what, seconds)))
    check(problem, found)
    assert lines and lines[-1][1] < math.inf
    assert found.makespan >= plan(problem, effort=0.2).makespan * (1 - 1e-9)


def test_what_a_part_spends_the_whole_has_spent() -> None:
    whole = Budget(100.0)
    part = whole.part(0.3)
    part.spend(40.0)
    assert part.spent and not whole.spent and whole.left == 60.0
    assert Budget(100.0, seconds=0.0).spent
    assert [Budget(actions).at_most(5.0).left for actions in (100.0, 3.0, 0.0, float("inf"))] == [5.0, 3.0, 0.0, 5.0]


BAD = [
    (lambda p: replace(p, memory=math.nan), "cannot work with nan bytes"),
    (lambda p: replace(p, memory=[1e9, 2e9]), "one number of bytes"),
    (lambda p: replace(p, units=(replace(p.units[0], forward=math.nan), *p.units[1:])), "forward time of u0 is nan"),
    (lambda p: replace(p, units=(replace(p.units[0], saved=math.inf), *p.units[1:])), r"saved bytes of u0 is inf"),
    (lambda p: replace(p, values=(replace(p.values[0], size=-1.0), *p.values[1:])), "a value of u0 is -1"),
    (lambda p: replace(p, scale=(1.0, math.nan)), "size of microbatch 1 is nan"),
    (lambda p: replace(p, scale=(1.0,)), "1 microbatches have a size, the step has 2"),
    (lambda p: replace(p, network=Network(Link(0.0, 0.0))), "seconds for a byte within nodes is inf"),
    (lambda p: replace(p, network=Network(Link(0.0, "1e9"))), "seconds for a byte within nodes is '1e9'"),
    (lambda p: replace(p, network=Network(ranks_per_node=0)), "cannot be 0 ranks on a node"),
    (lambda p: replace(p, units=(replace(p.units[0], state="8"), *p.units[1:])), "state bytes of u0 is '8'"),
    (lambda p: replace(p, units=(replace(p.units[0], stashed=None), *p.units[1:])), "stashed bytes of u0 is None"),
    (lambda p: replace(p, memory=math.inf), "cannot work with inf bytes of memory.*or no limit"),
    (lambda p: replace(p, scale=(1.0, 1.0, 1.0)), "3 microbatches have a size, the step has 2"),
    (lambda p: replace(p, scale=(0.0, 0.0)), "no microbatch has a size above 0"),
    (lambda p: replace(p, microbatches=2.5), "cannot be 2.5 microbatches"),
    (lambda p: replace(p, microbatches="4"), "cannot be '4' microbatches"),
    (lambda p: replace(p, microbatches=0), "cannot be 0 microbatches"),
    (lambda p: replace(p, ranks=math.nan), "cannot be nan ranks"),
    (lambda p: replace(p, ranks=-1), "cannot be -1 ranks"),
    # These were planned with, or planned without an end.
    (lambda p: replace(p, action=math.nan), "what the runtime takes for an action is nan"),
    (lambda p: replace(p, handling=-1.0), "what it takes for an end of a message is -1"),
    (lambda p: replace(p, units=(replace(p.units[0], gathered=math.nan), *p.units[1:])), "gathered bytes of u0 is nan"),
    (lambda p: replace(p, gathering=Link(0.0, 0.0)), "seconds for a byte of the shards' gathers is inf"),
    (lambda p: replace(p, values=(replace(p.values[0], readers=(9,)),)), r"from unit 0 to \[9\] of 4 units"),
    (lambda p: replace(p, values=(replace(p.values[0], readers=(0,)),)), r"from unit 0 to \[0\], with gradients"),
    (lambda p: replace(p, values=(replace(p.values[0], gradient=()),)), r"with gradients \[\]"),
    (lambda p: replace(p, units=tuple(replace(u, forward=1e308) for u in p.units)), "more seconds than a float"),
    (lambda p: replace(p, network=Network(places=(RankNodes((0,)),))), "places of 1 ranks, and there are 2"),
    (lambda p: unequal(p, kinds(p, (None, 8.0))), "some kinds of ranks have a memory limit"),
]
ASKED = [
    ({"chunks": 0}, "cannot be 0 stages on a rank"),
    ({"chunks": 1.5}, "cannot be 1.5 stages on a rank"),
    ({"chunks": True}, "cannot be True stages on a rank"),
    ({"effort": math.nan}, "effort is nan"),
    ({"effort": math.inf}, "effort is inf"),
    ({"limit": math.nan}, "limit is nan"),
    ({"limit": -1.0}, "limit is -1"),
]


def kinds(problem: Problem, memories: tuple[float | None, ...]) -> list[RankKind]:
    """A rank of each of these memories."""
    seconds = tuple((u.forward, u.backward_input, u.backward_weight) for u in problem.units)
    return [RankKind(f"kind {rank}", (rank,), seconds, memory) for rank, memory in enumerate(memories)]


@pytest.mark.parametrize(("spoil", "sentence"), BAD)
def test_numbers_that_are_none_are_refused_at_once(spoil, sentence: str) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(chain(range(4)), [(1.0, True)] * 4, 2, 2)
    with pytest.raises(InputError, match=sentence):
        plan(spoil(problem))
    with pytest.raises(InputError, match=sentence):
        lower_bound(spoil(problem))


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    problem = problem_of(chain(range(4)), [(1.0, True)] * 4, 2, 2)
    found = plan(replace(problem, ranks=np.int64(2), microbatches=np.int64(2)), effort=0.01)
    assert found.makespan == plan(problem, effort=0.01).makespan


@pytest.mark.parametrize(("asked", "sentence"), ASKED)
@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_what_cannot_be_asked_is_refused_at_once(schedule: str, asked: dict[str, Any], sentence: str) -> None:
    problem = problem_of(chain(range(4)), [(1.0, True)] * 4, 2, 2)
    with pytest.raises(InputError, match=sentence):
        plan(problem, schedule, **asked)


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "interleaved-1f1b", "interleaved-zb", "zb-v"])
def test_more_chunks_than_layers_are_refused_for_every_schedule(schedule: str) -> None:
    problem = problem_of(chain(range(4)), [(1.0, True)] * 4, 3, 2)
    with pytest.raises(InputError, match="4 regions cannot fill 6 stages"):
        plan(problem, schedule, chunks=2)


def test_more_chunks_than_layers_are_refused_at_once() -> None:
    problem = problem_of(chain(range(4)), [(1.0, True)] * 4, 2, 2)
    with pytest.raises(InputError, match=r"4 regions cannot fill 8 stages, 4 on each of 2 ranks.*2 on a rank at most"):
        plan(problem, chunks=4)
