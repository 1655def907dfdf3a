"""How ranks are started, and what is said when the wrong number of them was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from csc.errors import InputError
from csc.runtime import launch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ranks", "per_node", "nodes", "here"),
    [(3, 8, 1, 3), (8, 8, 1, 8), (1024, 8, 128, 8), (12, 8, 2, 6), (7, 4, 7, 1), (1, 1, 1, 1)],
)
def test_nodes_times_processes_are_the_ranks(ranks: int, per_node: int, nodes: int, here: int) -> None:
    said = launch.command(ranks, per_node, "train.py")
    assert nodes * here == ranks
    if nodes == 1:
        assert said == f"torchrun --nproc-per-node {here} train.py"
    else:
        assert said.startswith(f"on each of {nodes} nodes: torchrun --nnodes {nodes} --nproc-per-node {here} --rdzv-")


def test_world_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "error.json"
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": "8", launch.ERROR_FILE: str(place)}.items():
        monkeypatch.setenv(name, value)
    launch.check_world(16, 16, "dp=16")
    assert not place.exists()
    with pytest.raises(InputError, match=r"16 processes .* \(2 nodes x 8\) and the mesh has 12 ranks \(pp=12\)"):
        launch.check_world(16, 12, "pp=12")
    message = json.loads(place.read_text())["message"]  # in the format that torchrun overrides error codes in
    assert (
        "the mesh has 12 ranks" in message["message"]
        and "the mesh has 12 ranks" in message["extraInfo"]["py_callstack"]
    )


def test_other_ranks_leave_the_word_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError):
        launch.check_world(3, 2, "pp=2")
    assert waited == [launch.PATIENCE]


SCRIPT = """
import csc
csc.compile(lambda: None)
def helper():
    {call}
helper()
"""


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.long_cases("1")
def test_an_error_of_csc_that_nobody_catches_is_short(tmp_path: Path, debug: str) -> None:
    """The user's lines and the sentence, and no cause; torchrun finds the sentence, too."""
    script, place = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text(SCRIPT.format(call="csc.compile(None.__class__, bf16=True)"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), launch.ERROR_FILE: str(place), launch.DEBUG: debug}
    ended = subprocess.run([sys.executable, str(script)], env=environment, text=True, capture_output=True, timeout=120)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("csc.errors.InputError: options: there is no option bf16. Use precision='bf16'")
    assert sum(str(script) in line for line in lines) == 2
    assert ("driver/options.py" in ended.stderr) == (debug == "1")
    assert json.loads(place.read_text())["message"]["message"] in lines[-1]


def test_other_errors_are_as_before(tmp_path: Path) -> None:
    script, place = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text(SCRIPT.format(call="int('x')"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), launch.ERROR_FILE: str(place)}
    ended = subprocess.run([sys.executable, str(script)], env=environment, text=True, capture_output=True, timeout=120)
    assert ended.stderr.rstrip().endswith("ValueError: invalid literal for int() with base 10: 'x'")
    assert not place.exists()
