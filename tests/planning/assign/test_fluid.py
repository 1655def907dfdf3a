"""Shapes of steps whose samples could be divided like water: none is shorter, by the simulator; and what is learned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.ir.schedule import Schedule
from csc.planning.assign.portfolio import assign, fluid_shapes, learned
from csc.planning.assign.step import LinearStep, SampleCosts
from csc.simulation.pipeline import Loads, Pipeline, peak_memory
from csc.simulation.simulate import makespan
from tests.planning.assign.random_steps import steps
from tests.planning.assign.test_assign import chain_of_four


def divided(step: SampleCosts, shape: tuple[float, ...]) -> Pipeline:
    """Microbatches that have these parts of the mean one."""
    mean = step.samples.sum(axis=0) / (step.microbatches * step.replicas)
    loads = step.pipeline.loads
    assert loads is not None
    features = tuple((1.0, *map(float, part * mean)) for part in shape)
    return replace(step.pipeline, loads=Loads(features, loads.stages, loads.messages))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 3.0), min_size=8, max_size=8), st.integers(1, 4), st.integers(1, 2))
def test_no_sizes_make_a_shorter_step(parts: list[float], each: int, replicas: int) -> None:
    """Of microbatches that have a sample's part at least: the simulator, not the linear program, says how long."""
    step, schedule = chain_of_four(8 * each * replicas, 8)
    step = replace(step, replicas=replicas)
    shape = fluid_shapes(step)[0]
    assert sum(shape) == pytest.approx(8)
    least = 1 / each
    other = np.array(parts) / max(sum(parts), 1e-9) * 8 * (1 - least) + least
    own = makespan(divided(step, shape), schedule)
    assert own <= makespan(divided(step, tuple(other * 8 / other.sum())), schedule) * (1 + 1e-6)
    assert own <= makespan(divided(step, (1.0,) * 8), schedule) * (1 + 1e-6)


def test_sizes_keep_to_the_room() -> None:
    step, schedule = chain_of_four(96, 16)
    free, tight = fluid_shapes(step)[0], fluid_shapes(step, [1.1 * 24.0] * 4)[0]
    taken = [max(peak_memory(divided(step, one), schedule)) for one in (free, tight)]
    assert taken[1] <= 1.1 * 24.0 * (1 + 1e-6) < taken[0]
    assert fluid_shapes(step, [1.0] * 4) == []


def test_large_samples_find_room_beside_each_other() -> None:
    step, _ = chain_of_four(48, 16)
    samples = np.ones((48, 1))
    samples[:4] = 12.0
    found = fluid_shapes(replace(step, samples=samples))
    largest = 12.0 * 16 / samples.sum()
    assert max(found[0]) < largest
    assert any(sorted(one)[-4] >= largest * (1 - 1e-6) for one in found[1:])


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_a_linear_step_of_given_microbatches_takes_what_the_simulator_says(
    case: tuple[SampleCosts, Schedule], data: st.DataObject
) -> None:
    """Neither less nor more: links that messages wait for each other on, and fused actions included."""
    step, schedule = case
    given = [[data.draw(st.sampled_from([0.0, 0.5, 3.0])) for _ in range(2)] for _ in range(step.microbatches)]
    program = LinearStep(step, np.eye(2))
    for k, row in enumerate(given):
        for kind, amount in enumerate(row):
            program.equal([(program.amount(k, kind), 1.0)], amount)
    found = program.solved()
    assert found is not None
    loads = step.pipeline.loads
    assert loads is not None
    features = tuple((1.0, *row) for row in given)
    pipeline = replace(step.pipeline, loads=Loads(features, loads.stages, loads.messages))
    assert found[program.end] == pytest.approx(makespan(pipeline, schedule), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(steps())
def test_learned_shapes_serve_any_step(case: tuple[SampleCosts, Schedule]) -> None:
    step, _ = case
    shapes = learned([step], None)
    assert shapes == learned([step], None)
    found = assign(step, shapes=shapes)
    assert sorted(i for own in found.groups for group in own for i in group) == list(range(len(step.samples)))
    assert found.seconds <= assign(step, rounds=0, shapes=shapes).seconds * (1 + 1e-12)


def test_what_is_learned_shortens_steps_like_those() -> None:
    step, _ = chain_of_four(96, 16)
    random = np.random.default_rng(0)
    lessons, others = ([replace(step, samples=random.uniform(0.5, 2.0, (96, 1))) for _ in range(3)] for _ in "ab")
    shapes = learned(lessons, None)
    assert 0 < len(shapes) <= 16
    shaped = sum(assign(other, rounds=0, shapes=shapes).seconds for other in others)
    assert shaped < 0.997 * sum(assign(other, rounds=0).seconds for other in others)
