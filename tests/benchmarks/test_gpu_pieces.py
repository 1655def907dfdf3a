"""`make gpu`: every piece can be started, and runs stop, are resumed and reported. What they show needs a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

import csc
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import graphs as graphs_piece
from benchmarks.gpu import model, step
from benchmarks.gpu.pieces import CSC, PIECES, PYTHON, Piece
from benchmarks.gpu.report import report
from benchmarks.gpu.running import ROOT, outcomes, run
from csc.analysis.unfit_parts import unfit_in
from csc.ir import graph as g
from tests.compiler import small, test_opaque, test_recompute
from tests.compiler.conftest import Models
from tests.recording import recorded_on_cpus

DEVICE = "a device"


def piece(code: str, name: str = "one", minutes: float = 1.0) -> Piece:
    return Piece(name, "nothing", (PYTHON, "-c", code), minutes)


def test_pieces_can_be_started() -> None:
    assert len({one.name for one in PIECES}) == len(PIECES)
    assert sum(one.minutes for one in PIECES if one.devices == 1) <= 40
    for one in PIECES:
        words = list(one.command)
        assert words[0] in (PYTHON, CSC) and Path(words[0]).exists()
        modules = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"]
        assert all(importlib.util.find_spec(module) for module in modules), one.name
        files = [word.partition(":")[0] for word in words[1:] if ".py" in word]
        assert all((ROOT / file).is_file() for file in files) and (modules or files), one.name


def test_outcomes_are_kept(tmp_path: Path) -> None:
    good = run(piece("import benchmarks.gpu; print('seen')"), tmp_path, DEVICE, Event())
    assert (good.code, good.verdict, good.tail.strip()) == (0, "good", "seen")
    bad = run(piece("print('why'); raise SystemExit(3)", "two, of spaces"), tmp_path, DEVICE, Event())
    assert (bad.verdict, bad.is_good, bad.tail.strip()) == ("exit 3", False, "why")
    late = run(
        piece("import time; print('begun', flush=True); time.sleep(60)", "three", 0.02), tmp_path, DEVICE, Event()
    )
    assert (late.verdict, late.code, late.tail.strip()) == ("stopped", None, "begun")
    assert outcomes(tmp_path, DEVICE) == {one.name: one for one in (good, bad, late)}
    assert outcomes(tmp_path, "another device") == {}
    (tmp_path / "one.json").write_text("{")
    assert outcomes(tmp_path, DEVICE).keys() == {bad.name, late.name}
    asked = [piece("", "two, of spaces"), piece("", "four"), replace(piece("", "five"), devices=2)]
    text = report(asked, outcomes(tmp_path, DEVICE), DEVICE, 1)
    assert "| two, of spaces | nothing | exit 3 |" in text and "| four | nothing | not run |" in text
    assert "takes 2 GPUs" in text and "```\nwhy\n```" in text


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "count"
    pieces = (
        piece(f"open({str(file)!r}, 'a').write('x')"),
        piece("raise SystemExit(1)", "two"),
        replace(piece("", "three"), devices=2),
    )
    monkeypatch.setattr(command, "PIECES", pieces)
    monkeypatch.setattr(command.devices, "default", lambda: torch.device("meta"))
    monkeypatch.setattr(command.devices, "title", lambda device: DEVICE)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path / "out")])
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            command.main()
        assert stop.value.code == 1
    assert file.read_text() == "x", "what went well is not run again"
    assert json.loads((tmp_path / "out" / "two.json").read_text())["code"] == 1
    assert "takes 2 GPUs" in (tmp_path / "out" / "report.md").read_text()


def test_pieces_run_side_by_side_and_are_given_up_together(tmp_path: Path) -> None:
    """Two that wait for each other end; one that fails to be told ends the others, and what waits does not begin."""
    meet = "import pathlib, time; pathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    found = {}

    def one(each: Piece, given_up: Event) -> None:
        found[each.name] = run(each, tmp_path, DEVICE, given_up).verdict

    command.side_by_side(one, [piece(meet.format(here, there)), piece(meet.format(there, here), "two")], 2)
    assert found == {"one": "good", "two": "good"}

    def interrupted(each: Piece, given_up: Event) -> None:
        if each.name == "stopped":
            raise KeyboardInterrupt
        one(each, given_up)

    found.clear()
    start = time.monotonic()
    waiting = [piece("", "stopped"), piece("import time; time.sleep(60)", "long"), piece("", "late")]
    with pytest.raises(KeyboardInterrupt):
        command.side_by_side(interrupted, waiting, 2)
    assert found.get("long", "stopped") == "stopped" and time.monotonic() - start < 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu would run")
def test_without_a_gpu_the_pieces_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    command.main()
    shown = capsys.readouterr().out
    assert "There is no GPU here" in shown and all(one.name in shown for one in PIECES)


def test_what_is_no_function_for_a_cuda_graph() -> None:
    """What draws, what meets others, what is the model's own code; the layers of a plain step are captured."""
    models = Models()
    llava = models("llava").program
    assert all(unfit_in(one.forward) == "" for one in llava.variants.values())
    called = {
        g.op_name(node) for one in llava.variants.values() if one.backward_input for node in one.backward_input.nodes
    }
    assert "csc::masked_scatter_backward" in called and "aten::masked_scatter_backward" not in called, "it waits"
    spread = models("llava", mesh="cp=2").program
    layer = spread.variants[spread.region("model.language_model.layers.0").variant]
    assert "meets other ranks" in unfit_in(layer.forward) and "meets other ranks" in unfit_in(layer.backward_input)
    dropping = csc.compile(test_recompute.Noisy(), example={"x": torch.randn(4, 8)}, cache=False).program
    assert any("draw the same" in unfit_in(one.forward) for one in dropping.variants.values())
    own = csc.compile(test_opaque.model(0.5), example=test_opaque.batch(), cache=False).program
    assert any("csc::opaque" in unfit_in(one.forward) for one in own.variants.values())


@pytest.mark.long
def test_recorded_steps_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The piece as it would run, on a small model and with the recorder of the tests; and what a CPU says."""
    monkeypatch.setattr(graphs_piece, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(graphs_piece, "on_device", lambda case: (small.text(2), small.text_batch(2)))
    monkeypatch.setattr(graphs_piece, "MESHES", (("pp=2", "zb-h1"),))
    monkeypatch.setattr(sys, "argv", ["graphs", "--rounds", "2"])
    graphs_piece.main()
    assert "these would be recorded:\n  pp=2: all " in capsys.readouterr().out
    recorder = recorded_on_cpus(monkeypatch)
    graphs_piece.main()
    shown = capsys.readouterr().out
    assert "F 0 x2 B 0 x2 W 0 x2" in shown and "yes" in shown and min(recorder.launches) > 1
    good = graphs_piece.Measured(1.0, 0, 0.0, {"loss": torch.ones(())}, ())
    other = replace(good, result={"loss": torch.zeros(()), "more": torch.ones(())})
    assert graphs_piece.differing(good, good) == [] and graphs_piece.differing(good, other) == ["loss", "more"]


def test_each_process_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models made on the first GPU by all ranks would leave all but one with parameters elsewhere."""
    monkeypatch.setattr(model.devices, "placed", lambda device, local, count: (torch.device("meta", local % count), ""))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert model.own_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert model.own_device("cpu") == torch.device("meta", 1)


def test_memory_of_the_other_rivals_is_not_a_rivals_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that counts: what is held when a rival comes, and copies of its gradients, are not its peak."""
    held = iter([1000, 5000])
    monkeypatch.setattr(step.devices, "held_memory", lambda device: next(held))
    monkeypatch.setattr(step.devices, "peak_memory", lambda device: 2**20 + 9000)
    monkeypatch.setattr(step, "result_bytes", lambda found: 100)
    monkeypatch.setattr(step, "on_device", lambda case: (torch.nn.Linear(2, 2), {"input": torch.ones(1, 2)}))
    monkeypatch.setattr(step, "step_of", lambda name, model, batch: (lambda: torch.ones(()), None))
    found = step.measure(step.cases(8, 1, 16)[0], ("eager", "csc"), 1, torch.float32)
    assert [round(one["peak_mb"] * 2**20) for one in found.values()] == [2**20 + 7900, 2**20 + 3900]
