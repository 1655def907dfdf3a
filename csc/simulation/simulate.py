"""The simulator: when every action of a schedule starts and ends on a pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import PARTS, WHOLE, Action, Message, Schedule
from csc.simulation.pipeline import Pipeline, changes, check_pipeline, states
from csc.simulation.timeline import Curve, Event, Timeline, Transfer

# --- Jitter: computes and messages that now and then take longer than modelled ---------------------------------------
#
# another, e = 0.9 e + 0.1 c. A *hit* adds alpha max(burst, e) (0.5 + U) seconds to one of them, U uniform on [0, 1);
# each is hit with `probability`. The model and the levels J0 to J3 are those of RRFP (arXiv 2605.18750).


MEMORY = 0.9  # share of the running mean that the next compute leaves in place


@dataclass(frozen=True)
class Jitter:
    """How often and how long computes and messages are held up. `burst` is in seconds. The same seed gives the same
    delays. computes, messages: whether these are.
    """

    probability: float
    burst: float
    alpha: float
    seed: int = 0
    computes: bool = True
    messages: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise InputError(f"the probability is {self.probability}", "jitter", "It lies between 0 and 1")
        for name, value in (("burst", self.burst), ("alpha", self.alpha)):
            if not 0 <= value < float("inf"):
                raise InputError(f"{name} is {value}", "jitter", "It is a finite number of at least 0")


LEVELS = {
    "J0": Jitter(probability=0.0, burst=0.0, alpha=0.0),
    "J1": Jitter(probability=0.1, burst=0.005, alpha=0.5),
    "J2": Jitter(probability=0.2, burst=0.010, alpha=1.0),
    "J3": Jitter(probability=0.3, burst=0.015, alpha=1.5),
}
J3 = LEVELS["J3"]


def level(name: str, seed: int = 0) -> Jitter:
    """One of LEVELS, with a seed. InputError for any other name."""
    if name not in LEVELS:
        raise InputError(f"there is no level of jitter {name!r}", "jitter", f"Choose one of {', '.join(LEVELS)}")
    return replace(LEVELS[name], seed=seed)


class Delays:
    """The delays of one rank's computes, or of the messages from one rank to another, in turn. who: the rank, or both;
    each has a stream of its own. first: modelled seconds of the first, from which the mean starts.
    """

    def __init__(self, jitter: Jitter, who: object, first: float) -> None:
        self._jitter = jitter
        self._draw = random.Random(f"{jitter.seed} {who}").random
        self._mean = first

    def of(self, cost: float) -> float:
        """Seconds that the next one takes on top of these."""
        jitter = self._jitter
        self._mean = MEMORY * self._mean + (1 - MEMORY) * cost
        hit, length = self._draw(), self._draw()
        return jitter.alpha * max(jitter.burst, self._mean) * (0.5 + length) if hit < jitter.probability else 0.0


def disturbed(jitter: Jitter, seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """The modelled `seconds` of each rank's computes, in its order, with the delays added.

    Each rank draws from a stream of its own: what one rank is held up by does not depend on the others.
    """
    if not jitter.computes:
        return [list(modelled) for modelled in seconds]
    return [_rank(jitter, rank, modelled) for rank, modelled in enumerate(seconds)]


def _rank(jitter: Jitter, rank: int, modelled: Sequence[float]) -> list[float]:
    delays = Delays(jitter, rank, modelled[0] if modelled else 0.0)
    return [cost + delays.of(cost) for cost in modelled]


# --- The simulator: when every action of a schedule starts and ends on a pipeline ------------------------------------
#
# Terms: see csc.ir.schedule and csc.simulation.pipeline. A rank runs its list in order, one compute at a time. SEND
# takes none of its time: the message leaves at once, behind those that the same rank sent to the same rank before; the
# link is taken for size / bandwidth, and the message arrives one latency later. RECV waits for the arrival, so
# transfers overlap with compute. GATHER takes none of its time either: a rank's gathers follow each other, and what a
# stage computes waits for its own. REDUCE takes no time here.
#
# Who sends on a directed pair of ranks is one rank, in its own order. So every time follows from what is known when a
# rank reaches an action, and no queue of events sorted by time is needed: O(actions).


Lengths = Sequence[Sequence[float]]

_REMEDY = "Check it with csc.ir.schedule against the program's stages and messages"


class _Channel(NamedTuple):
    """Seconds that a message takes up its link (of each microbatch, or the one number of all), latency, and the rank it
    goes to.
    """

    seconds: Sequence[float]
    latency: float
    target: int


class _SimulatedRun(NamedTuple):
    """Start and length of every compute by rank; (rank, SEND, departure, arrival) of every message; for each rank
    (seconds, bytes) of what GATHER and FREE change.
    """

    starts: list[list[float]]
    seconds: list[list[float]]
    moves: list[tuple[int, Action, float, float]]
    held: list[list[tuple[float, float]]]


def simulate(
    pipeline: Pipeline, schedule: Schedule, jitter: Jitter | None = None, name: str | None = None,
    seconds: Lengths | None = None,
) -> Timeline:  # fmt: skip
    """The timeline of `schedule`, named after it unless `name` is given. The same arguments give the same timeline.
    jitter: delays of computes, and of messages, which hold up those behind them. seconds: per rank of every compute in
    its order, where they are not the pipeline's.

    ScheduleError if it deadlocks (the circle of waits) or has an action that the pipeline does not know. InputError for
    times and sizes that are no finite numbers of at least 0.
    """
    run = _run(pipeline, schedule, jitter, seconds)
    placement = schedule.placement
    state = states(pipeline, schedule)
    ranks = tuple(
        tuple(
            Event(rank, action, start, start + seconds)
            for action, start, seconds in zip((a for a in actions if a.computes), run.starts[rank], run.seconds[rank])
        )
        for rank, actions in enumerate(schedule.ranks)
    )
    transfers = tuple(
        Transfer(
            action.message,
            action.source,
            action.destination,
            action.microbatch,
            rank,
            placement[action.destination],
            start,
            end,
            pipeline.size(action.channel, action.microbatch),
        )
        for rank, action, start, end in sorted(run.moves, key=lambda move: move[2])
    )
    memory = tuple(_curve(pipeline, events, state[rank], run.held[rank]) for rank, events in enumerate(ranks))
    return Timeline(schedule.name if name is None else name, ranks, transfers, memory, tuple(state), 0.0)


def makespan(
    pipeline: Pipeline, schedule: Schedule, jitter: Jitter | None = None, seconds: Lengths | None = None
) -> float:  # fmt: skip
    """Seconds until the last compute ends: `simulate(...).makespan`, in a fraction of its time."""
    run = _run(pipeline, schedule, jitter, seconds)
    return max(
        (starts[-1] + seconds[-1] for starts, seconds in zip(run.starts, run.seconds) if starts),
        default=0.0,
    )


def _run(pipeline: Pipeline, schedule: Schedule, jitter: Jitter | None, given: Lengths | None) -> _SimulatedRun:
    _check(pipeline, schedule)
    seconds = compute_seconds(pipeline, schedule) if given is None else [list(listed) for listed in given]
    if jitter is not None:
        seconds = disturbed(jitter, seconds)
    channels = _channels(pipeline, schedule)
    alike = pipeline.loads is None
    count = len(schedule.ranks)
    clock = [0.0] * count
    left = [iter(actions) for actions in schedule.ranks]
    lengths = [iter(listed) for listed in seconds]
    starts: list[list[float]] = [[] for _ in range(count)]
    moves: list[tuple[int, Action, float, float]] = []
    free: dict[tuple[int, int], float] = {}  # by directed pair of ranks, when its link is
    delays = None if jitter is None or not jitter.messages else _WireDelays(jitter)
    arrival: dict[tuple[Message, int], float] = {}
    waiting: list[tuple[Message, int] | None] = [None] * count
    whole = _Whole(pipeline, count)
    ready = list(range(count))
    while ready:
        rank = ready.pop()
        now = clock[rank]
        started, lasting = starts[rank], lengths[rank]
        for action in left[rank]:
            kind = action.kind
            if kind == "RECV":
                token = ((action.message, action.source, action.destination), action.microbatch)
                arrived = arrival.get(token)
                if arrived is None:
                    waiting[rank] = token
                    break
                now = max(now, arrived)
            elif kind == "SEND":
                channel = (action.message, action.source, action.destination)
                if channel not in channels:
                    raise _unknown_message(schedule, rank, action)
                seconds_of, latency, target = channels[channel]
                busy = seconds_of[0 if alike else action.microbatch]
                if delays is not None:
                    busy += delays.of(rank, target, latency + busy)
                departure = max(now, free.get((rank, target), 0.0))
                free[rank, target] = departure + busy
                token = (channel, action.microbatch)
                arrival[token] = arrived = departure + busy + latency
                moves.append((rank, action, departure, arrived))
                if waiting[target] == token:
                    waiting[target] = None
                    clock[target] = max(clock[target], arrived)
                    ready.append(target)
            elif kind in WHOLE:
                whole.act(rank, action, now)
            elif kind != "REDUCE":
                now = max(now, whole.ready.get(action.stage, now)) if whole.ready else now
                started.append(now)
                now += next(lasting)
        clock[rank] = now
    blocked = {rank: token for rank, token in enumerate(waiting) if token is not None}
    if blocked:
        raise _deadlock(schedule, blocked)
    return _SimulatedRun(starts, seconds, moves, whole.held)


class _Whole:
    """Gathers as a run goes by. ready: by stage, when its parameters are whole; held: as of _Run."""

    def __init__(self, pipeline: Pipeline, ranks: int) -> None:
        self._stages = pipeline.stages
        self._done = [0.0] * ranks  # when a rank's gathers so far are
        self.ready: dict[int, float] = {}
        self.held: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]

    def act(self, rank: int, action: Action, now: float) -> None:
        """A GATHER or FREE."""
        stage = self._stages[action.stage]
        if action.kind == "GATHER":
            self._done[rank] = self.ready[action.stage] = max(now, self._done[rank]) + stage.gather
        self.held[rank].append((now, stage.gathered if action.kind == "GATHER" else -stage.gathered))


class _WireDelays:
    """Delays of messages, of each directed pair of ranks on its own."""

    def __init__(self, jitter: Jitter) -> None:
        self._jitter = jitter
        self._wires: dict[tuple[int, int], Delays] = {}

    def of(self, rank: int, target: int, seconds: float) -> float:
        """What the next message takes on top of these seconds."""
        if (rank, target) not in self._wires:
            self._wires[rank, target] = Delays(self._jitter, f"{rank}>{target}", seconds)
        return self._wires[rank, target].of(seconds)


def compute_seconds(pipeline: Pipeline, schedule: Schedule) -> list[list[float]]:
    """Per rank, the modelled length of every compute in its order."""
    per_kind = {kind: [stage.seconds(kind) for stage in pipeline.stages] for kind in PARTS}
    if pipeline.loads is None:
        return [[per_kind[a.kind][a.stage] for a in actions if a.kind in per_kind] for actions in schedule.ranks]
    each = [pipeline.stages_of(m) for m in range(len(pipeline.loads.features))]
    return [
        [each[a.microbatch][a.stage].seconds(a.kind) for a in actions if a.kind in per_kind]
        for actions in schedule.ranks
    ]


def _check(pipeline: Pipeline, schedule: Schedule) -> None:
    check_pipeline(pipeline)
    loads = pipeline.loads
    for what, has, needs in (
        ("stages", len(pipeline.stages), 1 + max(schedule.placement, default=-1)),
        ("microbatches", *((0, 0) if loads is None else (len(loads.features), schedule.microbatches))),
    ):
        if needs > has:
            raise ScheduleError(
                f"it has {needs} {what}, the pipeline has {has}", f"schedule {schedule.name}", "Plan it for this one"
            )


def _channels(pipeline: Pipeline, schedule: Schedule) -> dict[Message, _Channel]:
    """What moving a message takes, for every channel of the pipeline that leads from one rank to another."""
    placement = schedule.placement
    found = {}
    for channel, size in pipeline.messages.items():
        source, target = placement.get(channel[1]), placement.get(channel[2])
        if source is not None and target is not None and source != target:
            link = pipeline.network.link(source, target)
            sizes = [size] if pipeline.loads is None else pipeline.loads.sizes[channel]
            found[channel] = _Channel([one / link.bandwidth for one in sizes], link.latency, target)
    return found


def _curve(
    pipeline: Pipeline, events: Sequence[Event], state: float, held: Sequence[tuple[float, float]]
) -> Curve:  # fmt: skip
    alike = changes(pipeline.stages)
    several = {event.action.microbatch for event in events} if pipeline.loads is not None else set()
    each = {m: changes(pipeline.stages_of(m)) for m in several}
    now = state
    points = [(0.0, now)]
    steps: list[tuple[float, float]] = []
    for event in events:
        action = event.action
        change = each.get(action.microbatch, alike)[action.kind][action.stage]
        steps += zip((event.start, event.end), change)
    if held:  # what ends is dropped before what begins at the same time takes its place
        steps = sorted([*steps, *held], key=lambda step: (step[0], step[1] > 0))
    for time, size in steps:
        if size:
            now += size
            points.append((time, max(now, 0.0)))  # a sum of floats may end a hair below
    return tuple(points)


def _unknown_message(schedule: Schedule, rank: int, action: Action) -> ScheduleError:
    return ScheduleError(
        f"'{action}' sends what the pipeline has no message for between two ranks",
        f"schedule {schedule.name}, rank {rank}",
        _REMEDY,
    )


def _deadlock(schedule: Schedule, blocked: dict[int, tuple[Message, int]]) -> ScheduleError:
    """Follow the waits from the first blocked rank, to a circle or to a message that nobody sends."""
    where = f"schedule {schedule.name}"
    path: list[int] = []
    rank = min(blocked)
    while rank not in path:
        path.append(rank)
        channel, mb = blocked[rank]
        sender = schedule.placement.get(channel[1], -1)
        if sender not in blocked:
            return ScheduleError(
                f"'{Action.recv(channel, mb)}' waits for a message that nobody sends",
                f"{where}, rank {rank}",
                _REMEDY,
            )
        rank = sender
    waits = [f"rank {r} waits at '{Action.recv(*blocked[r])}'" for r in path[path.index(rank) :]]
    return ScheduleError(
        f"deadlock: {', '.join(waits)}, in a circle",
        where,
        "Move one of their SENDs, with the action that produces it, ahead of its rank's wait",
    )
