"""Kills of real processes: what the benchmark makes of a job."""

from __future__ import annotations

import signal
from typing import Any

import pytest

import csc
from benchmarks.faults import processes
from benchmarks.faults.processes import STEPS, Fault, Job, Setting, Tally, p95
from tests import launching

LOSSES = [3.0, 2.0, 1.5, 1.2, 1.0]


def told(losses: list[float]) -> dict[str, Any]:
    recovery = {"seen": 10.25, "began": 10.5, "done": 11.0, "step": 3, "again": [4, 5]}
    return {"losses": losses, "dead": {"1": 10.25}, "recoveries": [recovery]}


def job(codes: list[int | None], losses: list[float], errors: dict[int, str] | None = None) -> Job:
    killed, finished = {1: {"time": 10.0, "step": 2}}, {1: {"step": 3, "finished": [3, 4]}}
    setting = Setting("dp=2", csc.Survive(1, copies=1))
    return Job(setting, [Fault(1, 2, "F 0 0")], codes, {0: told(losses)}, killed, finished, errors or {})


def test_what_is_counted() -> None:
    tally = Tally()
    tally.add(job([0, -signal.SIGKILL], LOSSES), LOSSES)
    assert (tally.tried, tally.lost_steps, tally.wrong, tally.hangs, tally.repeated) == (1, 0, 0, 0, 1)
    assert (tally.detect, tally.recover, tally.failed) == ([0.25], [0.75], [])
    tally.add(job([0, -signal.SIGKILL], [*LOSSES[:-1], 1.001]), LOSSES)
    assert (tally.wrong, tally.lost_steps) == (1, 0)
    tally.add(job([3, -signal.SIGKILL], LOSSES[:2], {0: "rank 1 died"}), LOSSES)
    assert tally.lost_steps == STEPS - 2 and "rank 1 died" in tally.failed[0]
    tally.add(job([None, -signal.SIGKILL], LOSSES[:2]), LOSSES)
    assert tally.hangs == 1 and len(tally.failed) == 2
    assert (p95([]), p95([3.0, 1.0, 2.0])) == (None, 3.0)


def kills() -> None:
    """In a process that has no threads yet: it forks."""
    found = processes.measured(2, 1, [Setting("dp=3", csc.Survive(2, copies=1))])
    assert found["faults_tried"] == 2 and not found["frozen_without_a_sentence"], found
    assert not any(found[name] for name in ("lost_steps", "wrong_losses", "hangs")), found
    assert found["microbatches_repeated_max"] <= 1, found


@pytest.mark.gloo
@pytest.mark.long
def test_two_kills_and_a_rank_that_is_stopped() -> None:
    launching.alone(kills)
