"""The benchmark of failures and jitter: its replays and its reference for readiness, on cases known by hand."""

from __future__ import annotations

import csv

import pytest

from benchmarks.faults.oobleck import DATA, cells
from benchmarks.faults.readiness import readiness
from benchmarks.faults.rrfp import blocking, pipeline
from csc.planning.schedules import SCHEDULES
from csc.simulation.simulate import level, makespan


def test_traces_are_replayed() -> None:
    """Ideal: one node of 30 goes each ten minutes, 15 times; the average of the throughputs of 30 to 16 nodes."""
    found = {(cell.model, cell.trace): cell for cell in cells(3.0)}
    assert len(found) == 35 and all(cell.csc < cell.ideal for cell in found.values())
    large = found["GPT-3-6.7B", "10m"]
    assert large.ideal == pytest.approx(4.35, abs=0.01) and large.changes == 14
    lost = 14 * (3.0 + 10 / large.ideal) / 9018
    assert large.over_ideal == pytest.approx(1 - lost, abs=0.001)
    none = {(cell.model, cell.trace): cell for cell in cells(0.0)}
    assert all(none[key].csc > cell.csc for key, cell in found.items())


def test_readiness_takes_what_is_there() -> None:
    numbers = pipeline(4, 0.1)
    calm = level("J0")
    assert readiness(pipeline(1), 5, [5.0], calm) == pytest.approx(5 * 0.06)
    alone = readiness(numbers, 1, [1.0] * 4, calm)
    assert alone == pytest.approx(4 * 0.02 + 4 * 0.02 + 0.02 + 6 * 0.006)
    roomy, tight = (readiness(numbers, 16, [most] * 4, calm) for most in (16.0, 4.0))
    assert 16 * 0.06 <= roomy <= tight
    assert readiness(numbers, 16, [0.5] * 4, calm) == float("inf")
    assert readiness(numbers, 16, [16.0] * 4, level("J3")) > roomy


def test_messages_that_block_take_longer() -> None:
    numbers = pipeline(4)
    schedule = SCHEDULES["1f1b"](numbers, range(4), 16)
    assert blocking(numbers, schedule, level("J0")) > makespan(numbers, schedule)
    assert blocking(numbers, schedule, level("J3")) > blocking(numbers, schedule, level("J1"))


def test_published_rows_are_whole() -> None:
    with (DATA / "rrfp.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20 and all(float(row["1f1b"]) > float(row["rrfp"]) > float(row["rrfp_w"]) for row in rows)
