"""Chrome traces: well formed, whole, and in microseconds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from csc.ir.schedule import Action, Schedule
from csc.simulation.page import chrome_trace
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork
from csc.simulation.simulate import simulate
from csc.simulation.timeline import Event, Timeline

from .orders import chain, gpipe, one_f_one_b, runs

STAGE = StageWork(0.010, 0.020, 0.005, saved=100.0, stashed=20.0, state=7.0)
PIPELINE = Pipeline((STAGE,) * 3, chain(3, 1e6), Network(Link(1e-4, 1e9)))
TIMELINES = [
    simulate(PIPELINE, one_f_one_b(PIPELINE, 5), name="plan"),
    simulate(PIPELINE, gpipe(PIPELINE, 5), name='baseline "gpipe"'),
]


def check(trace: dict[str, Any], timelines: list[Timeline]) -> None:
    records = trace["traceEvents"]
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    timed = [record for record in records if record["ph"] != "M"]
    assert [record["ts"] for record in timed] == sorted(record["ts"] for record in timed)
    names = {(r["pid"], r["name"]): r["args"] for r in records if r["name"].startswith("process_")}
    assert {pid: names[pid, "process_name"]["name"] for pid, _ in names} == {
        pid: timeline.name for pid, timeline in enumerate(timelines, 1)
    }
    threads = {(r["pid"], r["tid"]) for r in records if r["name"] == "thread_name"}
    assert {(r["pid"], r["tid"]) for r in timed} <= threads
    for first, second, category in (("b", "e", "message"), ("s", "f", "flow")):
        ids = Counter(r["id"] for r in timed if r["ph"] == first)
        assert ids == Counter(r["id"] for r in timed if r["ph"] == second)
        assert not ids or max(ids.values()) == 1
        place = {(r["ph"], r["id"]): (i, r["pid"]) for i, r in enumerate(timed) if r.get("cat") == category}
        for number in ids:
            assert place[first, number] < place[second, number]
            assert place[first, number][1] == place[second, number][1]


def test_a_plan_over_its_baseline() -> None:
    trace = chrome_trace(TIMELINES)
    check(trace, TIMELINES)
    records = trace["traceEvents"]
    boxes = [r for r in records if r["ph"] == "X"]
    assert Counter(r["cat"] for r in boxes) == {"F": 30, "B": 30, "W": 30}
    assert len({(r["pid"], r["tid"]) for r in boxes}) == 6
    for pid, timeline in enumerate(TIMELINES, 1):
        for event in (event for events in timeline.ranks for event in events):
            (box,) = [b for b in boxes if (b["pid"], b["name"]) == (pid, str(event.action))]
            assert (box["tid"], box["ts"]) == (event.rank, pytest.approx(event.start * 1e6, abs=1e-3))
            assert box["dur"] == pytest.approx(event.seconds * 1e6, abs=2e-3)
            assert box["args"] == {"stage": event.action.stage, "microbatch": event.action.microbatch}
        for rank, curve in enumerate(timeline.memory):
            drawn = [r["args"]["bytes"] for r in records if (r["name"], r["pid"]) == (f"memory of rank {rank}", pid)]
            assert drawn == [size for _, size in curve]


def test_messages_and_their_arrows() -> None:
    """One message and one arrow for each of 2 x 2 x 5 sends; each end of an arrow lies in the box that it binds to."""
    timeline = TIMELINES[0]
    records = chrome_trace([timeline])["traceEvents"]
    boxes = {(r["tid"], r["name"]): r for r in records if r["ph"] == "X"}
    spans = {r["id"]: r for r in records if r["ph"] == "b"}
    ends = {r["id"]: r for r in records if r["ph"] == "e"}
    assert len(spans) == len(timeline.transfers) == 20
    for number, transfer in enumerate(timeline.transfers, 1):
        name = f"{transfer.kind} {transfer.source}>{transfer.destination}"
        assert spans[number]["name"] == ends[number]["name"] == name
        assert spans[number]["args"]["microbatch"] == transfer.microbatch and spans[number]["args"]["bytes"] == 1e6
        assert ends[number]["ts"] - spans[number]["ts"] == pytest.approx(1100.0)
        for phase, stage, rank in (
            ("s", transfer.source, transfer.source_rank),
            ("f", transfer.destination, transfer.destination_rank),
        ):
            (end,) = [r for r in records if r["ph"] == phase and r["id"] == number]
            box = boxes[rank, f"{transfer.kind} {stage} {transfer.microbatch}"]
            assert end["tid"] == rank and box["ts"] <= end["ts"] < box["ts"] + box["dur"]


@settings(max_examples=40, deadline=None)
@given(runs())
def test_any_run_is_well_formed(run: tuple[Pipeline, Schedule, int]) -> None:
    timeline = simulate(run[0], run[1])
    check(chrome_trace([timeline]), [timeline])


def test_a_run_that_lacks_an_action_keeps_the_message_but_draws_no_arrow() -> None:
    """As a measured run that was cut short may; it also has REDUCE and waits."""
    timeline = TIMELINES[0]
    waits = (Event(0, Action.recv(("B", 1, 0), 0), 0.0, 1.0), Event(0, Action("REDUCE"), 1.0, 2.0))
    cut = replace(timeline, ranks=(waits, *timeline.ranks[1:]))
    trace = chrome_trace([cut])
    check(trace, [cut])
    assert sum(r["ph"] == "b" for r in trace["traceEvents"]) == 20
    assert sum(r["ph"] == "s" for r in trace["traceEvents"]) == 10
    assert {r["name"] for r in trace["traceEvents"] if r["ph"] == "X" and r["tid"] == 0} == {"RECV B 1>0 0", "REDUCE"}


def test_no_timelines() -> None:
    assert chrome_trace([])["traceEvents"] == []
