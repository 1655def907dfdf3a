"""What every rank does at every moment of a simulated run: it computes, or waits for one message.

Terms: a message is *given* when its sender reaches the SEND; from then until it arrives it is *on its way*, queued
behind others of its link or moving. A *wait* is a RECV that the rank reaches before the arrival. A *gather* here is
the time until a stage's parameters have come, in which the rank could have begun. A *span* is a compute, a wait or a
gather that takes time: the spans of a rank follow each other without a gap until its last action.

    spans(schedule, timeline) -> [[Span, ...] of each rank]
    span_before(spans, time) -> the one that ends at that time
    on_their_way(spans) -> {(rank, number of a wait): [(start, end), ...]}    when it comes down to a moving message

The timeline is one that csc.simulation.simulate made of the schedule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from csc.ir.schedule import Action, Schedule
from csc.simulation.timeline import Timeline

Spans = list[list["Span"]]
Key = tuple[int, int]  # the rank of a span, and its number among the spans of that rank
Stretch = tuple[float, float]  # from when to when
COMPUTE, GATHER = -1, -2  # in place of a sender


@dataclass(frozen=True)
class Span:
    """start to end, of the action at `position` in its rank's list. sender, given: of a wait; else sender is COMPUTE or
    GATHER.
    """

    position: int
    action: Action
    start: float
    end: float
    sender: int = COMPUTE
    given: float = 0.0

    @property
    def waits(self) -> bool:
        return self.sender >= 0

    @property
    def gathers(self) -> bool:
        return self.sender == GATHER


def spans(schedule: Schedule, timeline: Timeline) -> Spans:
    """What each rank does from its first action to its last, in order."""
    arrivals = {((t.kind, t.source, t.destination), t.microbatch): (t.end, t.source_rank) for t in timeline.transfers}
    given: dict[object, float] = {}
    found: Spans = []
    for actions, events in zip(schedule.ranks, timeline.ranks):
        own: list[Span] = []
        now, coming = 0.0, iter(events)
        for position, action in enumerate(actions):
            if action.kind == "RECV":
                end, sender = arrivals[action.channel, action.microbatch]
                if end > now:
                    own.append(Span(position, action, now, end, sender))
                    now = end
            elif action.kind == "SEND":
                given[action.channel, action.microbatch] = now
            elif action.computes:
                event = next(coming)
                if event.start > now:
                    own.append(Span(position, action, now, event.start, GATHER))
                if event.end > event.start:
                    own.append(Span(position, action, event.start, event.end))
                now = event.end
        found.append(own)
    return [[_with_given(span, given) for span in own] for own in found]


def _with_given(span: Span, given: dict[object, float]) -> Span:
    if not span.waits:
        return span
    action = span.action
    return Span(
        span.position, action, span.start, span.end, span.sender, given[action.channel, action.microbatch]
    )  # fmt: skip


def span_before(own: Sequence[Span], time: float) -> Span:
    """The span of one rank that ends at `time`, where there is one."""
    return own[bisect_left(own, time, key=lambda span: span.end)]


def on_their_way(found: Spans) -> dict[Key, list[Stretch]]:
    """For every wait the stretches in which the message that it comes down to is on its way; in the others a rank
    computes that message.

    Before the message of a wait is given, its sender computes, or waits itself: then for what its own wait comes down
    to. There is no circle, as ranks that wait for each other at one moment would do so for ever. What a wait depends on
    ends no later than it does, so waits are looked at by their ends.
    """
    waits = [(rank, i) for rank, own in enumerate(found) for i, span in enumerate(own) if span.waits]
    known: dict[Key, list[Stretch]] = {}
    for key in sorted(waits, key=lambda key: found[key[0]][key[1]].end):
        open_ = [key]  # a message that takes no time ends two waits at once, in whatever order
        while open_:
            rank, i = open_[-1]
            span = found[rank][i]
            needed = [(span.sender, n) for n in _meanwhile(found[span.sender], span)]
            missing = [other for other in needed if other not in known]
            if missing:
                open_ += missing
            else:
                inside = [stretch for other in needed for stretch in known[other]]
                known[open_.pop()] = _joined([*inside, (span.given, span.end)], span.start, span.end)
    return known


def _meanwhile(own: Sequence[Span], wait: Span) -> Iterator[int]:
    """The sender's waits from the start of this one until the message is given, by their numbers."""
    for i in range(bisect_right(own, wait.start, key=lambda span: span.end), len(own)):
        if own[i].start >= wait.given:
            return
        if own[i].waits:
            yield i


def _joined(stretches: Sequence[Stretch], start: float, end: float) -> list[Stretch]:
    """What of them, in order of time, lies between start and end."""
    found: list[Stretch] = []
    for first, last in stretches:
        first, last = max(first, start), min(last, end)
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        elif first < last:
            found.append((first, last))
    return found
