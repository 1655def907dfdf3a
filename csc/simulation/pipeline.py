"""A pipeline in numbers: what its stages take, what moves between them, what a rank holds; and their form as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from csc.errors import InputError
from csc.ir.schedule import PARTS, WHOLE, Message, Schedule
from csc.simulation.timeline import Event, Timeline

# --- A pipeline in numbers: what its stages take, what moves between them, and over which links ----------------------
#
# Terms: see csc.ir.schedule. Times are seconds and sizes bytes, all of one microbatch and one data-parallel replica. A
# *rank* is a position on the pp axis.


Floats = npt.NDArray[np.float64]

FIGURES = ("forward", "backward_input", "backward_weight", "saved", "stashed", "fused")  # that microbatches change


@dataclass(frozen=True)
class StageWork:
    """One stage. `has_b` and `has_w`: it has a B and a W at all (a frozen stage has neither, and saves nothing).

    saved: bytes alive from F's end until B's end. stashed: bytes alive from B's end until W's end. fused: bytes that BW
    takes while it runs, on top of saved; of the region that takes the most, as BW goes from one to the next. state:
    parameters, gradients and optimizer state, alive for the whole step. gathered: bytes from GATHER until FREE, of
    parameters that data-parallel ranks divide; gather: seconds until they are there. 0: the stage has none. working:
    bytes that its largest region takes while it runs; a rank has room for that of one of its stages at any time.
    """

    forward: float
    backward_input: float = 0.0
    backward_weight: float = 0.0
    has_b: bool = True
    has_w: bool = True
    saved: float = 0.0
    stashed: float = 0.0
    fused: float = 0.0
    state: float = 0.0
    gathered: float = 0.0
    gather: float = 0.0
    working: float = 0.0

    def seconds(self, kind: str) -> float:
        """Time of "F", "B", "W" or "BW"."""
        return sum(
            {"F": self.forward, "B": self.backward_input, "W": self.backward_weight}[part] for part in PARTS[kind]
        )

    @property
    def work(self) -> float:
        """Seconds of one microbatch: F + B + W."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Link:
    """Seconds until the first byte arrives, and bytes per second after that."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, size: float) -> float:
        """How long a message of `size` bytes takes on an idle link."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class RankNodes:
    """Of one rank. nodes: those that its devices stand on, one device for each index on the other axes of the mesh; two
    ranks reach each other within nodes if all of their devices do, since the slowest pair holds up the others.
    """

    nodes: tuple[int, ...]
    within: Link = Link()
    between: Link = Link()


@dataclass(frozen=True)
class Network:
    """Links between ranks: `within` a node of `ranks_per_node` consecutive ranks (None: one node), else `between`.

    places: of each rank, where that is not all there is to say; a message then takes the slower of both ends' links.
    answered: a sender knows that a message came only by its answer (gloo), and keeps it until then.
    """

    within: Link = Link()
    between: Link = Link()
    ranks_per_node: int | None = None
    places: tuple[RankNodes, ...] = ()
    answered: bool = False

    def link(self, source: int, destination: int) -> Link:
        """The link from one rank to another."""
        if self.places:
            a, b = self.places[source], self.places[destination]
            one, other = (a.within, b.within) if a.nodes == b.nodes else (a.between, b.between)
            return Link(max(one.latency, other.latency), min(one.bandwidth, other.bandwidth))
        size = self.ranks_per_node
        return self.within if size is None or source // size == destination // size else self.between


@dataclass(frozen=True)
class Loads:
    """What each microbatch of a step is, and what that takes: every stage by other features.

    features[m]: of microbatch m, numbers such as (1, tiles, tokens, sum of squared lengths). stages[s]: seconds and
    bytes that one of each feature adds on that stage; messages: bytes that it adds to a channel.
    """

    features: tuple[tuple[float, ...], ...]
    stages: tuple[tuple[StageWork, ...], ...]
    messages: Mapping[Message, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def scaled(cls, stages: Sequence[StageWork], messages: Mapping[Message, float], factors: Sequence[float]) -> Loads:
        """Of microbatches that take so many times what one takes."""
        return cls(
            tuple((factor,) for factor in factors),
            tuple((stage,) for stage in stages),
            {channel: (size,) for channel, size in messages.items()},
        )

    @cached_property
    def _tables(self) -> dict[str, list[list[float]]]:
        return {}

    def table(self, figure: str) -> list[list[float]]:
        """One of FIGURES [stage][microbatch]: sums of features in their order, none below 0. Made when it is asked for:
        who compares many assignments asks for seconds alone.
        """
        if figure not in self._tables:
            self._tables[figure] = self._rows(self.rates(figure)).tolist()
        return self._tables[figure]

    def rates(self, figure: str) -> Floats:
        """[stage][feature]"""
        return np.array([[getattr(one, figure) for one in rates] for rates in self.stages], dtype=np.float64)

    @cached_property
    def sizes(self) -> dict[Message, list[float]]:
        """Bytes of each channel by microbatch."""
        channels = list(self.messages)
        return dict(zip(channels, self._rows(self.sent(channels)).tolist()))

    def sent(self, channels: Sequence[Message]) -> Floats:
        """[channel][feature]: bytes."""
        rates = np.array([self.messages[channel] for channel in channels], dtype=np.float64)
        return rates.reshape(len(channels), len(self.stages[0]))

    @cached_property
    def work(self) -> list[float]:
        """Seconds of each microbatch on all stages together."""
        rows = [row for name in FIGURES[:3] for row in self.table(name)]
        return [sum(row[m] for row in rows) for m in range(len(self.features))]

    def _rows(self, rates: Floats) -> Floats:
        return taken(rates, np.array(self.features, dtype=np.float64))


def taken(rates: Floats, features: Floats) -> Floats:
    """[row][microbatch] of rates [row][feature] and [microbatch][feature]: sums in features' order, none below 0."""
    table = np.zeros((len(rates), len(features)))
    for own, counts in zip(rates.T, features.T):
        table += own[:, None] * counts
    return np.maximum(table, 0.0)


@dataclass(frozen=True)
class Pipeline:
    """Everything that a simulation needs besides a schedule.

    stages and messages (bytes by channel: kind, source stage, destination stage) are those of one microbatch; with
    `loads` of their mean, and each microbatch is what its features make of it. loads: None if all are equal.
    """

    stages: tuple[StageWork, ...]
    messages: Mapping[Message, float] = field(default_factory=dict)
    network: Network = Network()
    loads: Loads | None = None

    def stages_of(self, microbatch: int) -> tuple[StageWork, ...]:
        """What the stages take of this microbatch."""
        if self.loads is None:
            return self.stages
        tables = {name: self.loads.table(name) for name in FIGURES}
        return tuple(
            _with(stage, {name: tables[name][s][microbatch] for name in FIGURES}) for s, stage in enumerate(self.stages)
        )

    def size(self, channel: Message, microbatch: int) -> float:
        """Bytes of a message of this microbatch."""
        return self.messages[channel] if self.loads is None else self.loads.sizes[channel][microbatch]

    @property
    def has_b(self) -> list[bool]:
        return [stage.has_b for stage in self.stages]

    @property
    def has_w(self) -> list[bool]:
        return [stage.has_w for stage in self.stages]

    @property
    def divided(self) -> list[bool]:
        """Of which stages data-parallel ranks divide the parameters."""
        return [stage.gathered > 0 for stage in self.stages]


def slower(pipeline: Pipeline, factor: float) -> Pipeline:
    """All seconds of the stages times `factor`; messages as they are."""

    def stretched(stage: StageWork) -> StageWork:
        return _with(stage, {name: factor * getattr(stage, name) for name in FIGURES[:3]})

    loads = pipeline.loads
    if loads is not None:
        loads = replace(loads, stages=tuple(tuple(map(stretched, rates)) for rates in loads.stages))
    return replace(pipeline, stages=tuple(map(stretched, pipeline.stages)), loads=loads)


def hosted(
    pipeline: Pipeline, action: float, handling: float, placement: Sequence[int] | None = None
) -> Pipeline:  # fmt: skip
    """The pipeline with what the runtime takes of a rank's own time, whatever the microbatch: `action` seconds for
    each F, B or W (BW counts as both), `handling` for each message that it sends or takes. placement: the rank of each
    stage; None: all messages lead from one rank to another.
    """
    if not (action or handling):
        return pipeline
    own = runtime_work(pipeline, action, handling, placement)
    stages = tuple(_added(stage, more) for stage, more in zip(pipeline.stages, own))
    loads = pipeline.loads
    if loads is not None:
        loads = Loads(
            tuple((1.0, *features) for features in loads.features),
            tuple((more, *rates) for more, rates in zip(own, loads.stages)),
            {channel: (0.0, *rates) for channel, rates in loads.messages.items()},
        )
    return replace(pipeline, stages=stages, loads=loads)


def runtime_work(
    pipeline: Pipeline, action: float, handling: float, placement: Sequence[int] | None = None
) -> tuple[StageWork, ...]:  # fmt: skip
    """What `hosted` adds to each stage."""
    ends = [dict.fromkeys("FB", 0) for _ in pipeline.stages]
    for kind, source, destination in pipeline.messages:
        if placement is None or placement[source] != placement[destination]:
            ends[source][kind] += 1
            ends[destination][kind] += 1
    return tuple(
        StageWork(
            action + handling * met["F"],
            stage.has_b * (action + handling * met["B"]),
            stage.has_w * action,
            stage.has_b,
            stage.has_w,
        )
        for stage, met in zip(pipeline.stages, ends)
    )


def _added(stage: StageWork, more: StageWork) -> StageWork:
    return _with(stage, {name: getattr(stage, name) + getattr(more, name) for name in FIGURES[:3]})


def _with(stage: StageWork, figures: Mapping[str, float]) -> StageWork:
    changed: dict[str, Any] = dict(figures)
    return replace(stage, **changed)


# --- Memory of a rank as its actions go by. It depends on their order alone, so peaks need no simulation -------------
#
# Terms: see csc.simulation.pipeline. A microbatch's `saved` bytes come at F's start and go at B's end, which leaves
# `stashed`; those go at W's end. BW takes `fused` while it runs and leaves nothing. A stage with W but no B holds
# `saved` until W's end; one with neither holds nothing. From GATHER until FREE there are `gathered` bytes.


Change = tuple[float, float]


def changes(stages: Sequence[StageWork]) -> dict[str, list[Change]]:
    """By how much each action of each stage changes the bytes alive of its rank, at its start and at its end."""
    per_stage = [_changes(stage) for stage in stages]
    return {kind: [change[i] for change in per_stage] for i, kind in enumerate(PARTS)}


def _changes(stage: StageWork) -> tuple[Change, ...]:
    """Those of F, B, W and BW."""
    nothing = (0.0, 0.0)
    if stage.has_b:
        stashed = stage.stashed if stage.has_w else 0.0
        both = (stage.fused, -stage.fused - stage.saved)
        return (stage.saved, 0.0), (0.0, stashed - stage.saved), (0.0, -stashed), both
    if stage.has_w:
        return (stage.saved, 0.0), nothing, (0.0, -stage.saved), nothing
    return nothing, nothing, nothing, nothing


def states(pipeline: Pipeline, schedule: Schedule) -> list[float]:
    """Per rank, what is there for the whole step: the state of its stages, and room for what one of them works with."""
    total = [0.0] * len(schedule.ranks)
    working = [0.0] * len(schedule.ranks)
    for stage, rank in schedule.placement.items():
        total[rank] += pipeline.stages[stage].state
        working[rank] = max(working[rank], pipeline.stages[stage].working)
    return [state + most for state, most in zip(total, working)]


def peak_memory(pipeline: Pipeline, schedule: Schedule) -> list[float]:
    """Per rank, the most bytes alive at once, state included. O(actions)."""
    alike = changes(pipeline.stages)
    loads = pipeline.loads
    each = [] if loads is None else [changes(pipeline.stages_of(m)) for m in range(len(loads.features))]
    peaks = states(pipeline, schedule)
    for rank, actions in enumerate(schedule.ranks):
        now = peak = peaks[rank]
        for action in actions:
            if action.kind in WHOLE:
                now += pipeline.stages[action.stage].gathered * (1 if action.kind == "GATHER" else -1)
                peak = max(peak, now)
            elif action.kind in alike:
                before, after = (each[action.microbatch] if each else alike)[action.kind][action.stage]
                now += before
                peak = max(peak, now)
                now += after
                peak = max(peak, now)
        peaks[rank] = peak
    return peaks


# --- Bytes of messages that wait: with the receiver for their turn, with the sender to be taken, within a rank -------
#
# Terms: see csc.ir.schedule and csc.simulation.timeline. A receiver *posts* a message when the compute ahead of its
# RECV starts: from then on it has room for it, until the compute that takes it starts, which counts it in what it
# saves or works with. A sender keeps what it sent until it was moved, which is not before it was posted; or, where the
# network is `answered` (csc.simulation.pipeline.Network), until an answer proves that it came, or the step ends.


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


# --- Whether the numbers of a pipeline are numbers that can be simulated ---------------------------------------------


CHECKED_FIGURES = tuple(field.name for field in fields(StageWork) if field.name not in ("has_b", "has_w"))


def check_pipeline(pipeline: Pipeline) -> None:
    """Times and sizes are finite and at least 0, and every link carries something. What loads take of a feature may be
    below 0, as long as it is a number.
    """
    for what, number in _figures(pipeline):
        if not 0 <= number < math.inf:
            raise InputError(f"{what} is {number!r}", "pipeline", "Times and sizes are finite and at least 0")
    loads = pipeline.loads
    rates = [] if loads is None else [*loads.features, *loads.messages.values()]
    if not all(math.isfinite(number) for row in rates for number in row):
        raise InputError("a feature of a microbatch is no finite number", "pipeline", "Look at the measured costs")


def _figures(pipeline: Pipeline) -> Iterator[tuple[str, float]]:
    for number, stage in enumerate(pipeline.stages):
        for name in CHECKED_FIGURES:
            yield f"the {name.replace('_', ' ')} of stage {number}", getattr(stage, name)
    for (kind, source, destination), size in pipeline.messages.items():
        yield f"the size of message {kind} {source}>{destination}", size
    ends: tuple[Network | RankNodes, ...] = (pipeline.network, *pipeline.network.places)
    for end in ends:
        for where, link in (("within", end.within), ("between", end.between)):
            yield f"the latency {where} nodes", link.latency
            yield f"the seconds for a byte {where} nodes", 1 / link.bandwidth if link.bandwidth else math.inf


# --- A pipeline's numbers as JSON ------------------------------------------------------------------------------------
#
# The file program.json keeps them, so that a written program can be simulated and emulated.


_REMEDY = "Compile the program again"
OPTIONAL = ("gathered", "gather", "working")


def to_json(pipeline: Pipeline) -> dict[str, Any]:
    """The pipeline as dicts, lists and numbers. An unlimited bandwidth is null."""
    return {
        "stages": [_row(stage) for stage in pipeline.stages],
        "messages": [[*channel, size] for channel, size in sorted(pipeline.messages.items())],
        "network": _network(pipeline.network),
        "loads": _loads(pipeline.loads) if pipeline.loads is not None else None,
    }


def _network(network: Network) -> dict[str, Any]:
    """Places only where there are any, and answers only where they are waited for."""
    found: dict[str, Any] = {
        "within": _link(network.within),
        "between": _link(network.between),
        "ranks_per_node": network.ranks_per_node,
    }
    if network.places:
        found["places"] = [
            {"nodes": list(one.nodes), "within": _link(one.within), "between": _link(one.between)}
            for one in network.places
        ]
    if network.answered:
        found["answered"] = True
    return found


def _loads(loads: Loads) -> dict[str, Any]:
    return {
        "features": [list(one) for one in loads.features],
        "stages": [[_row(rate) for rate in rates] for rates in loads.stages],
        "messages": [[*channel, list(rates)] for channel, rates in sorted(loads.messages.items())],
    }


def _row(stage: StageWork) -> dict[str, Any]:
    """Its figures; some only where there are any."""
    return {name: one for name, one in asdict(stage).items() if one or name not in OPTIONAL}


def _link(link: Link) -> dict[str, float | None]:
    return {"latency": link.latency, "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None}


def from_json(data: Any, where: str = "pipeline") -> Pipeline:
    """Read what `to_json` wrote. InputError, with the place, for anything else."""
    try:
        return Pipeline(
            stages=tuple(_stage(row) for row in data["stages"]),
            messages={(str(kind), int(a), int(b)): _size(size) for kind, a, b, size in data["messages"]},
            network=_read_network(data["network"]),
            loads=_read_loads(data["loads"]) if data["loads"] is not None else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"these are no figures of a pipeline: {error!r}", where, _REMEDY) from None


def _read_loads(data: dict[str, Any]) -> Loads:
    found = Loads(
        features=tuple(tuple(map(_size, one)) for one in data["features"]),
        stages=tuple(tuple(_stage(rate, _number) for rate in rates) for rates in data["stages"]),
        messages={(str(kind), int(a), int(b)): tuple(map(_number, rates)) for kind, a, b, rates in data["messages"]},
    )
    if len({len(one) for one in (*found.features, *found.stages, *found.messages.values())}) > 1:
        raise ValueError("features and their rates differ in number")
    return found


def _stage(row: dict[str, Any], number: Callable[[Any], float] | None = None) -> StageWork:
    flags = ("has_b", "has_w")
    figures: dict[str, Any] = {
        field.name: (number or _size)(row[field.name] if field.name not in OPTIONAL else row.get(field.name, 0.0))
        for field in fields(StageWork)
        if field.name not in flags
    }
    return StageWork(**figures, **{name: bool(row[name]) for name in flags})


def _read_network(row: dict[str, Any]) -> Network:
    places = tuple(
        RankNodes(tuple(map(int, one["nodes"])), _read(one["within"]), _read(one["between"]))
        for one in row.get("places", ())
    )
    return Network(
        _read(row["within"]), _read(row["between"]), row["ranks_per_node"], places, bool(row.get("answered"))
    )


def _read(row: dict[str, Any]) -> Link:
    return Link(_size(row["latency"]), math.inf if row["bandwidth"] is None else _size(row["bandwidth"]))


def _size(number: Any) -> float:
    if _number(number) < 0:
        raise ValueError(f"{number!r} is not a number of at least 0")
    return float(number)


def _number(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(f"{number!r} is no number")
    return float(number)
