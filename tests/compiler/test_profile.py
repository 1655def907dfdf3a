"""Measuring F, B and W: what is run, what is written, and the fit on seconds that a known device would take."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.analysis.costs import KernelCall, Kernels, basis, region_costs, seconds, variant_key
from csc.analysis.hardware import Hardware, hardware
from csc.commands import main as cli
from csc.driver.new_model import compiled_model
from csc.errors import CscError, InputError
from csc.ir.program import Options
from csc.ir.schedule import Action
from csc.reports import wire_profile
from csc.reports.part_times import calibration, measure, taken
from csc.reports.profiling import Part, fit, profile, profile_of
from csc.reports.varied_sizes import sampler
from csc.runtime.executor import Timed
from tests.compiler import small
from tests.models import plain

pytestmark = pytest.mark.usefixtures("traces")


@st.composite
def devices(draw: st.DrawFn) -> tuple[Hardware, list[Part]]:
    """A device with efficiencies of its own, and what it takes for parts of all kinds."""
    base = hardware(draw(st.sampled_from(["a40", "a100", "h100", "cpu"])))
    device = replace(
        base,
        matmul_efficiency=draw(st.floats(0.1, 0.95)),
        bandwidth_efficiency=draw(st.floats(0.1, 0.95)),
        launch=draw(st.floats(0.0, 2e-5)),
    )
    rate, moved = base.peak["bfloat16"], base.bandwidth
    parts = []
    for share in (0.0, 0.01, 0.1, 0.3, 1.0):  # matmuls and element-wise calls, from far too small to large
        matmul = KernelCall("aten::mm", "bfloat16", int(share * rate * 1e-3), 100)
        other = KernelCall("aten::add", "bfloat16", 0, int((1.1 - share) * moved * 1e-3))
        work = Kernels((matmul,) * draw(st.integers(1, 9)) + (other,) * draw(st.integers(1, 9)))
        parts.append((work, seconds(work, device), draw(st.integers(1, 40))))
    return device, parts


@given(devices())
@settings(max_examples=60, deadline=None)
def test_the_fit_finds_the_device(case: tuple[Hardware, list[Part]]) -> None:
    """Whatever the shipped profile says, the fit predicts the device it was measured on."""
    device, parts = case
    base = hardware(device.name)
    fitted = fit(base, parts)
    for work, measured, _ in parts:
        assert seconds(work, fitted) == pytest.approx(measured, rel=0.02)
    assert fitted.peak == base.peak and fitted.bandwidth == base.bandwidth
    assert 0 < fitted.matmul_efficiency <= 1 and 0 < fitted.bandwidth_efficiency <= 1
    assert fitted.launch >= 0


def test_a_device_faster_than_its_profile_gets_higher_peaks() -> None:
    base = hardware("cpu")
    matmul = Kernels((KernelCall("aten::mm", "float32", 10**10, 10**6),))
    add = Kernels((KernelCall("aten::add", "float32", 0, 10**9),))
    fast = replace(base, peak={d: 3 * r for d, r in base.peak.items()}, bandwidth=2 * base.bandwidth)
    fitted = fit(base, [(matmul, seconds(matmul, fast), 1), (add, seconds(add, fast), 1)])
    assert fitted.matmul_efficiency == fitted.bandwidth_efficiency == 1.0
    assert fitted.peak["float32"] == pytest.approx(2.4 * base.peak["float32"], rel=0.01)
    assert fitted.peak["bfloat16"] / fitted.peak["float32"] == pytest.approx(
        base.peak["bfloat16"] / base.peak["float32"]
    )


def test_what_no_part_depends_on_stays() -> None:
    base = hardware("a100")
    add = Kernels((KernelCall("aten::add", "float32", 0, 10**9),))
    fitted = fit(base, [(add, 2 * seconds(add, base), 1)])
    assert fitted.matmul_efficiency == pytest.approx(base.matmul_efficiency)
    assert seconds(add, fitted) == pytest.approx(2 * seconds(add, base))
    assert fit(base, []) == base


@pytest.mark.slow
@pytest.mark.parametrize(("make", "batch"), [(small.mixed, small.mixed_batch), (plain.plain, plain.plain_batch)])
@pytest.mark.long_cases("plain-plain_batch")
def test_every_part_is_measured(make: object, batch: object) -> None:
    """Those that exist take time, others none; DeepStack, cross-attention and tied weights included."""
    compiled = compiled_model(make(), Options(freeze=("project",) if make is small.mixed else ("vision",)), batch(2))
    source = sampler(compiled)
    program = source.program()
    before = [p.detach().clone() for p in compiled.model.parameters()]
    found = measure(program, compiled.model, source.microbatch, budget=0.0)
    assert found.keys() == program.variants.keys()
    for name, variant in program.variants.items():
        exists = (True, variant.backward_input is not None, variant.backward_weight is not None)
        assert tuple(value > 0 for value in found[name]) == exists
    assert any(not all(times) for times in found.values()) and any(all(times) for times in found.values())
    assert all(map(torch.equal, before, compiled.model.parameters()))
    assert all(p.grad is None for p in compiled.model.parameters())


@pytest.mark.slow
def test_a_measured_plan_says_so(tmp_path: Path) -> None:
    compiled = compiled_model(small.mixed(), Options(), small.mixed_batch(2))
    found = profile(compiled, budget=0.0, output=tmp_path / "here.toml", wires=False)
    again = hardware(tmp_path / "here.toml")
    assert again == found.hardware and again.name == "here"
    program = sampler(compiled).program()
    assert basis(program, again) == f"measured on {again.measured_on}"
    assert f"torch {torch.__version__}" in again.measured_on and "1 thread," in again.measured_on
    rows = {row.key: row for row in found.rows}
    for cost, region in zip(region_costs(program, again), program.regions):
        row = rows[variant_key(program.variants[region.variant])]
        assert (cost.forward, cost.backward_input, cost.backward_weight) == row.measured
    other = sampler(compiled).program(copies=2)
    assert basis(other, again) == "model of here"
    assert found.error == pytest.approx(
        sum(sum(row.modelled) for row in found.rows) / sum(sum(row.measured) for row in found.rows) - 1
    )
    assert found.mean_error >= abs(found.error)


def test_only_toml_is_written() -> None:
    compiled = compiled_model(small.mixed(), Options(), small.mixed_batch(2))
    with pytest.raises(InputError, match=r"here\.json.*call it here\.toml"):
        profile(compiled, budget=0.0, output=Path("here.json"))


def test_the_profile_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_of(torch.device("cpu")) == "cpu"
    for title, name in (("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A40", "a40"), ("NVIDIA H200", "h200")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, title=title: title)
        assert profile_of(torch.device("cuda", 0)) == name
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A4000")
    with pytest.raises(InputError, match="there is no profile for nvidia a4000"):
        profile_of(torch.device("cuda", 0))


TARGET = """
import csc
from tests.compiler import small

@csc.compile(example=lambda: small.mixed_batch(2), freeze=["project"])
def model():
    return small.mixed()
"""


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["csc", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.slow
@pytest.mark.long
def test_csc_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(TARGET)
    target, file = f"{tmp_path}/train.py:model", tmp_path / "mine.toml"
    assert command(monkeypatch, "profile", target, "--seconds", 0, "-o", file) == 0
    shown = capsys.readouterr().out
    assert "model against measured" in shown and "body" in shown and "a collective" in shown
    mine = hardware(file)
    assert mine.collective is not None and mine.within != hardware("cpu").within
    assert 0 < mine.action < 0.1 and 0 < mine.handling < 0.1
    assert command(monkeypatch, "profile", target, "--seconds", 0, "--json", "--hardware", file, "--no-wires") == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["variant"] for row in found["variants"]} == {"project_forward_only", "body_first", "head"}
    assert found["hardware"]["measured"].keys() == hardware(file).measured.keys()
    assert command(monkeypatch, "cost", target, "--json", "--hardware", file) == 0
    costs = json.loads(capsys.readouterr().out)
    assert costs["seconds"] == f"measured on {hardware(file).measured_on}"
    assert found["hardware"]["action"] == mine.action  # kept, as the network is
    keys = {row["variant"]: row["key"] for row in found["variants"]}
    for row in costs["regions"]:
        assert tuple(row["seconds"].values()) == hardware(file).measured[keys[row["template"]]]


def test_processes_that_fail_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(CscError, match=r"cannot be measured: they end without a word.*--no-wires"):
        wire_profile.measure(torch.device("cpu"))


def test_a_gpu_alone_keeps_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_profile.devices, "count", lambda device: 1)
    found = wire_profile.measure(torch.device("cuda"))
    assert found.message is None and found.collective is None and found.host is None  # kernels are queued ahead


def test_what_the_runtime_takes_is_what_is_left_of_a_trace() -> None:
    """Made times: 1 ms of an action, 2 of a SEND, 3 of a RECV that is not late, 4 for posting it, .5 between all."""
    program = calibration(2)
    now, events = 0.0, []
    late = itertools.cycle((0.0, 0.0, 0.0, 0.2))
    for action in program.program.schedule.ranks[0]:
        wait = program.pipeline.stages[action.stage].seconds(action.kind) if action.computes else 0.0
        own = 1e-3 if action.computes else {"SEND": 2e-3, "RECV": 3e-3 + next(late)}.get(action.kind, 0.0)
        now += 5e-4 + 4e-3 * action.computes
        events.append(Timed(action, now, now + wait + own))
        now += wait + own
    found = taken(program, [[], events, events])
    computes, receives = (sum(test(e.action) for e in events) for test in (_computes, _receives))
    assert found.action == pytest.approx(1.5e-3)
    assert found.handling == pytest.approx((2e-3 + 3e-3 + 4e-3 * computes / receives) / 2 + 5e-4)


def _computes(action: Action) -> bool:
    return action.computes


def _receives(action: Action) -> bool:
    return action.kind == "RECV"
