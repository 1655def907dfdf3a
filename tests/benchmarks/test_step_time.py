"""The benchmark of a step: what it counts together, and that its models train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.step_time.cases import FULL, HEAD, QUICK, Case, select
from benchmarks.step_time.measure import COMPILE, CSC, EAGER, FUSED, WHOLE
from benchmarks.step_time.models import MODELS, build
from benchmarks.step_time.overhead import OverheadRow, fitted, measured_layout
from benchmarks.step_time.rows import Ratio, Row, Timed, keep, kept
from benchmarks.step_time.summary import summary


def measured(cpu: float, first: float = 1.0) -> Timed:
    return Timed(((cpu,),), first_s=first, peak_mb=cpu, difference=1e-7)


def test_figures_are_of_the_rows_that_have_them() -> None:
    rows = [
        Row(Case("llama", 128, 128), {EAGER: measured(10), CSC: measured(9)}),
        Row(
            Case("llama", 128, 128, layers=32, frozen="lora"),
            {EAGER: measured(10), COMPILE: measured(8, 100.0), CSC: measured(11), FUSED: measured(4, 20.0)},
        ),
    ]
    found = summary(rows)
    assert found["csc_over_eager_max"] == pytest.approx(1.1)
    assert found["fused_over_compile_frozen_geomean"] == found["peak_over_compile_geomean"] == pytest.approx(0.5)
    assert found["compile_seconds_over_compile_32_layers"] == pytest.approx(0.2)
    assert "warm_seconds" not in found, "not measured"


def test_a_ratio_is_of_pairs_and_of_processes() -> None:
    """A step that other work made slow counts in its pair alone; a process is one voice, whatever its rounds."""
    steady = Timed(((10.0, 10.0, 40.0), (10.0,), (20.0,)), first_s=1.0, peak_mb=1.0, difference=0.0)
    other = Timed(((11.0, 11.0, 44.0), (9.0,), (21.0,)), first_s=1.0, peak_mb=1.0, difference=0.0)
    row = Row(HEAD, {EAGER: steady, CSC: other})
    assert row.ratio(CSC, EAGER) == Ratio(pytest.approx(1.05), pytest.approx(0.9), pytest.approx(1.1))
    assert row.ratio(FUSED, EAGER) is None
    assert summary([row])["csc_over_eager_max_in_every_process"] == pytest.approx(0.9)


def test_rows_are_kept_and_a_line_that_was_cut_off_is_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [Row(case, {EAGER: measured(10), CSC: replace(measured(9), warm_s=2.0)}) for case in QUICK[:2]]
    for row in rows:
        keep(file, row)
    assert list(kept(file).values()) == rows
    file.write_text(file.read_text()[:-1])
    assert list(kept(file).values()) == rows[:1]
    assert kept(None) == {}


def test_a_head_is_measured_against_whole_logits() -> None:
    row = {EAGER: measured(10), CSC: measured(3), WHOLE: measured(12)}
    assert summary([Row(HEAD, row)])["loss_peak_over_whole_logits"] == pytest.approx(0.25)
    model, batch = build(Case("head", 8, 4, layers=1))
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert HEAD in QUICK and HEAD in FULL


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("frozen", ["encoder", "lora"])
def test_models_train_what_the_case_says(model: str, frozen: str) -> None:
    if model == "head" or (model, frozen) == ("llama", "encoder"):
        pytest.skip("it has none")
    made, batch = build(Case(model, 128, 32, layers=1, frozen=frozen))
    made(**batch).loss.backward()
    trained = [name for name, p in made.named_parameters() if p.requires_grad]
    assert trained
    assert all(made.get_parameter(name).grad is not None for name in trained if "encoder.layers.0" not in name)
    if frozen == "lora":
        assert all("lora" in name for name in trained)
    assert all(
        torch.isfinite(made.get_parameter(n).grad).all() for n in trained if made.get_parameter(n).grad is not None
    )


def test_quick_cases_are_small_and_names_select() -> None:
    assert len(QUICK) < len(FULL)
    assert {case.model for case in select(FULL, ["llava"])} == {"llava"}
    assert [case.layers for case in select(FULL, ["llama"], "*32 layers*")] == [32]


def test_overhead_is_fitted() -> None:
    rows = [
        OverheadRow(pp, many, 2 * pp * many, 2 * (pp - 1) * many, 10.0, 0.0, 0.0)
        for pp, many in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 2))
    ]
    rows = [replace(row, step_ms=1e-3 * (500 + 20 * row.actions + 7 * row.messages)) for row in rows]
    assert fitted(rows) == pytest.approx({"step_us": 500, "action_us": 20, "message_us": 7})


@pytest.mark.long
def test_a_plain_loop_has_the_gradients_of_a_step() -> None:
    found = measured_layout(2, 2, rounds=1)
    assert found.difference <= 1e-6 and found.messages == 4 and found.step_ms > 0 < found.plain_ms
