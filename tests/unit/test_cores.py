"""Cores that this process may keep busy: those it may run on, and its container's share of the machine's time."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from csc import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of 16 cores, and a folder for what the system says of the container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for name in ("QUOTA", "QUOTA_1", "PERIOD_1"):
        monkeypatch.setattr(cores, name, tmp_path / name)
    return tmp_path


def test_all_without_a_limit(machine: Path) -> None:
    assert cores.here() == 16


@pytest.mark.parametrize(
    "told, expected",
    [("max 100000", 16), ("200000 100000", 2), ("250000 100000", 3), ("10000 100000", 1), ("9000000 100000", 16)],
)
def test_a_share_of_the_machines_time(machine: Path, told: str, expected: int) -> None:
    (machine / "QUOTA").write_text(told + "\n")
    assert cores.here() == expected


@pytest.mark.parametrize("quota, expected", [("-1", 16), ("300000", 3), ("0", 16)])
def test_a_share_as_older_systems_tell_it(machine: Path, quota: str, expected: int) -> None:
    (machine / "QUOTA_1").write_text(quota + "\n")
    (machine / "PERIOD_1").write_text("100000\n")
    assert cores.here() == expected


@pytest.mark.parametrize("told", ["", "many", "1 2 3", "100000 0"])
def test_what_cannot_be_read_is_no_limit(machine: Path, told: str) -> None:
    (machine / "QUOTA").write_text(told)
    assert cores.here() == 16


def test_a_process_that_is_started_has_one_thread_whatever_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cores.THREADS:
        monkeypatch.setenv(name, "7")
    assert all(os.environ[name] == "7" for name in cores.THREADS)
    asked = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    assert subprocess.run(asked, env=cores.environment(), capture_output=True, text=True).stdout == "1\n"
    assert cores.environment(3)["OMP_NUM_THREADS"] == "3"


def test_examples_and_benchmarks_bound_the_threads_of_what_they_start() -> None:
    root = Path(__file__).parents[2]
    started = 0
    for file in sorted([*root.glob("examples/**/*.py"), *root.glob("benchmarks/**/*.py")]):
        text = file.read_text()
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("subprocess.run", "subprocess.Popen"):
                started += 1
                place = f"{file.relative_to(root)}:{call.lineno}"
                assert any(keyword.arg == "env" for keyword in call.keywords), f"{place}: env=cores.environment()"
                assert "cores.environment(" in text, f"{place}: env=cores.environment()"
    assert started > 5
