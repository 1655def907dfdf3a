"""The rivals of the benchmark of assignments: all work is there, once; and what the rows say together."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.balance.emulated_cells import Emulated
from benchmarks.balance.lengths import SETS, drawn
from benchmarks.balance.real import RealStep
from benchmarks.balance.rivals import RIVALS, Question, equal
from benchmarks.balance.simulated import Cell, Row, cells
from benchmarks.balance.summary import document, summary
from csc.planning.assign.portfolio import assign
from csc.planning.assign.step import SampleCosts, bound
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules.work import orders_of
from csc.simulation.pipeline import Loads, Pipeline, StageWork

ENCODER, TOKEN = StageWork(3.0, has_b=False, has_w=False), StageWork(0.01, 0.02, 0.01, saved=1.0)
NOTHING = StageWork(0.0)
RANKS, MICROBATCHES, SAMPLES = 3, 8, 48


def step(lengths: str, replicas: int) -> SampleCosts:
    """An encoder that pays for tiles in front of two stages that pay for text and what they see of tiles."""
    messages = {channel: 0.0 for s in range(RANKS - 1) for channel in (("F", s, s + 1), ("B", s + 1, s))}
    del messages["B", 1, 0]
    stages = (ENCODER, TOKEN, TOKEN)
    pipeline = Pipeline(stages, messages)
    schedule = SCHEDULES["1f1b"](pipeline, range(RANKS), MICROBATCHES)
    rates = ((NOTHING, ENCODER, *(NOTHING,) * 3), *((NOTHING, NOTHING, TOKEN, TOKEN, NOTHING),) * 2)
    loads = Loads((), rates, dict.fromkeys(messages, (0.0,) * 5))
    samples = drawn(SETS[lengths](), SAMPLES, 3)
    orders = tuple(map(tuple, orders_of(schedule)))
    whole = Pipeline(stages, messages, loads=loads)
    return SampleCosts(samples, whole, tuple(range(RANKS)), orders, replicas, MICROBATCHES, (1.0,) * 4)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("lengths", SETS)
def test_every_rival_runs_every_sample_once(lengths: str, replicas: int) -> None:
    asked = step(lengths, replicas)
    encoder, model = 3.0 * asked.samples[:, 0], 0.08 * asked.samples[:, 1:3].sum(axis=1)
    own = assign(asked)
    assert own.seconds >= bound(asked)
    for name, divide in RIVALS.items():
        for seconds in (0.0, 0.2) if name == "DFLOP" and replicas == 1 else (0.0,):
            found = divide(Question(asked, encoder, model, 0, seconds))
            assert [features.shape for features in found] == [(MICROBATCHES, 5)] * replicas, name
            np.testing.assert_allclose(sum(one.sum(axis=0) for one in found)[1:], asked.samples.sum(axis=0), rtol=1e-9)
            assert (np.concatenate(found)[:, 3] > 0).all(), f"{name} leaves a microbatch empty"
    np.testing.assert_allclose(sum(one.sum(axis=0) for one in equal(asked))[1:], asked.samples.sum(axis=0))


def test_the_summary_takes_the_worst_and_the_mean() -> None:
    cell = Cell("VLM-S", "encoder frozen", "tail", (4, 32, 1, 128))
    rows = [
        Row(cell, {"csc": own, **dict.fromkeys(RIVALS, 2.0)}, 1.0, 1.6, 0.1, dict.fromkeys(("csc", *RIVALS), 1.2))
        for own in (1.0, 4.0)
    ]
    found = summary(rows)
    assert found["over_equal_max"] == 2.5
    assert found["speedup_over_best_rival_geomean"] == pytest.approx(1.0)
    assert found["worst_speedup_over_any_rival"] == 0.5
    assert "paced_error_max" not in found
    runs = [Emulated(cell.name, "csc", 2.0, 2.1), Emulated(cell.name, "random", 2.0, 1.8)]
    assert summary(rows, runs)["paced_error_max"] == pytest.approx(0.1)
    assert document(rows, runs)["emulated"][0]["measured"] == 2.1
    steps = [RealStep("tail", 0, "csc", 1.0, (1.3, 1.1), 1.05), RealStep("tail", 0, "random", 1.2, (1.65, 1.8), 1.5)]
    told = summary(rows, runs, steps, {"AI2D": 0, "tail": 3})
    assert told["real_error_max"] == pytest.approx(0.25) and told["new_programs_after_10_steps"] == 3
    assert told["real_speedup_over_random_geomean"] == pytest.approx(1.5)
    assert told["real_speedup_over_random_predicted"] == pytest.approx(1.2)
    assert summary([], [], steps) == {name: told[name] for name in told if name.startswith("real_")}
    assert document(rows)["rows"][0]["cell"].startswith("VLM-S, encoder frozen, tail, p4 m32 dp1 N128")
    assert len({one.name for one in cells()}) == len(cells()) > len(cells(quick=True))
