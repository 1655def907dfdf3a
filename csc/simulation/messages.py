"""Bytes of messages that wait: with the receiver for their turn, with the sender to be taken, within a rank.

Terms: see csc.ir.schedule and csc.simulation.timeline. A receiver *posts* a message when the compute ahead of its RECV
starts: from then on it has room for it, until the compute that takes it starts, which counts it in what it saves or
works with. A sender keeps what it sent until it was moved, which is not before it was posted; or, where the network is
`answered` (csc.simulation.pipeline.Network), until an answer proves that it came, or the step ends.

    peaks(pipeline, schedule, timeline) -> per rank the most bytes alive at once, these included
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from csc.ir.schedule import Message, Schedule
from csc.simulation.pipeline import Pipeline
from csc.simulation.timeline import Event, Timeline

Span = tuple[int, float, float, float]  # rank, from, until, bytes


def peaks(pipeline: Pipeline, schedule: Schedule, timeline: Timeline) -> list[float]:
    """Of a run that the simulator made of the schedule."""
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
    for rank, begin, end, size in _spans(pipeline, schedule, timeline):
        if end > begin and size:
            spans[rank] += [(begin, size), (end, -size)]
    return [_peak(curve, changes) for curve, changes in zip(timeline.memory, spans)]


def _peak(curve: Sequence[tuple[float, float]], changes: Sequence[tuple[float, float]]) -> float:
    """The most of a curve and of changes on top of it; at one time what ends goes first."""
    steps = [(time, after - before) for (_, before), (time, after) in pairwise(curve)]
    now = most = curve[0][1] if curve else 0.0
    for _, change in sorted([*steps, *changes], key=lambda step: (step[0], step[1] > 0)):
        now += change
        most = max(most, now)
    return most


def _spans(pipeline: Pipeline, schedule: Schedule, timeline: Timeline) -> Iterator[Span]:
    events = _events(timeline)
    posted = _posted(schedule, timeline)
    home, count = schedule.placement, schedule.microbatches
    for channel in pipeline.messages:
        kind, source, target = channel
        if source not in home or target not in home:
            continue
        answered = kind == "F" and ("B", target, source) in pipeline.messages
        link = pipeline.network.link(home[source], home[target])
        for microbatch in range(count):
            made, taken = events.get((kind, source, microbatch)), events.get((kind, target, microbatch))
            if made is None or taken is None:
                continue
            size = pipeline.size(channel, microbatch)
            if home[source] == home[target]:
                yield home[source], made.end, taken.start, size
                continue
            ready = posted.get((channel, microbatch), made.end)
            yield home[target], ready, taken.start, size
            moved = max(ready, made.end) + link.seconds(size)
            if pipeline.network.answered:
                answer = events.get(("B", source, microbatch)) if answered else None
                moved = timeline.makespan if answer is None else answer.start
            yield home[source], made.end, moved, size


def _events(timeline: Timeline) -> dict[tuple[str, int, int], Event]:
    """The compute that makes or takes the messages of a kind, by kind, stage and microbatch."""
    found = {}
    for events in timeline.ranks:
        for event in events:
            if event.action.kind in ("F", "B", "BW"):
                found[event.action.kind[0], event.action.stage, event.action.microbatch] = event
    return found


def _posted(schedule: Schedule, timeline: Timeline) -> dict[tuple[Message, int], float]:
    """When a rank has room for what it receives."""
    found: dict[tuple[Message, int], float] = {}
    for rank, actions in enumerate(schedule.ranks):
        computes = iter(event for event in timeline.ranks[rank] if event.action.computes)
        start = 0.0
        for action in actions:
            if action.computes:
                start = next(computes).start
            elif action.kind == "RECV":
                found[action.channel, action.microbatch] = start
    return found
