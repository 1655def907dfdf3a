"""Functions compiled in processes beside this one: who makes what, and what happens when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from csc.runtime import compile_pool
from csc.runtime.compile_pool import WorkersAhead
from csc.runtime.compiled_function import BeingMadeError, FunctionOrder, TorchState, code
from tests.launching import PATIENCE


def order(name: str, folder: Path) -> FunctionOrder:
    """Of a file that has been edited since: no worker makes it."""
    file = folder / "layer.py"
    file.write_text("def forward(x):\n    return x + 1\n")
    layouts = [["float32", "cpu", [2], [1]]]
    return FunctionOrder(str(file), name, code("def forward(x):\n    return x\n"), "key", [None], layouts, str(folder))


@pytest.fixture
def orders(tmp_path: Path) -> list[FunctionOrder]:
    return [order(f"forward_{number}", tmp_path) for number in range(6)]


def test_what_no_worker_makes_is_made_here(orders: list[FunctionOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that cannot be started, that die at once, and none at all."""
    for program in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(compile_pool.sys, "executable", program)
        for workers in (0, 2):
            had: list[FunctionOrder] = []
            compile_pool.make_side_by_side(orders, lambda one, _: had.append(one), workers)  # noqa: B023
            assert sorted(one.name for one in had) == sorted(one.name for one in orders)


def test_what_others_are_at_is_turned_to_last(orders: list[FunctionOrder]) -> None:
    """Another rank's process makes it: this one makes the rest first, and then waits."""
    had: list[tuple[str, bool]] = []

    def here(one: FunctionOrder, wait: bool) -> None:
        if one.name == "forward_0" and not wait:
            raise BeingMadeError
        had.append((one.name, wait))

    compile_pool.make_side_by_side(orders, here, 0)
    assert had[-1] == ("forward_0", True) and len(had) == 6


def test_a_worker_says_why_it_made_nothing_and_ends_with_its_input(orders: list[FunctionOrder]) -> None:
    worker = compile_pool.CompileWorker()
    for one in orders[:2]:
        assert "layer.py has changed" in worker.make(one)
    worker.close()
    assert worker._process.returncode == -signal.SIGKILL


def test_workers_that_are_started_ahead_are_taken_while_they_are_there(
    orders: list[FunctionOrder], tmp_path: Path
) -> None:  # fmt: skip
    """One that has ended is left out; when there is none any more a new one is started; none outlives its object."""
    ahead = WorkersAhead()
    ahead.start(1, tmp_path)
    ahead.start(2, tmp_path)
    first, second = ahead._workers
    first._process.kill()
    first._process.wait()
    assert ahead.take() is second
    third = ahead.take()
    for worker in (second, third):
        assert "layer.py has changed" in worker.make(orders[0])
        worker.close()
    ahead.start(1, tmp_path)
    (last,) = ahead._workers
    del ahead
    assert not last.is_there


def test_a_worker_that_nobody_takes_ends_by_itself(tmp_path: Path) -> None:
    text = "from csc.runtime import compile_worker; compile_worker.IDLE = .1; compile_worker.main()"
    lines = json.dumps({"path": sys.path, "torch": asdict(TorchState.now()), "ahead": str(tmp_path / "nowhere")})
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(lines + "\n")
    process.stdin.flush()
    assert process.wait(timeout=PATIENCE) == 1
    process.stdin.close()


def test_a_worker_that_is_killed_is_missed(orders: list[FunctionOrder]) -> None:
    worker = compile_pool.CompileWorker()
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(compile_pool.WorkerGoneError):
        worker.make(orders[0])
        worker.make(orders[1])
    worker.close()


def test_workers_share_the_cores_with_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool.os, "sched_getaffinity", lambda _: set(range(8)))
    assert compile_pool.worker_count() == 7
    for ranks, workers in ((2, 3), (8, 0), (16, -1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert compile_pool.worker_count() == workers


def test_a_worker_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    """However that ends: here it is killed."""
    text = (
        "from csc.runtime.compile_pool import CompileWorker\nimport time\n"
        "print(CompileWorker()._process.pid, flush=True)\ntime.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if not Path(f"/proc/{worker}").exists() or Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":
            return
        threading.Event().wait(0.05)
    pytest.fail("the worker lives on")


def test_switches_are_those_of_who_asks() -> None:
    state = TorchState.now()
    state.set()
    assert TorchState.now() == state
    with torch.backends.mkldnn.flags(enabled=False):
        without = TorchState.now()
        state.set()
        assert TorchState.now() == state != without
