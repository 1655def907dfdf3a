"""What the end of a step waited for: the actions and messages that follow each other without a gap up to it.

Terms: see csc.simulation.waits. From the last end back: an action began when the rank had ended the one before it, or
when what it waited for had arrived; a message left when its sender had made it. All seconds of the step are on this
path, either a rank's work, a message, or a wait for parameters that are gathered. Where there are several such paths,
one of them.

    longest_path(schedule, timeline) -> Path
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from csc.ir.schedule import Schedule
from csc.simulation.timeline import Timeline
from csc.simulation.waits import span_before, spans


@dataclass(frozen=True)
class Path:
    """Seconds of the step: work by rank, messages on their way, and parameters that were waited for."""

    work: Mapping[int, float]
    messages: float
    gathers: float = 0.0


def longest_path(schedule: Schedule, timeline: Timeline) -> Path:
    """Of the run that the simulator made of the schedule."""
    doing = spans(schedule, timeline)
    work: dict[int, float] = {}
    messages = gathers = 0.0
    now = timeline.end
    rank = next((r for r, events in enumerate(timeline.ranks) if events and events[-1].end == now), -1)
    while rank >= 0 and now > timeline.start:
        span = span_before(doing[rank], now)
        if span.waits:
            messages += now - span.given
            rank, now = span.sender, span.given
        elif span.gathers:
            gathers += span.end - span.start
            now = span.start
        else:
            work[rank] = work.get(rank, 0.0) + span.end - span.start
            now = span.start
    return Path(work, messages, gathers)
