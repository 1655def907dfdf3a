"""Why ranks are idle: every idle second of a simulated run has one cause.

Terms: see csc.simulation.waits. The idle seconds of a rank are the makespan without its work. Between a rank's first
and last action it is idle only while it waits for a message, and at each moment of a wait
  - either the message on which it comes down is on its way,
  - or a rank computes what it comes down to: its *root*.

    ramp       before the rank's first action, and after its last one
    message    a message is on its way
    imbalance  the root has more to do in the step than this rank, by MORE at least
    memory     the root has not; and this rank has an action at hand, but each of those would take it above its limit
    order      the root has not; and an action at hand fits: it stands later in the rank's list, that is all
    way        the root has not, and nothing is at hand: microbatches are on their way through the other ranks

The first that holds, in this order: a cause is no promise. Of a rank with the most to do none is imbalance.

At hand are, of the actions later in the rank's list, the next F, B, W and BW of each of its stages, as soon as what
they need has been made on the rank, or has arrived. One *fits* if the rank stays within its limit with that action
moved to where it waits, from there on.

    idle(pipeline, schedule, timeline, limits) -> [Idle of each rank]      limits: bytes of each rank; None: no limit
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from csc.ir.schedule import PARTS, Action, Message, Schedule
from csc.simulation.memory import changes, states
from csc.simulation.pipeline import Pipeline
from csc.simulation.timeline import Timeline
from csc.simulation.waits import Root, Span, roots, spans

CAUSES = ("ramp", "message", "imbalance", "memory", "order", "way")
MORE = 1.05  # so many times the work of a rank is more work, not the same but for rounding to whole layers


@dataclass(frozen=True)
class Idle:
    """causes: seconds by each of CAUSES, together all that the rank is idle. waited_for: seconds between its first and
    last action by the rank that they came down to.
    """

    causes: Mapping[str, float]
    waited_for: Mapping[int, float]


def idle(
    pipeline: Pipeline, schedule: Schedule, timeline: Timeline, limits: Sequence[float] | None = None
) -> list[Idle]:
    """The causes of each rank's idle seconds in the run that the simulator made of the schedule."""
    doing = spans(schedule, timeline)
    known = roots(doing)
    state = states(pipeline, schedule)
    arrivals = {((t.kind, t.source, t.destination), t.microbatch): t.end for t in timeline.transfers}
    coming: dict[tuple[str, int], list[Message]] = {}
    for channel in pipeline.messages:
        coming.setdefault((channel[0], channel[2]), []).append(channel)
    found = []
    for rank, events in enumerate(timeline.ranks):
        causes = dict.fromkeys(CAUSES, 0.0)
        waited_for: dict[int, float] = {}
        if not events:
            found.append(Idle({**causes, "ramp": timeline.makespan}, waited_for))
            continue
        first, last = events[0].start, events[-1].end
        causes["ramp"] = (first - timeline.start) + (timeline.end - last)
        own = _Own(pipeline, schedule, rank, state[rank], None if limits is None else limits[rank], arrivals, coming)
        for number, wait in enumerate(doing[rank]):
            if not wait.waits or not own.between(wait.position):
                continue
            any_, fitting = own.at_hand(wait)
            for root in known[rank, number]:
                waited_for[root.rank] = waited_for.get(root.rank, 0.0) + root.end - root.start
                busier = timeline.busy[root.rank] >= MORE * timeline.busy[rank]
                for cause, seconds in _parts(root, busier, any_, fitting):
                    causes[cause] += seconds
        found.append(Idle(causes, waited_for))
    return found


def _parts(root: Root, busier: bool, any_: float, fitting: float) -> Iterator[tuple[str, float]]:
    """The causes of one stretch. any_, fitting: when some action is at hand, and one that fits."""
    if root.on_its_way or busier:
        yield "message" if root.on_its_way else "imbalance", root.end - root.start
        return
    times = (-math.inf, any_, fitting, math.inf)
    for cause, start, end in zip(("way", "memory", "order"), times, times[1:]):
        start, end = max(start, root.start), min(end, root.end)
        if start < end:
            yield cause, end - start


class _Own:
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
