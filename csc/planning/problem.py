"""The planning problem in numbers: units of work, the values that flow between them, ranks and memory.

Terms
  unit     a region in numbers; never divided
  value    what one unit makes and others read; its gradient visits the readers from the last to the first and then
           goes to the maker (so gradients are summed in the order of autograd)
  stages   for each stage the units it runs; a partition is valid if every value, and every gradient on its visits,
           goes from lower to higher stage numbers forward and back again
  kind     ranks that are alike; where there are several, a unit takes other seconds on each

    Problem(units, values, ranks, microbatches, memory, network, scale)
    unequal(problem, kinds)       -> Problem whose ranks are of these kinds
    in_parts(problem, parts)      -> Problem if so many ranks divided the work of one
    channels(values, home)        -> {channel: values that it carries}
    pipeline(problem, stages, placement)     -> Pipeline for the simulator
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from csc.ir.schedule import Message
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, StageWork, hosted

SECONDS = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Unit:
    """One region: seconds of F, B and W and bytes as in csc.simulation.pipeline.StageWork.

    component: the part of the model that it belongs to, such as vision_tower. has_b: it takes part in the backward
    pass (has input or weight gradients to compute); has_w: it has trainable parameters. gathered: bytes of parameters
    of which ranks hold shards, as they are whole. working: bytes that it takes while it runs, and nothing else counts.
    """

    name: str
    component: str
    forward: float
    backward_input: float = 0.0
    backward_weight: float = 0.0
    has_b: bool = True
    has_w: bool = True
    saved: float = 0.0
    stashed: float = 0.0
    state: float = 0.0
    gathered: float = 0.0
    working: float = 0.0

    @property
    def work(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    @property
    def fused(self) -> float:
        """Bytes that B and W, one right after the other, take on top of what the unit saved."""
        return max(0.0, self.stashed - (self.saved if self.has_b else 0.0)) if self.has_w else 0.0


@dataclass(frozen=True)
class Value:
    """What unit `maker` makes for `readers`, in the order in which they run. gradient[i]: reader i gives a gradient."""

    maker: int
    readers: tuple[int, ...]
    gradient: tuple[bool, ...]
    size: float
    gradient_size: float


@dataclass(frozen=True)
class RankKind:
    """Ranks that are alike, by their numbers. seconds[u]: of F, B and W of unit u on one of them. memory: bytes of one,
    for state and activations; None: no limit.
    """

    name: str
    ranks: tuple[int, ...]
    seconds: tuple[tuple[float, float, float], ...]
    memory: float | None = None


@dataclass(frozen=True)
class Problem:
    """`units` stand in an order in which they can run. ranks: length of the pp axis. memory: bytes of one rank, for
    state and activations; None: no limit. scale: for each microbatch what its
    seconds and bytes are multiplied by; None if all are equal. gathering: how a rank gets the shards of others.
    waiting: messages that wait to be sent or taken have to fit into the memory, too. action: seconds that a rank takes
    for each F, B and W of a stage, besides those of its units; handling: for each message that it sends or takes.

    kinds: of the ranks; none if all are alike. With kinds, seconds of units are the least that any of them takes, for
    F, B and W apart, and `memory` is the largest, so that what holds for every plan on such ranks holds for these.
    """

    units: tuple[Unit, ...]
    values: tuple[Value, ...]
    ranks: int
    microbatches: int
    memory: float | None = None
    network: Network = field(default_factory=Network)
    scale: tuple[float, ...] | None = None
    gathering: Link = field(default_factory=Link)
    kinds: tuple[RankKind, ...] = ()
    waiting: bool = False
    action: float = 0.0
    handling: float = 0.0

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """[rank]: the position of its kind; 0 where all are alike."""
        found = [0] * self.ranks
        for number, kind in enumerate(self.kinds):
            for rank in kind.ranks:
                found[rank] = number
        return tuple(found)

    @property
    def limits(self) -> float | tuple[float, ...] | None:
        """Bytes of each rank, or the one number of all; none above `memory`."""
        if self.memory is None or not self.kinds:
            return self.memory
        return tuple(self.limit_of(kind) or 0.0 for kind in self.kind_of)

    def limit_of(self, kind: int) -> float | None:
        """Bytes of a rank of this kind."""
        if self.memory is None or not self.kinds:
            return self.memory
        own = self.kinds[kind].memory
        return self.memory if own is None else min(self.memory, own)

    @cached_property
    def units_on(self) -> tuple[tuple[Unit, ...], ...]:
        """[kind]: the units as they are there."""
        if not self.kinds:
            return (self.units,)
        return tuple(
            tuple(
                replace(unit, forward=forward, backward_input=backward, backward_weight=weight)
                for unit, (forward, backward, weight) in zip(self.units, kind.seconds)
            )
            for kind in self.kinds
        )

    def less(self, size: float) -> Problem:
        """The problem with so many bytes less on each rank."""
        assert self.memory is not None
        kinds = tuple(replace(kind, memory=kind.memory and kind.memory - size) for kind in self.kinds)
        return replace(self, memory=self.memory - size, kinds=kinds)

    def alike(self, kind: int) -> Problem:
        """The problem if all ranks were of this kind."""
        return replace(self, units=self.units_on[kind], memory=self.limit_of(kind), kinds=())


def in_parts(problem: Problem, parts: int) -> Problem:
    """The problem if so many ranks did the work of one rank, all of it divided evenly."""
    units = tuple(
        replace(
            unit, forward=unit.forward / parts, backward_input=unit.backward_input / parts,
            backward_weight=unit.backward_weight / parts,
        )
        for unit in problem.units
    )  # fmt: skip
    return replace(problem, units=units)


def unequal(problem: Problem, kinds: Sequence[RankKind]) -> Problem:
    """The problem on ranks of these kinds, all of which have a limit or none; with one kind it is of that alone."""
    listed = tuple(kinds)
    units = []
    for u, unit in enumerate(problem.units):
        forward, backward, weight = (min(kind.seconds[u][i] for kind in listed) for i in range(3))
        units.append(replace(unit, forward=forward, backward_input=backward, backward_weight=weight))
    memory = None if listed[0].memory is None else max(kind.memory or 0.0 for kind in listed)
    return replace(problem, units=tuple(units), memory=memory, kinds=listed if len(listed) > 1 else ())


def placed(problem: Problem, stages: Sequence[Sequence[int]], placement: Sequence[int]) -> Problem:
    """The problem with every unit as it is on the rank of its stage, all ranks alike otherwise."""
    if not problem.kinds:
        return problem
    units = list(problem.units)
    for members, rank in zip(stages, placement):
        own = problem.units_on[problem.kind_of[rank]]
        for u in members:
            units[u] = own[u]
    return replace(problem, units=tuple(units), kinds=())


def channels(values: Sequence[Value], home: Sequence[int]) -> dict[Message, list[int]]:
    """The messages between stages when unit u runs on stage `home[u]`, with the positions of the values they carry.

    A value goes from its maker's stage straight to every other stage that reads it. Its gradient visits the stages
    of the readers that give one, from the last reader to the first, and then goes to the maker's.
    """
    found: dict[Message, list[int]] = {}

    def carry(kind: str, source: int, destination: int, position: int) -> None:
        carried = found.setdefault((kind, source, destination), [])
        if not carried or carried[-1] != position:
            carried.append(position)

    for position, value in enumerate(values):
        made = home[value.maker]
        for reader in value.readers:
            if home[reader] != made and position not in found.get(("F", made, home[reader]), ()):
                carry("F", made, home[reader], position)
        here = None
        for reader, needed in reversed(list(zip(value.readers, value.gradient))):
            if not needed:
                continue
            if here is not None and here != home[reader]:
                carry("B", here, home[reader], position)
            here = home[reader]
        if here is not None and here != made:
            carry("B", here, made, position)
    return dict(sorted(found.items()))


def pipeline(
    problem: Problem, stages: Sequence[Sequence[int]], placement: Sequence[int] | None = None
) -> Pipeline:  # fmt: skip
    """The pipeline of these stages: costs summed over their units, bytes over the values of each message. placement:
    the rank of each, on which it is priced; needed where there are kinds.
    """
    if problem.kinds:
        assert placement is not None
        problem = placed(problem, stages, placement)
    home = [0] * len(problem.units)
    built = []
    for index, members in enumerate(stages):
        units = [problem.units[u] for u in members]
        for u in members:
            home[u] = index
        has_b, has_w = any(unit.has_b for unit in units), any(unit.has_w for unit in units)
        saved = sum(unit.saved for unit in units if unit.has_b)
        stashed = sum(unit.stashed for unit in units if unit.has_w)
        gathered = sum(unit.gathered for unit in units)
        built.append(
            StageWork(
                forward=sum(unit.forward for unit in units),
                backward_input=sum(unit.backward_input for unit in units),
                backward_weight=sum(unit.backward_weight for unit in units),
                has_b=has_b,
                has_w=has_w,
                saved=saved,
                stashed=stashed,
                fused=min(max((unit.fused for unit in units), default=0.0), max(0.0, stashed - saved)),
                state=sum(unit.state for unit in units),
                gathered=gathered,
                gather=problem.gathering.seconds(gathered) if gathered else 0.0,
                working=max((unit.working for unit in units), default=0.0) * max(problem.scale or (1.0,)),
            )
        )
    sizes = {
        channel: sum(problem.values[v].size if channel[0] == "F" else problem.values[v].gradient_size for v in carried)
        for channel, carried in channels(problem.values, home).items()
    }
    loads = None if problem.scale is None else Loads.scaled(built, sizes, problem.scale)
    found = Pipeline(tuple(built), sizes, problem.network, loads)
    return hosted(found, problem.action, problem.handling, placement)
