"""A pipeline in numbers: what its stages take, what moves between them, and over which links.

Terms: see csc.ir.schedule. Times are seconds and sizes bytes, all of one microbatch and one data-parallel
replica. A *rank* is a position on the pp axis.

    StageWork  times of F, B and W; bytes that a microbatch leaves alive between them; bytes that are always there
    Network    latency and bandwidth between two ranks, within a node and between nodes
    Place      where a rank stands and what its own links are, where ranks are not all alike in a row
    Loads      features of each microbatch (tiles, tokens, ...), and what one of each takes on every stage
    Pipeline   stages, bytes by channel, network, and the loads of microbatches that differ

    slower(pipeline, factor) -> Pipeline
    hosted(pipeline, action, handling, placement) -> Pipeline
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from csc.ir.schedule import PARTS, Message

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
