"""`csc plan --lengths`: one plan for batches whose samples differ, beside others, compiled and simulated alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csc.passes.pipeline_problem import problem
from csc.passes.step_end import step_ends
from typer.testing import CliRunner

import csc
from csc.balance.loader import Decider
from csc.balance.sample_costs import Lengths, of_problems
from csc.commands.main import app
from csc.reports.data import LengthsPlan, LengthsRequest, plan_for_lengths, probes
from tests.answers import asked_once
from tests.compiler import small

pytestmark = pytest.mark.usefixtures("traces")

BATCH, BATCHES = 16, 4
FITTED = 1e-4  # costs are fitted at the sizes of the example's microbatch, which depends on the mesh
ASKED = LengthsRequest(BATCH, BATCHES, 8, True, 60.0)


def table(count: int = 300) -> Lengths:
    tokens = 8.0 + np.random.default_rng(1).integers(0, 60, count)
    return Lengths(tokens, np.zeros((count, 0)), ())


def compiled_for(layers: int = 4, **options: Any) -> csc.CompiledModel:
    chosen = {"mesh": "pp=2", "microbatches": 4, "schedule": "1f1b", "hardware": "a100", **options}
    return csc.compile(small.text(layers), example=small.text_batch(16, 16), check=False, **chosen)


def planned(compiled: csc.CompiledModel, asked: LengthsRequest = ASKED) -> LengthsPlan:
    return plan_for_lengths(compiled, table(), asked, lambda _: None)


def steps(compiled: csc.CompiledModel) -> list[float]:
    """Of the batches that are drawn, on the plan of a compiled model."""
    found = probes(compiled, table())
    costs = of_problems(compiled.program, [problem(one, compiled.options) for one in found.programs], found.counted)
    options = compiled.options
    own = Decider(table(), costs, True, options.mesh.dp, options.microbatches, 8, rounds=0)
    batches = [np.random.default_rng(1000 + n).choice(300, BATCH, replace=False).tolist() for n in range(BATCHES)]
    end = max(one.seconds for one in step_ends(compiled.program, options))
    return [own.decide(batch).seconds + end for batch in batches]


@pytest.mark.long
@pytest.mark.slow
def test_what_is_chosen_takes_what_is_said_and_no_way_takes_less() -> None:
    compiled = compiled_for()
    found = planned(compiled)
    tried = [way for way in found.ways if way.step is not None]
    assert tried and found.ways[0] is tried[0]
    assert {way.mesh for way in found.ways} == {"pp=2", "dp=2"}
    assert sorted({way.microbatches for way in found.ways if way.mesh == "pp=2"}) == [2, 4, 8, 16]
    for way in tried:
        alone = compiled.with_options(mesh=way.mesh, microbatches=way.microbatches)
        assert np.mean(steps(alone)) >= found.static * (1 - FITTED)
    first = found.ways[0]
    stages = [list(stage) for stage in found.stages]
    chosen = compiled.with_options(mesh=first.mesh, microbatches=first.microbatches, stages=stages)
    assert np.mean(steps(chosen)) == pytest.approx(found.static, rel=FITTED)
    assert 0 <= found.loss < 0.5 and found.replanned <= found.static
    assert set(found.alike) == {4, 8, 16, 32, 64, 128}
    assert found.error < 0.1


@pytest.mark.long
def test_ranks_that_are_named_stay_a_pipeline() -> None:
    """Stages are chosen by batches there: none of the partitions that a batch would have takes less for all."""
    compiled = compiled_for(hardware=["a100", "a40"])
    found = planned(compiled)
    assert {way.mesh for way in found.ways} == {"pp=2"}
    first = found.ways[0]
    assert first.step is not None and found.static <= first.step * (1 + 1e-9)
    for cut in range(1, 7):
        names = [name for stage in found.stages for name in stage]
        other = compiled.with_options(microbatches=first.microbatches, stages=[names[:cut], names[cut:]])
        assert np.mean(steps(other)) >= found.static * 0.99


@pytest.mark.long
def test_memory_decides_the_mesh() -> None:
    """Where one rank has no room for the whole model, replicas of it are no way."""
    free = planned(compiled_for(layers=12, recompute="full"))
    whole = min(way.peak or 0 for way in free.ways if way.mesh == "dp=2")
    assert min(way.peak or 0 for way in free.ways if way.mesh == "pp=2") < 0.8 * whole
    found = planned(compiled_for(layers=12, recompute="full", microbatches=16, memory=round(0.95 * whole)))
    assert all(way.why and way.mean is None for way in found.ways if way.mesh == "dp=2")
    assert found.ways[0].mesh == "pp=2" and found.ways[0].step is not None


@pytest.mark.parametrize(
    ("options", "asked", "said"),
    [
        ({}, LengthsRequest(301, 4, 8, True, 60.0), "there are 300 samples, and a step has 301"),
        ({"cuts": ["layers.2"]}, ASKED, "cuts is given, and it is what --lengths looks for"),
        ({"memory": 1000}, ASKED, "nothing fits"),
        ({"mesh": "tp=2,pp=2"}, ASKED, "cp=1 and tp=1"),
    ],
)
@pytest.mark.long_cases("options0-asked0-there are 300 samples, and a step has 301")
def test_what_is_refused(options: dict[str, Any], asked: LengthsRequest, said: str) -> None:
    with pytest.raises(csc.InputError, match=said):
        planned(compiled_for(**options), asked)


MODEL = """
import csc
from tests.compiler import small
text = csc.compile(small.text(2), mesh="pp=2", example=small.text_batch(4, 16), microbatches=2, schedule="1f1b")
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON, and as a table of the same plan."""
    asked_once(monkeypatch, "csc.reports.data.plan_for_lengths", plan_for_lengths)
    (tmp_path / "model.py").write_text(MODEL)
    np.savez(tmp_path / "lengths.npz", tokens=table().tokens)
    command = ["plan", f"{tmp_path}/model.py:text", "--lengths", f"{tmp_path}/lengths.npz", "--multiple", "8"]
    command += ["--batch-size", "8", "--batches", "2", "--packed"]
    told = CliRunner().invoke(app, [*command, "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["ways"][0]["step"] > 0 and found["loss"] >= 0 and len(found["stages"]) == len(found["placement"])
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0
    for words in ("the one plan loses", "chosen: ", "of 59 at 8", "costs of samples are off by"):
        assert words in shown.stdout
