"""Layouts of devices, and the mesh that csc chooses, against plans made one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import csc
from csc.commands.main import app
from csc.driver.compiled import Inspected
from csc.driver.mesh_candidates import NOTHING_FIXED, FixedChoices
from csc.driver.mesh_choice import choose
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Program
from csc.planning.meshes import CONTEXT, MeshLayout, layouts
from csc.reports.forecast import forecast
from tests.answers import asked_once
from tests.compiler.tensor_models import BATCHES, MODELS

pytestmark = pytest.mark.usefixtures("traces")


@given(
    st.integers(1, 24), st.integers(1, 24), st.sets(st.integers(1, 4), min_size=1), st.integers(1, 8), st.integers(1, 6)
)
def test_layouts_are_all_there_are(devices: int, step: int, sizes: set[int], node: int, regions: int) -> None:
    axes = range(1, devices + 1)
    expected = {
        MeshLayout(Mesh(dp=dp, pp=pp, cp=cp, tp=tp), samples, count)
        for tp in axes if tp <= node
        for cp in axes if cp <= CONTEXT
        for pp in axes if pp <= regions
        for dp in axes if dp * pp * cp * tp == devices
        for samples in sizes
        for count in range(1, step + 1) if count * samples * dp == step
    }  # fmt: skip
    found = layouts(devices, step, sizes, node, regions)
    assert set(found) == expected and len(found) == len(expected)


def compiled(**options: object) -> csc.CompiledModel:
    given = {"cache": False, "check": False} | options
    return csc.compile(MODELS["llama"](), example=BATCHES["llama"](4), **given)


@pytest.mark.long
def test_no_mesh_is_faster_than_the_chosen_one() -> None:
    """Every layout compiled for itself, planned with all effort, and timed with the step's end."""
    choice = choose(compiled(hardware="h100"), 4, None, 600.0, lambda text: None)
    assert choice.left == 0 and choice.step == 4 and all(row.fits for row in choice.rows)
    best = choice.rows[0]
    chosen = compiled(
        hardware="h100", mesh=best.mesh, microbatches=best.microbatches, zero=best.zero, recompute=best.recompute,
        sequence_parallel=best.sequence_parallel,
    )  # fmt: skip
    assert forecast(chosen, None).step == pytest.approx(best.seconds, rel=0.01)
    others = 0
    for mesh in ("pp=4", "dp=2,pp=2", "dp=4", "tp=4", "tp=2,cp=2", "tp=2,dp=2", "cp=2,dp=2", "cp=4", "pp=2,tp=2"):
        each = Mesh.parse(mesh)
        for count in {1, 2, 4} - ({4} if each.dp == 2 else {2, 4} if each.dp == 4 else set()):
            zero = 1 if each.dp * each.cp > 1 else 0
            one = compiled(hardware="h100", mesh=mesh, microbatches=count, zero=zero)
            assert forecast(one, None).step >= 0.99 * best.seconds, mesh
            others += 1
    assert others > 15


@pytest.mark.long
def test_less_memory_takes_more_ranks_of_a_model_or_recomputation() -> None:
    roomy = choose(compiled(hardware="h100"), 2, 4, 600.0, lambda text: None)
    least = min(row.peak_memory for row in roomy.rows)
    tight = choose(compiled(hardware="h100").with_options(memory=round(0.9 * least)), 2, 4, 600.0, lambda text: None)
    assert all(row.peak_memory <= 0.9 * least for row in tight.rows if row.fits)
    assert tight.rows[0].seconds >= roomy.rows[0].seconds
    nothing = choose(compiled(hardware="h100").with_options(memory=1000), 2, 4, 600.0, lambda text: None)
    assert not any(row.fits for row in nothing.rows)


def test_what_cannot_be_asked() -> None:
    model = compiled(hardware="h100", cache=True)
    for devices, step, seconds, said in (
        (512, 3, 60.0, "3 samples of a step cannot be divided among 512 devices"), (0, None, 1.0, "devices is 0"),
        (-1, 4, 1.0, "devices is -1"), (2.0, 4, 1.0, r"devices is 2\.0"), (2, 0, 1.0, "samples is 0"),
        (2, -4, 1.0, "samples is -4"), (2, 4, float("nan"), "may take nan seconds"),
        (13, 4, 1.0, "4 samples of a step cannot be divided among 13 devices"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            choose(model, devices, step, seconds, lambda text: None)  # type: ignore[arg-type]
    for option in ({"hardware": ["h100", "a100"]}, {"memory": ["1GB", "2GB"]}):
        with pytest.raises(InputError, match="is given for each pipeline rank, and how many there are is to be chosen"):
            choose(model.with_options(mesh="pp=2", **option), 2, None, 1.0, lambda text: None)


@pytest.mark.long
def test_odd_numbers_of_ranks() -> None:
    """One, primes, fewer samples than ranks, nodes of one device, microbatches and ways that are given."""
    model = compiled(hardware="h100")
    for devices, step, fixed in (
        (1, None, FixedChoices(zero=3)), (7, 7, NOTHING_FIXED), (2, None, FixedChoices(microbatches=2)),
        (2, None, FixedChoices(microbatches=1, recompute="full")),
    ):  # fmt: skip
        choice = choose(model, devices, step, 30.0, lambda text: None, fixed)
        best, mesh = choice.rows[0], Mesh.parse(choice.rows[0].mesh)
        assert best.fits and mesh.size == devices and best.microbatches * best.samples * mesh.dp == choice.step
        assert fixed.microbatches in (None, best.microbatches) and fixed.recompute in (None, best.recompute)
    one = choose(model.with_options(memory=1000), 1, None, 30.0, lambda text: None)
    assert not one.rows[0].fits and one.large == 2 and one.left == 0 and not one.room


@pytest.mark.long
def test_meshes_that_cannot_be() -> None:
    choice = choose(compiled(hardware="h100"), 3, 3, 600.0, lambda text: None)
    assert any("features" in why and "cannot be divided by tp=3" in why for why in choice.refused.values())
    assert all("tp=3" not in row.mesh for row in choice.rows)


def test_one_size_of_microbatches_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts of the others are looked at all the same."""
    own = Inspected.divided

    def divided(self: Inspected, microbatch: Mapping[str, Any]) -> Program:
        if len(microbatch["input_ids"]) == 1:
            raise InputError("one sample alone", "the model", "give it two")
        return own(self, microbatch)

    monkeypatch.setattr(Inspected, "divided", divided)
    choice = choose(compiled(hardware="h100"), 1, 4, 600.0, lambda text: None)
    assert {row.samples for row in choice.rows} == {2, 4}
    assert [*choice.refused] == ["tp=1, cp=1 with microbatches of 1"]


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, and the same choice as JSON."""
    asked_once(monkeypatch, "csc.driver.mesh_choice.choose", choose)
    (tmp_path / "model.py").write_text(
        "from tests.compiler.tensor_models import BATCHES, MODELS\n"
        "example = BATCHES['llama'](1)\n"
        "model = MODELS['llama']\n"
    )
    asked = [
        "plan",
        f"{tmp_path}/model.py:model",
        "--example",
        "example",
        "--ranks",
        "2",
        "--hardware",
        "h100",
        "--samples",
        "8",
    ]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "8 samples a step on 2 devices, memory limit" in shown.output and "best: --mesh" in shown.output
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert found["devices"] == 2 and found["rows"][0]["seconds"] > 0
