"""Why ranks are idle: every idle second of a simulated run has one cause."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from csc.ir.schedule import PARTS, Action, Message, Schedule
from csc.simulation.pipeline import Pipeline, changes, states
from csc.simulation.timeline import Timeline

# --- What every rank does at every moment of a simulated run: it computes, or waits for one message ------------------
#
# Terms: a message is *given* when its sender reaches the SEND; from then until it arrives it is *on its way*, queued
# behind others of its link or moving. A *wait* is a RECV that the rank reaches before the arrival. A *gather* here is
# the time until a stage's parameters have come, in which the rank could have begun. A *span* is a compute, a wait or a
# gather that takes time: the spans of a rank follow each other without a gap until its last action.
#
# The timeline is one that csc.simulation.simulate made of the schedule.


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


# --- What the end of a step waited for: the actions and messages that follow each other without a gap up to it -------
#
# Terms: see csc.simulation.idle. From the last end back: an action began when the rank had ended the one before it,
# or when what it waited for had arrived; a message left when its sender had made it. All seconds of the step are on
# this path, either a rank's work, a message, or a wait for parameters that are gathered. Where there are several such
# paths, one of them.


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


# --- Why ranks are idle: every idle second of a simulated run has one cause ------------------------------------------
#
# Terms: see csc.simulation.idle. The idle seconds of a rank are the makespan without its work. Between its first and
# last action a rank is idle only while it waits for a message: at each moment either that message is on its way, or
# another rank computes what it comes down to (or waits for the parameters that it computes that with). With zero=3 it
# also waits for its own parameters. So each moment is one of
#
#     ramp       before the rank's first action, or after its last one
#     message    the message is on its way
#     gather     the parameters of the stage that it has come to are on their way
#     memory     another rank computes; this one has an action at hand, but each of those would take it above its limit
#     order      another rank computes; an action at hand fits, but stands later in the rank's list
#     way        another rank computes, and nothing is at hand: microbatches are on their way through the pipeline
#
# and of these seconds some are instead
#
#     imbalance  as many as the busiest rank has more work than this one: no order and no memory can fill them. Taken
#                from way; if that is less, from order, memory and the ramp after the last action, in this order
#
# At hand are, of the actions later in the rank's list, the next F, B, W and BW of each of its stages, as soon as what
# they need has been made on the rank, or has arrived. One *fits* if the rank stays within its limit with that action
# moved to where it waits, from there on.


CAUSES = ("ramp", "message", "gather", "imbalance", "memory", "order", "way")
Causes = dict[str, float]  # seconds by each of CAUSES


def idle(
    pipeline: Pipeline, schedule: Schedule, timeline: Timeline, limits: Sequence[float] | None = None
) -> list[Causes]:
    """The causes of each rank's idle seconds in the run that the simulator made of the schedule."""
    doing = spans(schedule, timeline)
    moving = on_their_way(doing)
    state = states(pipeline, schedule)
    arrivals = {((t.kind, t.source, t.destination), t.microbatch): t.end for t in timeline.transfers}
    coming: dict[tuple[str, int], list[Message]] = {}
    for channel in pipeline.messages:
        coming.setdefault((channel[0], channel[2]), []).append(channel)
    most = max(timeline.busy, default=0.0)
    found = []
    for rank, events in enumerate(timeline.ranks):
        causes = dict.fromkeys(CAUSES, 0.0)
        after = timeline.makespan
        if events:
            causes["ramp"] = events[0].start - timeline.start
            after = timeline.end - events[-1].end
            limit = None if limits is None else limits[rank]
            own = _RankIdle(pipeline, schedule, rank, state[rank], limit, arrivals, coming)
            for number, wait in enumerate(doing[rank]):
                if wait.gathers and wait.start >= events[0].end:
                    causes["gather"] += wait.end - wait.start
                elif wait.waits and own.between(wait.position):
                    for cause, seconds in _parts(wait, moving[rank, number], *own.at_hand(wait)):
                        causes[cause] += seconds
        found.append(_with_imbalance(causes, after, most - timeline.busy[rank]))
    return found


def _parts(wait: Span, moving: Sequence[Stretch], any_: float, fitting: float) -> Iterator[tuple[str, float]]:
    """The seconds of a wait by cause. any_, fitting: from when on some action is at hand, and one that fits."""
    yield "message", sum(end - start for start, end in moving)
    ends = [wait.start, *(time for stretch in moving for time in stretch), wait.end]
    times = (-math.inf, any_, fitting, math.inf)
    for first, last in zip(ends[::2], ends[1::2]):  # between the stretches
        for cause, start, end in zip(("way", "memory", "order"), times, times[1:]):
            yield cause, max(0.0, min(last, end) - max(first, start))


def _with_imbalance(causes: Causes, after: float, less: float) -> Causes:
    """after: seconds after the last action, which are ramp as far as they are no imbalance. less: work that the rank
    has less than the busiest.
    """
    found = {**causes, "ramp*": after}
    for cause in ("way", "order", "memory", "ramp*"):
        taken = min(found[cause], less - found["imbalance"])
        found[cause] -= taken
        found["imbalance"] += taken
    found["ramp"] += found.pop("ramp*")
    return found


class _RankIdle:
    """The list of one rank: what is at hand where it waits, and whether that fits."""

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, rank: int, state: float, limit: float | None,
        arrivals: Mapping[tuple[Message, int], float], coming: Mapping[tuple[str, int], Sequence[Message]],
    ) -> None:  # fmt: skip
        self.pipeline, self.limit, self.arrivals, self.coming = pipeline, limit, arrivals, coming
        self.here = {stage for stage, home in schedule.placement.items() if home == rank}
        self.positions = [i for i, action in enumerate(schedule.ranks[rank]) if action.computes]
        self.actions = [schedule.ranks[rank][i] for i in self.positions]
        self.made = {part: i for i, action in enumerate(self.actions) for part in action.parts}
        self.turns: dict[tuple[str, int], list[int]] = {}
        for i, action in enumerate(self.actions):
            self.turns.setdefault((action.kind, action.stage), []).append(i)
        self.level, self.peaks = [state], []  # bytes before each compute, and the most while it runs
        self.change = _changes(pipeline, self.actions)
        for before, after in self.change:
            now = self.level[-1]
            self.peaks.append(max(now, now + before, now + before + after))
            self.level.append(now + before + after)

    def between(self, position: int) -> bool:
        """Whether a position lies between the first and the last compute."""
        return self.positions[0] < position < self.positions[-1]

    def at_hand(self, wait: Span) -> tuple[float, float]:
        """From when on, while it waits, the rank has an action at hand, and one that fits."""
        any_ = fitting = math.inf
        place = bisect_left(self.positions, wait.position)
        for turns in self.turns.values():
            turn = bisect_left(turns, place)
            if turn < len(turns):
                ready = self._ready(turns[turn], place)
                if ready < min(wait.end, fitting):
                    any_ = min(any_, ready)
                    if self._fits(turns[turn], place):
                        fitting = ready
        return any_, fitting

    def _ready(self, index: int, place: int) -> float:
        """When a compute has all that it needs, if the rank has come to compute `place`; infinite: not before others of
        the rank's own have run.
        """
        action = self.actions[index]
        stage, microbatch = action.stage, action.microbatch
        kind = PARTS[action.kind][0]
        needed = []
        if kind == "B" or (kind == "W" and not self.pipeline.stages[stage].has_b):
            needed.append(Action("F", stage, microbatch))
        elif kind == "W":
            needed.append(Action("B", stage, microbatch))
        time = 0.0
        for channel in self.coming.get((kind, stage), ()):
            if channel[1] in self.here:
                needed.append(Action(kind, channel[1], microbatch))
            else:
                time = max(time, self.arrivals.get((channel, microbatch), math.inf))
        return time if all(self.made.get(one, place) < place for one in needed) else math.inf

    def _fits(self, index: int, place: int) -> bool:
        """Whether the rank stays within its limit if a compute is moved ahead to `place`."""
        if self.limit is None:
            return True
        before, after = self.change[index]
        now, stays = self.level[place], before + after
        most = max([now + before, now + stays, *(peak + stays for peak in self.peaks[place:index])])
        return most <= self.limit * (1 + 1e-9)


def _changes(pipeline: Pipeline, actions: Sequence[Action]) -> list[tuple[float, float]]:
    """What each of these adds to the bytes of its rank, at its start and at its end."""
    if pipeline.loads is None:
        alike = changes(pipeline.stages)
        return [alike[action.kind][action.stage] for action in actions]
    each = {m: changes(pipeline.stages_of(m)) for m in {action.microbatch for action in actions}}
    return [each[action.microbatch][action.kind][action.stage] for action in actions]
