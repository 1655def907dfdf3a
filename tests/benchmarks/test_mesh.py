"""The mesh benchmark at a tiny size: every rival is priced, and csc's choice is behind none that it could run."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from csc.passes.pipeline_problem import problem

from benchmarks.mesh.cases import QUICK, cases
from benchmarks.mesh.components import FORMULAS, Share, thetas
from benchmarks.mesh.divided import divided
from benchmarks.mesh.kept_rows import keep, kept
from benchmarks.mesh.measure import MeshComparison, compared
from benchmarks.mesh.summary import AIMS, document, summary
from benchmarks.mesh.uniform import MeshRival
from benchmarks.mllm import configurations as c
from benchmarks.mllm.configurations import Configuration
from benchmarks.pipeline.cases import Case
from csc.driver.mesh_candidates import NOTHING_FIXED
from csc.driver.mesh_search import MeshSearch
from csc.driver.options import changed
from csc.ir.mesh import Mesh
from tests.benchmarks.test_mllm import DECODER, VISION, shrunk

TINY = Configuration(
    "tiny",
    {
        "vision": shrunk(c.INTERN_VIT_6B, 3, VISION, input=(2, 3, 28, 28)),
        "llm": shrunk(c.LLAMA_8B, 3, {name: size for name, size in DECODER.items() if name != "sliding_window"}),
    },
)


@pytest.mark.long
@pytest.mark.slow
def test_a_case_with_all_its_rivals() -> None:
    case = Case("tiny", "encoder frozen", 2, "h100")
    row = compared(case, divided(TINY, case.frozen, case.hardware), 30.0)
    assert row.own.fits and row.left == 0
    names = [rival.name for rival in row.rivals]
    assert names == ["best uniform", "Megatron", "Cornstarch", *FORMULAS]
    assert all(rival.fits for rival in row.rivals if rival.name != "Cornstarch")
    on_one_mesh = [rival.seconds for rival in (row.own, *row.rivals[:3]) if rival.seconds is not None]
    assert 0 < row.least <= min(on_one_mesh)
    found = summary([row])
    assert set(AIMS) <= set(found)
    assert (found["worst_speedup"] or 0.0) >= 1 - 1e-6
    assert found["speedup_over_best_uniform_geomean"] == row.speedup(row.rival("best uniform"))
    assert (row.by_component.seconds or 0.0) <= (row.rival("DFLOP").seconds or 0.0)
    assert json.loads(json.dumps(document([row])))["rows"][0]["case"]["ranks"] == 2


@pytest.mark.long
def test_a_mesh_is_traced_with_all_that_its_components_have_of_their_own() -> None:
    """Two images on two ranks of cp: each computes one, or all tokens of one half, or both."""
    model = divided(TINY, "all trainable", "h100")

    def kept_bytes(mesh: str, **more: object) -> float:
        options = changed(model.options, mesh=mesh, **more)
        numbers = problem(model.divided(options, 1), options)
        return sum(unit.saved for unit in numbers.units if unit.component == "vision")

    whole = kept_bytes("cp=2")
    assert kept_bytes("cp=2,vision.cp=1") == pytest.approx(whole / 2, rel=0.1)
    assert kept_bytes("cp=2", context={"vision": 2}) == pytest.approx(whole / 2, rel=0.2)
    assert kept_bytes("tp=2,pp=2,vision.tp=1,vision.pp=1") == pytest.approx(whole / 2, rel=0.1)
    assert kept_bytes("tp=2,pp=2,vision.tp=1,vision.pp=1,vision.dp=1") == whole == kept_bytes("pp=2")


def test_cases_that_were_run_are_kept(tmp_path: Path) -> None:
    """The last line may have been cut off."""
    one, other = (
        MeshComparison(
            Case("VLM-S", "encoder frozen", ranks, "h100"), MeshRival("csc", 1.0, 2.0, True, "dp=24"),
            (MeshRival("Megatron", None), MeshRival("best uniform", 2.0, 2.0, True)), MeshRival("by component", 3.0),
            10.0, 0, 8e10, 0.5,
        )
        for ranks in (24, 64)
    )  # fmt: skip
    file = tmp_path / "rows.jsonl"
    assert kept(file) == {} == kept(None)
    keep(file, one)
    keep(file, other)
    keep(None, other)
    assert kept(file) == {one.case: one, other.case: other}
    file.write_text(file.read_text()[:-20])
    assert kept(file) == {one.case: one}


def test_thetas_use_all_ranks_and_samples() -> None:
    found = list(thetas(12, 24, 3))
    assert found and len(set(found)) == len(found)
    assert all(large.ranks + small.ranks == 12 and 24 % large.dp == 0 and large.pp <= 3 for large, small in found)
    assert (Share(2, 2, 2), Share(1, 2, 2)) in found


def test_cases() -> None:
    assert len(cases(False, (), ())) == 9 * 3 * 3 * 2
    assert len(cases(True, (), ())) == len(QUICK) and set(QUICK) <= set(cases(False, (), ()))
    assert {case.ranks for case in cases(False, ["VLM-S"], [64])} == {64}
    assert len(cases(False, (), (), "*encoder frozen, 24 ranks, h100")) == 9


@pytest.mark.long
def test_a_search_in_which_nothing_fits_goes_on_tracing() -> None:
    """Half of its time is over after the first division, and ranks that divide layers may have room."""
    model = divided(TINY, "all trainable", "h100")
    tight = replace(model, options=replace(model.options, memory=1_600_000))
    clock = itertools.chain([0.0], itertools.repeat(0.6)).__next__
    found = MeshSearch(tight, 4, 4, 1.0, lambda text: None, NOTHING_FIXED, clock).choice()
    mesh = Mesh.parse(found.rows[0].mesh)
    assert found.rows[0].fits and mesh.tp * mesh.cp > 1, found.rows[0]
