"""`python -m csc.run` in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import handmade
import pytest
from safetensors.torch import load_file, save_file

from csc.errors import InputError, RankLost
from csc.ir.schedule import Action
from csc.run import Arguments, Optimizer, run, stopped_sentence
from csc.runtime.clocks import clocks_document
from csc.runtime.launch import setup_distributed
from csc.runtime.loaded_program import load
from csc.runtime.meeting import Positions
from csc.runtime.trainer import Trainer
from csc.simulation.timeline import from_json

DATA = """
import torch
def batches():
    for step in range(3):
        yield {"ids": torch.full((8, 5), step), "labels": torch.ones(8, 5, dtype=torch.int64)}
def broken():
    raise KeyError("mine")
"""


def options(program: Path, **changes: object) -> Arguments:
    base: dict[str, object] = {
        "directory": program,
        "steps": 2,
        "batch": None,
        "data": None,
        "weights": None,
        "save": None,
        "lr": 0.1,
        "optimizer": Optimizer.adamw,
        "clip": None,
        "seed": 0,
        "log_every": 1,
        "json": True,
        "timeout": 30.0,
    }
    return Arguments(**{**base, **changes})  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return handmade.write(tmp_path / "p")


def losses(text: str) -> list[float]:
    return [json.loads(line)["loss"] for line in text.splitlines()]


def test_trains_and_saves(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options(directory, steps=5, clip=1.0, save=tmp_path / "out")) == 0
    first = losses(capsys.readouterr().out)
    assert len(first) == 5 and first[-1] < first[0]
    assert run(options(directory, steps=1, weights=tmp_path / "out")) == 0
    assert losses(capsys.readouterr().out)[0] < first[-1]


def test_data_and_batches(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.py").write_text(DATA)
    assert run(options(directory, steps=3, data=f"{tmp_path}/data.py:batches")) == 0
    assert len(losses(capsys.readouterr().out)) == 3
    save_file(handmade.batch(4), tmp_path / "global.safetensors")
    assert run(options(directory, batch=tmp_path / "global.safetensors", json=False, log_every=2)) == 0
    assert capsys.readouterr().out.startswith("step 2  loss ")


@pytest.mark.parametrize(("steps", "cold", "more"), [(1, 2, 4), (9, 6, 0), (0, 2, 5)])
def test_a_timeline_is_of_warm_steps_and_leaves_the_training_as_it_is(
    directory: Path, tmp_path: Path, steps: int, cold: int, more: int,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three steps are timed, after two others at least; what the training lacks of these follows it."""
    seen: list[bool] = []
    plain = Trainer.train_step

    def noted(self: Trainer, batch: Any) -> Any:
        seen.append(self.trace)
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "train_step", noted)
    file = tmp_path / "t.json"
    (tmp_path / "data.py").write_text(DATA.replace("range(3)", f"range({max(steps, 1)})"))
    shared = {"steps": steps, "data": f"{tmp_path}/data.py:batches"}
    assert run(options(directory, **shared, save=tmp_path / "plain")) == 0
    alone = losses(capsys.readouterr().out)
    seen.clear()
    assert run(options(directory, **shared, save=tmp_path / "timed", timeline=file)) == 0
    said = capsys.readouterr()
    assert losses(said.out) == alone and len(alone) == steps
    assert seen == [False] * cold + [True] * 3 and len(seen) == steps + more
    assert (f"{more} more steps, which change no weights" in said.err) == (more > 0)
    assert f"wrote {file}: the step of median time of 3" in said.err
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "timed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert from_json(json.loads(file.read_text())).makespan > 0


def test_one_step_is_recorded_on_request(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    plain = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self, batch: (seen.append(self.trace), plain(self, batch))[1])
    assert run(options(directory, steps=4, timeline=tmp_path / "t.json", timeline_step=1)) == 0
    assert seen == [True, False, False, False]
    assert "t.json: step 1, " in capsys.readouterr().err


def test_random_weights_are_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = handmade.write(tmp_path / "q", with_weights=False, frozen="all")
    assert run(options(directory)) == 0
    assert "random ones, normal with standard deviation 0.02, seed 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        ({"directory": Path("/nowhere")}, 2, "/nowhere: there is no such directory"),
        ({"data": "nowhere.py:f"}, 2, "there is no such file: 'nowhere.py'"),
        ({"data": "{tmp}/data.py:f"}, 2, "has no function 'f'; it has batches, broken"),
        ({"data": "{tmp}/data.py:batches", "steps": 4}, 2, "the data ended after 3 of 4 steps"),
        ({"batch": Path("nowhere")}, 2, "nowhere: there is no such file. Give a safetensors file"),
        ({"weights": Path("nowhere")}, 2, "nowhere: there is no such file"),
        ({"lr": 1e30, "steps": 9, "optimizer": Optimizer.sgd}, 1, "is not finite"),
        ({"data": "{tmp}/data.py:broken"}, 1, "KeyError: 'mine'"),
        ({"timeline": Path("t.json"), "timeline_step": 3}, 2, "there is no step 3: training has 2"),
        ({"timeline_step": 1}, 2, "Give --timeline FILE as well"),
    ],
)
def test_errors_are_one_sentence(
    directory: Path,
    tmp_path: Path,
    changes: dict[str, object],
    code: int,
    part: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "data.py").write_text(DATA)
    changes = {k: v.replace("{tmp}", str(tmp_path)) if isinstance(v, str) else v for k, v in changes.items()}
    assert run(options(directory, **changes)) == code
    said = capsys.readouterr().err
    assert part in said
    if "KeyError" not in part:  # an error of the user's own function keeps its traceback
        assert len(said.splitlines()) == 1 and "Traceback" not in said


@pytest.mark.slow
def test_the_runtime_leaves_the_compiler_alone(directory: Path) -> None:
    # sympy is not in the list after a step: torch.optim imports torch._dynamo, and that imports it
    code = (
        "import sys\nfrom csc.run import main\nsys.argv = ['csc.run', sys.argv[1], '--steps', '1']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "names = ('csc.passes', 'csc.capture', 'csc.codegen', 'csc.api', 'csc.analysis', 'transformers')\n"
        "found = [m for m in sys.modules if m.startswith(names)]\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 1  loss ")


def test_setup_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="Start with torchrun"):
        setup_distributed()


def test_a_rank_that_is_stopped_says_what_it_knows() -> None:
    """Where it stood and for whom it waited; or what it was about to raise, while it met the others over it."""
    stopped = ": the launcher stopped this rank. Look for a rank that ended before it."
    assert stopped_sentence(1, None) == f"rank 1{stopped}"
    positions = Positions(None, 1, 3, 0.0)
    positions.moved(Action.recv(("F", 1, 2), 5))
    positions.waits = ("layers.7", 2)
    where = "before F of stage 2, microbatch 5, waits for layers.7 from rank 2"
    assert stopped_sentence(1, positions) == f"rank 1, {where}{stopped}"
    positions.failure = RankLost("rank 2 (stage 2) went away", "rank 1 (stage 1)", "Look at its output")
    positions.moved("'the middle of a step' of step 9")
    assert stopped_sentence(1, positions) == str(positions.failure)
    positions.failure = KeyError("mine")
    assert stopped_sentence(1, positions) == "rank 1: KeyError: 'mine'"


def test_clocks_that_cannot_be_set_are_said_and_training_goes_on(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = load(directory).schedule
    computes = [[action for action in actions if action.computes] for actions in schedule.ranks]
    clocks = [[1410] * len(listed) for listed in computes]
    file = tmp_path / "clocks.json"
    file.write_text(json.dumps(clocks_document("p", schedule, clocks, 1.0, 1.0, [])))
    assert run(options(directory, clocks=file)) == 0
    said = capsys.readouterr()
    assert len(losses(said.out)) == 2
    assert "--clocks: all ranks share this process and its device. Training goes on" in said.err
    file.write_text("{}")
    assert run(options(directory, clocks=file)) == 2
    assert "these are no clocks. Write it with" in capsys.readouterr().err.replace("write", "Write")


def test_each_compute_is_announced_before_it_runs(directory: Path) -> None:
    trainer = Trainer(load(directory))
    seen: list[Action] = []
    trainer.ahead = seen.append
    trainer.train_step(handmade.batch(4))
    scheduled = [action for actions in load(directory).schedule.ranks for action in actions if action.computes]
    assert sorted(seen) == sorted(scheduled)
