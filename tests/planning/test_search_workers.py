"""Several processes search: what they find is put together, and what one of them does not tell is searched here."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import csc
from csc.driver import mesh_search
from csc.driver.mesh_candidates import BestOfWorkers, FixedChoices, FoundMeshes, MeshChoice
from csc.driver.mesh_choice import choose
from csc.driver.mesh_search import MeshSearch, side_by_side, workers_here
from csc.driver.search_clock import SearchClock
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.launching import PATIENCE

Search = Callable[..., MeshChoice]


def soon() -> float:
    return 20.0


def test_each_runs_in_a_process_of_its_own() -> None:
    known = {"traced": 7}
    found = side_by_side(3, lambda number: (number, known["traced"], os.getpid()), soon)
    assert [each and each[:2] for each in found] == [(0, 7), (1, 7), (2, 7)]
    assert len({each[2] for each in found if each}) == 3 and found[0] and found[0][2] == os.getpid()


def test_large_answers_come_whole() -> None:
    assert [len(each or "") for each in side_by_side(2, lambda number: "a" * 5_000_000 * (number + 1), soon)] == [
        5_000_000, 10_000_000
    ]  # fmt: skip


def fails(number: int) -> Any:
    if number == 1:
        raise ValueError("no trace")
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3:
        return threading.Lock()  # cannot be pickled
    return number


def test_one_that_fails_tells_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert side_by_side(5, fails, soon) == [0, None, None, None, 4]
    assert "Traceback" not in capfd.readouterr().err


def test_one_that_hangs_is_ended() -> None:
    begun = time.monotonic()
    assert side_by_side(2, lambda number: time.sleep(1000 * number), lambda: 0.2) == [None, None]
    assert time.monotonic() - begun < PATIENCE


def test_none_is_left_when_this_one_fails() -> None:
    def fails_here(number: int) -> None:
        if number == 0:
            raise KeyboardInterrupt
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(2, fails_here, soon)
    assert not multiprocessing.active_children()


def test_no_more_processes_are_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    assert side_by_side(3, lambda number: number, soon) == [0, None, None]


def test_beside_threads_of_the_search_s_process() -> None:
    """Those of a notebook or of a progress bar, one of which forks."""
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    found: list[Any] = []
    searching = threading.Thread(target=lambda: found.append(side_by_side(2, lambda number: number, soon)))
    other.start()
    searching.start()
    searching.join()
    stop.set()
    other.join()
    assert found == [[0, 1]]


def test_a_worker_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def speaks(number: int) -> int:
        if number:
            warnings.warn("traced", stacklevel=1)
            logging.getLogger("csc").error("traced")
        return number

    assert side_by_side(2, speaks, soon) == [0, 1]
    assert capfd.readouterr() == ("", "") and not logging.root.manager.disable


def with_gradients() -> None:
    weight = torch.randn(256, 256, requires_grad=True)

    def gradient(number: int) -> float:
        weight.grad = None
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        return float(weight.grad.sum())

    first = gradient(0)
    assert side_by_side(2, gradient, soon) == [pytest.approx(first), pytest.approx(first)]


@pytest.mark.long
def test_autograd_goes_on_in_a_worker() -> None:
    """Where this process has computed backward; alone, as autograd refuses to where a process has used a device's
    threads, be they of another test.
    """
    asked = "from tests.planning.test_search_workers import with_gradients; with_gradients()"
    subprocess.run([sys.executable, "-c", asked], check=True, cwd=Path(__file__).parents[2])


def test_workers_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(mesh_search.sys, "platform", "linux")
    assert workers_here() == mesh_search.MOST
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert workers_here() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4})
    assert workers_here() == 2
    monkeypatch.setattr(mesh_search.devices, "current", lambda: torch.device("cuda", 0))
    assert workers_here() == 1


def test_the_best_is_heard_of() -> None:
    found = FoundMeshes(best=3.0, heard=BestOfWorkers())

    def told(number: int) -> float:
        if number:
            found.best = 2.0
        return found.hear()

    assert side_by_side(2, told, soon)[1] == 2.0 and found.hear() == 2.0
    assert FoundMeshes(best=1.0).hear() == 1.0


def test_the_clock_of_a_fork_goes_on() -> None:
    now = [100.0]
    clock = SearchClock(40.0, lambda: now[0])
    now[0] = 110.0
    assert clock.left == 30.0
    now[0] = 0.5  # of another process
    other = clock.of_fork()
    now[0] = 2.5
    assert other.left == 28.0 and other.over(0.29) and not other.over(0.31)


@pytest.fixture(scope="module")
def search(traces: Any) -> Search:
    model = csc.compile(
        MODELS["llama"](), example=BATCHES["llama"](4), cache=False, check=False, hardware="a100", mesh={"pp": 1}
    )

    def chosen(workers: int) -> MeshChoice:
        return choose(model, 4, None, 600.0, lambda text: None, FixedChoices(4, 1), workers)

    return chosen


@pytest.fixture(scope="module")
def both(search: Search) -> MeshChoice:
    """What two find."""
    return search(2)


def test_several_find_what_one_finds(search: Search, both: MeshChoice) -> None:
    alone = search(1)
    assert both.rows[0].seconds == alone.rows[0].seconds and both.memory == alone.memory
    assert both.left == alone.left == 0
    priced = {(row.mesh, row.microbatches): row.seconds for row in alone.rows}
    assert sum(priced.get((row.mesh, row.microbatches)) == row.seconds for row in both.rows) >= 3


def test_the_part_of_a_worker_that_fails_is_searched_here(
    search: Search, both: MeshChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: MeshSearch, parts: Any, number: int) -> FoundMeshes:
        if number:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return part(self, parts, number)

    part = mesh_search.MeshSearch._part
    monkeypatch.setattr(mesh_search.MeshSearch, "_part", failing)
    again = search(2)
    assert again.rows[0] == both.rows[0] and again.left == 0
    assert {row.mesh for row in again.rows} >= {row.mesh for row in both.rows[:3]}
