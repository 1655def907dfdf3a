"""What every rank does at every moment of a simulated run: it computes, or waits for one message.

Terms: a message is *given* when its sender reaches the SEND; from then until it arrives it is *on its way*, queued
behind others of its link or moving. A *wait* is a RECV that the rank reaches before the arrival. A *span* is a compute
or a wait that takes time: the spans of a rank follow each other without a gap until its last action.

    spans(schedule, timeline) -> [[Span, ...] of each rank]
    span_before(spans, time) -> the one that ends at that time
    roots(spans) -> {(rank, number of a wait): [Root, ...]}      what each wait comes down to, moment by moment

The timeline is one that csc.simulation.simulate made of the schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from csc.ir.schedule import Action, Schedule
from csc.simulation.timeline import Timeline

Spans = list[list["Span"]]
Key = tuple[int, int]  # the rank of a span, and its number among the spans of that rank


@dataclass(frozen=True)
class Span:
    """start to end, of the action at `position` in its rank's list. sender, given: of a wait; sender -1: a compute."""

    position: int
    action: Action
    start: float
    end: float
    sender: int = -1
    given: float = 0.0

    @property
    def waits(self) -> bool:
        return self.sender >= 0


class Root(NamedTuple):
    """From start to end, `rank` computes what is waited for in the end (on its way: the message from it moves)."""

    start: float
    end: float
    rank: int
    on_its_way: bool


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


def roots(found: Spans) -> dict[Key, list[Root]]:
    """Every wait by what it comes down to. Before its message is given, the sender computes, or waits itself: then for
    what its own wait comes down to. No circle, as ranks that wait for each other at one moment would do so for ever.

    What a wait depends on ends no later than it does, so waits are looked at by their ends.
    """
    waits = [(rank, i) for rank, own in enumerate(found) for i, span in enumerate(own) if span.waits]
    known: dict[Key, list[Root]] = {}
    for key in sorted(waits, key=lambda key: found[key[0]][key[1]].end):
        open_ = [key]  # a message that takes no time ends two waits at once, in whatever order
        while open_:
            rank, i = open_[-1]
            span = found[rank][i]
            needed = list(_meanwhile(found[span.sender], span))
            missing = [(span.sender, n) for n, other in needed if other.waits and (span.sender, n) not in known]
            if missing:
                open_ += missing
            else:
                known[open_.pop()] = _roots(span, needed, known)
    return known


def _meanwhile(own: Sequence[Span], wait: Span) -> Iterator[tuple[int, Span]]:
    """The sender's spans from the start of the wait until the message is given, with their numbers."""
    first = bisect_left(own, wait.start, key=lambda span: span.end)
    for i in range(first, len(own)):
        if own[i].start >= wait.given:
            return
        if own[i].end > wait.start:
            yield i, own[i]


def _roots(wait: Span, needed: Sequence[tuple[int, Span]], known: dict[Key, list[Root]]) -> list[Root]:
    found: list[Root] = []

    def add(start: float, end: float, rank: int, on_its_way: bool) -> None:
        start, end = max(start, wait.start), min(end, wait.end)
        if start >= end:
            return
        if found and found[-1][2:] == (rank, on_its_way):
            found[-1] = Root(found[-1].start, end, rank, on_its_way)
        else:
            found.append(Root(start, end, rank, on_its_way))

    for i, span in needed:
        if span.waits:
            for root in known[wait.sender, i]:
                add(*root)
        else:
            add(span.start, span.end, wait.sender, False)
    add(wait.given, wait.end, wait.sender, True)
    return found
