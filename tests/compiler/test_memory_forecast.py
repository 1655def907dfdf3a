"""The memory that a plan expects of each rank, by kind."""

from __future__ import annotations

import pytest

import csc
from csc import devices
from csc.commands.tables import memory_table
from csc.driver.steps import beside
from csc.reports.forecast import RankMemory, forecast, memory_forecast
from tests.models import hf


@pytest.fixture(scope="module")
def compiled() -> csc.CompiledModel:
    return csc.compile(
        hf.llava(), mesh="pp=3", example=hf.llava_batch(4), microbatches=4, freeze=["vision_tower"], schedule="1f1b",
        recompute={"language_model": "full"},
    )  # fmt: skip


def test_kinds_are_those_of_the_model_and_of_the_simulation(compiled: csc.CompiledModel) -> None:
    rows = memory_forecast(compiled.program, compiled.options)
    plan = forecast(compiled, None).plan
    assert [row.rank for row in rows] == [0, 1, 2]
    for row in rows:
        state = row.parameters + row.gradients + row.optimizer
        assert state + row.working == plan.state[row.rank]
        assert row.activations == pytest.approx(plan.peak_activations[row.rank], abs=1)
        assert row.total == state + row.activations + row.working + row.messages == row.as_dict()["total"]
    parameters = dict(compiled.model.named_parameters())
    trained = {name: p for name, p in parameters.items() if "vision_tower" not in name}
    assert sum(row.gradients for row in rows) == 4 * sum(p.numel() for p in trained.values())
    assert sum(row.optimizer for row in rows) == 2 * sum(row.gradients for row in rows)  # AdamW's two moments
    assert any(row.working for row in rows)


def test_messages_come_from_other_ranks(compiled: csc.CompiledModel) -> None:
    alone = compiled.with_options(mesh="pp=1")
    (row,) = memory_forecast(alone.program, alone.options)
    assert isinstance(row, RankMemory) and row.messages == 0
    rows = memory_forecast(compiled.program, compiled.options)
    assert rows[1].messages > 0


def test_both_are_told_where_they_are_alike(compiled: csc.CompiledModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="csc"):
        for _ in range(3):
            compiled.train_step(hf.llava_batch(4))
    planned = memory_forecast(compiled.program, compiled.options)
    held = sum(row.total for row in planned)
    assert compiled.metrics["planned_memory"] == pytest.approx(held, abs=len(planned))
    assert compiled.metrics["peak_memory"] > 0
    assert not [line for line in caplog.messages if line.startswith("memory of ")], "a CPU's is of the whole process"
    assert beside({"planned_memory": 2**30, "peak_memory": 2**31}).endswith("1.00 GiB planned; 2.00 GiB measured")


def test_recorded_stages_have_places_of_their_own(compiled: csc.CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """For gradients, and for parameters that are computed with in another dtype; nothing where nothing is recorded."""
    on_a_cpu = compiled.with_options(cuda_graphs=True)
    assert not any(row.recorded for row in memory_forecast(on_a_cpu.program, on_a_cpu.options))
    monkeypatch.setattr(devices, "records", lambda device: True)
    for precision in ("model", "bf16"):
        chosen = compiled.with_options(cuda_graphs=True, precision=precision, mesh="pp=1")
        (row,) = memory_forecast(chosen.program, chosen.options)
        every = sum(p.numel() for p in compiled.model.parameters())  # some of the encoder's are not read
        copied = row.recorded - row.gradients
        assert copied == 0 if precision == "model" else 1.8 * every < copied <= 2 * every
        state = row.parameters + row.gradients + row.optimizer
        assert forecast(chosen, None).plan.state[0] == pytest.approx(state + row.working + row.recorded)
        assert "recorded" in memory_table([row], None).headings
