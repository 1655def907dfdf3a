"""Timelines as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Terms: a *process* (pid) is a timeline, a *thread* (tid) a rank of it, so that plan, baseline and measured run lie
one under the other. Phases: "M" names, "X" an event with its duration, "b" and "e" a message on its way, "s" and
"f" the arrow from the action that made a message to the one that takes it, "C" memory. Times are microseconds.
Source: "Trace Event Format" of the Chromium project.

    chrome_trace(timelines) -> {"traceEvents": [...], ...} for `json.dump`

It is a view: what reads a run back is `csc.simulation.timeline.from_json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from csc.simulation.timeline import Event, Timeline, Transfer

COLOURS = {  # names that chrome://tracing knows; Perfetto colours by the name's first word
    "F": "thread_state_running",
    "B": "thread_state_iowait",
    "W": "thread_state_runnable",
    "BW": "thread_state_uninterruptible",
    "REDUCE": "rail_load",
    "GATHER": "rail_response",
    "FREE": "grey",
    "SEND": "grey",
    "RECV": "grey",
}
INSIDE = 1e-3  # an arrow binds to the box that its end lies in, so it starts this far before the box ends

Record = dict[str, Any]


def chrome_trace(timelines: Sequence[Timeline]) -> Record:
    """The trace of these timelines, each a process of its own. Events are sorted by time, names come first."""
    names: list[Record] = []
    records: list[Record] = []
    flow = 1
    for pid, timeline in enumerate(timelines, 1):
        names += _names(pid, timeline)
        for events in timeline.ranks:
            records += (_box(pid, event) for event in events)
        for rank, curve in enumerate(timeline.memory):
            records += (_memory(pid, rank, time, size) for time, size in curve)
        by_action: dict[tuple[str, int, int], Event] = {
            (part.kind, part.stage, part.microbatch): event
            for events in timeline.ranks
            for event in events
            if event.action.computes
            for part in event.action.parts
        }
        for transfer in timeline.transfers:
            maker = by_action.get((transfer.kind, transfer.source, transfer.microbatch))
            taker = by_action.get((transfer.kind, transfer.destination, transfer.microbatch))
            records += _message(pid, flow, transfer)
            if maker is not None and taker is not None:
                records += _arrow(pid, flow, maker, taker)
            flow += 1
    records.sort(key=lambda record: record["ts"])
    return {"traceEvents": names + records, "displayTimeUnit": "ms"}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(pid: int, timeline: Timeline) -> Iterator[Record]:
    def named(what: str, tid: int, **args: Any) -> Record:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}

    yield named("process_name", 0, name=timeline.name)
    yield named("process_sort_index", 0, sort_index=pid)
    for rank in range(len(timeline.ranks)):
        yield named("thread_name", rank, name=f"rank {rank}")
        yield named("thread_sort_index", rank, sort_index=rank)


def _box(pid: int, event: Event) -> Record:
    action = event.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind,
        "cname": COLOURS[action.kind],
        "pid": pid,
        "tid": event.rank,
        "ts": _micro(event.start),
        "dur": round(_micro(event.end) - _micro(event.start), 3),
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _memory(pid: int, rank: int, time: float, size: float) -> Record:
    return {
        "ph": "C",
        "name": f"memory of rank {rank}",
        "pid": pid,
        "tid": rank,
        "ts": _micro(time),
        "args": {"bytes": size},
    }


def _message(pid: int, number: int, transfer: Transfer) -> Iterator[Record]:
    shared = {
        "name": f"{transfer.kind} {transfer.source}>{transfer.destination}",
        "cat": "message",
        "id": number,
        "pid": pid,
        "tid": transfer.source_rank,
    }
    yield {**shared, "ph": "b", "ts": _micro(transfer.start), "args": _about(transfer)}
    yield {**shared, "ph": "e", "ts": _micro(transfer.end), "args": {}}


def _about(transfer: Transfer) -> Record:
    return {
        "microbatch": transfer.microbatch,
        "bytes": transfer.size,
        "to": f"rank {transfer.destination_rank}",
    }


def _arrow(pid: int, number: int, maker: Event, taker: Event) -> Iterator[Record]:
    shared = {"name": "message", "cat": "flow", "id": number, "pid": pid}
    leaves = max(_micro(maker.start), _micro(maker.end) - INSIDE)
    yield {**shared, "ph": "s", "tid": maker.rank, "ts": leaves}
    yield {**shared, "ph": "f", "bp": "e", "tid": taker.rank, "ts": max(_micro(taker.start), leaves)}
