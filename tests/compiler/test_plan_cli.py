"""`csc plan`, as a user runs it: what limits the step, alternatives, changes; with schedules and stages given, too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from csc.simulation.idle import CAUSES
from tests.compiler.test_cli import TARGET, Run, one_capture, run  # noqa: F401  (fixtures)

pytestmark = pytest.mark.usefixtures("traces")

SHARED = (TARGET, "--pp", "3", "--hardware", "a100", "--microbatches", "4", "--freeze", "vision_tower")

PATIENT = ("--limit", "1000")  # however busy the machine is, no row is left out


def found_by(run: Run, *options: object) -> dict[str, Any]:  # noqa: F811
    done = run("plan", *SHARED, *PATIENT, *options, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def named(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (row,) = [row for row in rows if row["name"] == name]
    return row


@pytest.mark.slow
def test_plan(run: Run, tmp_path: Path) -> None:  # noqa: F811
    found = found_by(run, "--svg", tmp_path / "plan.svg", "--page", tmp_path / "plan.html")
    limits = found["limits"]
    assert limits["bound_term"]
    for row in limits["idle"]:
        assert sum(row["causes"].values()) == pytest.approx(found["makespan"] - row["work"])
        assert list(row["causes"]) == list(CAUSES) and min(row["causes"].values()) >= 0
    assert limits["idle"][limits["busiest_rank"]]["work"] == max(row["work"] for row in limits["idle"])
    path = limits["longest_path"]
    assert sum(path["work"].values()) + path["messages"] == pytest.approx(found["makespan"])
    this = named(found["alternatives"], "auto, this plan")
    assert this["makespan"] == found["makespan"] and this["speedup"] == 1
    assert this is found["alternatives"][0], "what csc has chosen is not below what it could have chosen"
    times = [row["makespan"] or math.inf for row in found["alternatives"]]
    assert times == sorted(times) and len(times) > 10 and not found["left"]
    whole = [row["activations"] + row["parameters"] for row in found["memory"]]
    assert len(whole) == len(limits["idle"]) and min(whole) > 0, "memory by kind, of each rank"
    twice, wider = (named(found["changes"], name) for name in ("8 microbatches", "6 pipeline ranks"))
    assert twice["speedup"] == pytest.approx(2 * found["makespan"] / twice["makespan"])
    assert wider["makespan"] < found["makespan"]
    assert named(found["changes"], "freeze language_model")["makespan"] < found["makespan"]
    again = named(found["changes"], "recompute full")
    assert again["makespan"] > found["makespan"] and again["peak_memory"] < this["peak_memory"]
    assert named(found["changes"], "10 GB more memory")["makespan"] <= found["makespan"]
    assert named(found["changes"], "messages that take no time, same order")["makespan"] <= found["makespan"]
    assert "<svg" in (tmp_path / "plan.svg").read_text() and (tmp_path / "plan.html").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.long
def test_rows_are_what_compiling_so_gives(run: Run) -> None:  # noqa: F811
    """A change is the plan of the changed model: the same as `csc simulate` with those options."""
    found = found_by(run, "--schedule", "1f1b")
    for name, options in (
        ("recompute full", ("--recompute", "full")),
        ("freeze language_model", ("--freeze", "language_model")),
        ("functions compiled (fuse)", ("--fuse",)),
    ):
        done = run("simulate", *SHARED, "--schedule", "1f1b", *options, "--baseline", "none", "--json")
        assert named(found["changes"], name)["makespan"] == pytest.approx(json.loads(done.out)["makespan"])


@pytest.mark.long
@pytest.mark.slow
def test_a_schedule_that_was_given(run: Run, tmp_path: Path) -> None:  # noqa: F811
    written = tmp_path / "program"
    assert run("compile", TARGET, "--mesh", "pp=3", *SHARED[3:], "--schedule", "gpipe", "-o", written).code == 0
    found = found_by(run, "--schedule", written / "schedule.txt")
    assert found["schedule"] == "gpipe" and found["with_auto"] is True
    assert named(found["alternatives"], "gpipe, this plan")["makespan"] == found["makespan"]
    assert named(found["changes"], "schedule auto, nothing else")["makespan"] < found["makespan"]


@pytest.mark.slow
def test_stages_that_were_given_stay(run: Run) -> None:  # noqa: F811
    cuts = ("--cut", "model.language_model.layers.0", "--cut", "model.language_model.layers.2")
    found = found_by(run, *cuts, "--schedule", "1f1b")
    this = named(found["alternatives"], "1f1b, this plan")
    assert this["stages"] == "given" and this["makespan"] == found["makespan"]
    assert named(found["alternatives"], "gpipe")["stages"] == "given"
    free = [row for row in found["alternatives"] if row["stages"] == "planned"]
    assert [row["name"] for row in free] == ["auto"] and free[0]["makespan"] < found["makespan"]
    assert not [row for row in found["changes"] if "ranks" in row["name"] or "on a rank" in row["name"]]


@pytest.mark.long
def test_more_memory_runs_less_again(run: Run) -> None:  # noqa: F811
    """With recompute="auto" more memory is another compilation: the row is the plan without anything run again."""
    found = found_by(run, "--recompute", "auto", "--memory", "880KiB")
    more = named(found["changes"], "10 GB more memory")
    assert more["speedup"] > 1.01
    free = found_by(run, "--recompute", "none", "--limit", "0")
    assert more["makespan"] == pytest.approx(free["makespan"], rel=0.01)


@pytest.mark.long
@pytest.mark.slow
def test_the_tables(run: Run) -> None:  # noqa: F811
    done = run("plan", *SHARED, *PATIENT, "--memory", "1100KiB")
    assert done.code == 0, done.err
    shown = ("imbalance", "longest path", "lower bound", "alternatives, memory limit 1.07 MiB", "a change would bring")
    assert all(part in done.out for part in shown)
    assert "no plan for gpipe: nothing fits" in done.out
    short = run("plan", *SHARED, "--limit", "0")
    assert (
        short.code == 0 and "--limit 0 left no time for: gpipe, 1f1b" in short.out and "change would" not in short.out
    )


@pytest.mark.slow
def test_one_rank(run: Run) -> None:  # noqa: F811
    done = run("plan", TARGET, "--pp", "1", "--limit", "3")
    assert done.code == 0, done.err
    assert "hardly idle" in done.out and "-0.0%" not in done.out
