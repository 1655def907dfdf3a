"""The compile-time benchmark: one real measurement of csc and of a rival, and what is made of the rows."""

from __future__ import annotations

import pytest

import csc
from benchmarks.compile_time.__main__ import CSC, RIVALS, SEARCHED, run, summary, tables
from benchmarks.compile_time.rivals import RIVALS as TRACERS
from tests.models import hf


def row(name: str, schedule: str = "1f1b", **more: float) -> dict:
    parts = {"seconds": 10.0, "capture": 4.0, "after": 6.0, "plan": 2.0, "emit": 0.5, "refreeze": 3.0, "rss_gb": 0.6}
    return {"name": name, "layers": 80, "ranks": 1024, "schedule": schedule, "lines": 20, "bytes": 1e6, **parts, **more}


def test_names_of_rivals_are_those_that_are_measured() -> None:
    assert tuple(TRACERS) == RIVALS


def test_summary_is_of_the_whole_model() -> None:
    rows = [row(CSC), row("torch.export", seconds=20.0), row(CSC, SEARCHED, plan=7.0), row(CSC, ranks=1, seconds=1.0)]
    found = summary(rows)
    assert found["seconds_70b"] == 10.0 and found["seconds_70b_over_torch_export"] == 0.5
    assert found["seconds_after_capture_70b"] == 6.0 and found["refreeze_seconds_70b"] == 3.0
    assert (found["plan_seconds_70b"], found["plan_auto_seconds_70b"]) == (2.0, 7.0)
    assert set(summary([row(CSC, layers=2)]).values()) == {None}
    assert [table.row_count for table in tables(rows)] == [2, 3]
    failed = {"name": "torch.export", "layers": 80, "ranks": 1024, "schedule": "1f1b", "failed": "not done after 1 s"}
    assert summary([row(CSC), failed])["seconds_70b_over_torch_export"] is None
    assert [table.row_count for table in tables([row(CSC), failed])] == [2, 1]


@pytest.mark.long
def test_two_layers_are_measured() -> None:
    rows = run((2,), (16,), 300, ())  # rivals: below
    assert [(each["name"], each["schedule"]) for each in rows] == [(CSC, "1f1b"), (CSC, SEARCHED)]
    assert not [each for each in rows if "failed" in each]
    own = rows[0]
    assert own["capture"] + own["after"] == pytest.approx(own["seconds"]) and own["lines"] > 10


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_rivals_trace_a_model(name: str) -> None:
    with csc.meta_init():
        model = hf.llava()
    TRACERS[name](model, hf.llava_batch(1))
