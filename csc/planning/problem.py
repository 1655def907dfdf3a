"""The planning problem in numbers: units of work, the values that flow between them, ranks and memory."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from csc.errors import InputError
from csc.ir.schedule import Message
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, RankNodes, StageWork, hosted

# --- The planning problem in numbers: units of work, the values that flow between them, ranks and memory -------------
#
# Terms
#   unit     a region in numbers; never divided
#   value    what one unit makes and others read; its gradient visits the readers from the last to the first and then
#            goes to the maker (so gradients are summed in the order of autograd)
#   stages   for each stage the units it runs; a partition is valid if every value, and every gradient on its visits,
#            goes from lower to higher stage numbers forward and back again
#   kind     ranks that are alike; where there are several, a unit takes other seconds on each


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
        kind_of = [0] * self.ranks
        for number, kind in enumerate(self.kinds):
            for rank in kind.ranks:
                kind_of[rank] = number
        return tuple(kind_of)

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
        memory = self.kinds[kind].memory
        return self.memory if memory is None else min(self.memory, memory)

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
        unit_costs = problem.units_on[problem.kind_of[rank]]
        for u in members:
            units[u] = unit_costs[u]
    return replace(problem, units=tuple(units), kinds=())


def channels(values: Sequence[Value], home: Sequence[int]) -> dict[Message, list[int]]:
    """The messages between stages when unit u runs on stage `home[u]`, with the positions of the values they carry.

    A value goes from its maker's stage straight to every other stage that reads it. Its gradient visits the stages
    of the readers that give one, from the last reader to the first, and then goes to the maker's.
    """
    channels_of: dict[Message, list[int]] = {}

    def carry(kind: str, source: int, destination: int, position: int) -> None:
        carried = channels_of.setdefault((kind, source, destination), [])
        if not carried or carried[-1] != position:
            carried.append(position)

    for position, value in enumerate(values):
        maker = home[value.maker]
        for reader in value.readers:
            if home[reader] != maker and position not in channels_of.get(("F", maker, home[reader]), ()):
                carry("F", maker, home[reader], position)
        here = None
        for reader, needed in reversed(list(zip(value.readers, value.gradient))):
            if not needed:
                continue
            if here is not None and here != home[reader]:
                carry("B", here, home[reader], position)
            here = home[reader]
        if here is not None and here != maker:
            carry("B", here, maker, position)
    return dict(sorted(channels_of.items()))


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


# --- The units of a problem as a few chains --------------------------------------------------------------------------
#
# Terms
#   before     unit a comes before unit b: b reads what a makes, or both give a gradient of one value and a reads it
#              first (the gradient visits b, then a). A set of units can be a stage if nothing outside lies between two
#              of them
#   chain      units each of which comes right before the next; every unit stands on one chain, the longest chain is
#              last
#   ramps      longest paths of one microbatch, in seconds: up to the end of F or B of a unit, and from their start to
#              the end of everything
# For frontiers and segments see csc.planning.segment_bounds.


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Stages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Branches:
    """chains[c]: its units in order. place[u]: (chain, position) of unit u. after[u], before[u]: what has to be in the
    same or a later, an earlier stage.
    """

    chains: tuple[tuple[int, ...], ...]
    place: tuple[tuple[int, int], ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ramps:
    """Seconds of the longest paths of one microbatch of scale 1, by unit.

    to_forward, to_backward: until the end of its F, its B. from_forward, from_backward: from the start of its F, its B,
    until nothing is left to do. forward_edges, backward_edges: (u, v) where F of v waits for F of u, B of v for B of u.
    """

    to_forward: Floats
    to_backward: Floats
    from_forward: Floats
    from_backward: Floats
    forward_edges: tuple[tuple[int, int], ...]
    backward_edges: tuple[tuple[int, int], ...]

    @property
    def round_trip(self) -> float:
        """Seconds of one microbatch of scale 1 alone."""
        return float(self.from_forward.max(initial=0.0))


def orders(problem: Problem) -> list[tuple[int, int]]:
    """Every (a, b) such that unit a comes before unit b."""
    links_found = set()
    for value in problem.values:
        links_found |= {(value.maker, reader) for reader in value.readers}
        giving = [reader for reader, has_gradient in zip(value.readers, value.gradient) if has_gradient]
        links_found |= set(itertools.pairwise(giving))
    return sorted(links_found)


def branches(problem: Problem) -> Branches:
    """Cover the units with chains: the longest path first, then the longest of what is left, and so on."""
    count = len(problem.units)
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in orders(problem):
        before[b].append(a)
        after[a].append(b)
    free = [True] * count
    chains: list[tuple[int, ...]] = []
    while any(free):
        length, previous = [0] * count, [-1] * count
        for u in range(count):
            if free[u]:
                best = max((a for a in before[u] if free[a]), key=lambda a: (length[a], a), default=-1)
                length[u], previous[u] = (length[best] if best >= 0 else 0) + 1, best
        u = max(range(count), key=lambda u: (length[u], -u))
        path: list[int] = []
        while u >= 0:
            path.append(u)
            free[u] = False
            u = previous[u]
        chains.append(tuple(reversed(path)))
    chains.reverse()
    place = [(0, 0)] * count
    for c, chain in enumerate(chains):
        for position, u in enumerate(chain):
            place[u] = (c, position)
    return Branches(tuple(chains), tuple(place), tuple(map(tuple, before)), tuple(map(tuple, after)))


def ramps(problem: Problem) -> Ramps:
    """Longest paths over F, B and W of one microbatch; messages take no time. Linear in the units and edges."""
    units, count = problem.units, len(problem.units)
    forward = sorted({(value.maker, reader) for value in problem.values for reader in value.readers})
    backward = set()
    for value in problem.values:
        visits = [reader for reader, has_gradient in reversed(list(zip(value.readers, value.gradient))) if has_gradient]
        backward |= set(zip(visits, [*visits[1:], value.maker]))
    makers: list[list[int]] = [[] for _ in units]
    readers: list[list[int]] = [[] for _ in units]
    for u, v in forward:
        makers[v].append(u)
        readers[u].append(v)
    later: list[list[int]] = [[] for _ in units]
    earlier: list[list[int]] = [[] for _ in units]
    for u, v in sorted(backward):
        later[v].append(u)
        earlier[u].append(v)
    to_forward, to_backward, from_forward, from_backward = (np.zeros(count) for _ in range(4))
    for u, unit in enumerate(units):
        to_forward[u] = max((to_forward[v] for v in makers[u]), default=0.0) + unit.forward
        rest = max((from_backward[v] for v in earlier[u]), default=0.0)
        from_backward[u] = unit.backward_input + max(rest, unit.backward_weight)
    for u, unit in reversed(list(enumerate(units))):
        ready = max((to_backward[v] for v in later[u]), default=0.0)
        to_backward[u] = max(ready, to_forward[u]) + unit.backward_input
        rest = max((from_forward[v] for v in readers[u]), default=0.0)
        from_forward[u] = unit.forward + max(rest, from_backward[u])
    return Ramps(to_forward, to_backward, from_forward, from_backward, tuple(forward), tuple(sorted(backward)))


def numbered(found: Branches, home: Sequence[int]) -> Stages:
    """The stages of units that go to the same `home`, in an order in which values go from lower to higher stages.

    Of stages that do not wait for each other the one with the first unit comes first; units are in order. InputError
    if stages wait for each other in a circle.
    """
    members: dict[int, list[int]] = {}
    for unit, stage in enumerate(home):
        members.setdefault(stage, []).append(unit)
    edges = {(home[a], home[u]) for u, before in enumerate(found.before) for a in before if home[a] != home[u]}
    waits = dict.fromkeys(members, 0)
    readers: dict[int, list[int]] = {stage: [] for stage in members}
    for a, b in edges:
        waits[b] += 1
        readers[a].append(b)
    ready = [(units[0], stage) for stage, units in members.items() if not waits[stage]]
    heapq.heapify(ready)
    stages = []
    while ready:
        _, stage = heapq.heappop(ready)
        stages.append(tuple(members[stage]))
        for reader in readers[stage]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (members[reader][0], reader))
    if len(stages) < len(members):
        raise InputError(
            "these stages wait for each other in a circle", "partition", "Move the units between them into one of them"
        )
    return tuple(stages)


# --- Whether the numbers of a problem, and of what is asked of a plan, are numbers that can be planned with ----------


BYTES = ("saved", "stashed", "state", "gathered", "working")


def check_figures(problem: Problem) -> None:
    """Every time and size is finite and at least 0, the memory is one number, ranks and microbatches are whole, every
    microbatch has a size, values lead from units to later ones. Memory below 0 is what a limit leaves that constants
    alone exceed: the partition says what would fit.
    """
    memory = problem.memory
    if memory is not None and not _number(memory):
        raise InputError(
            f"the memory is {memory!r}, and has to be one number of bytes",
            "memory",
            "Give ranks that differ as kinds, each with its own",
        )
    if memory is not None and not math.isfinite(memory):
        raise InputError(f"a rank cannot work with {memory} bytes of memory", "memory", "Give a number, or no limit")
    per_node = problem.network.ranks_per_node
    _check_whole("ranks", problem.ranks, "Ask for at least 1")
    _check_whole("microbatches", problem.microbatches, "Ask for at least 1")
    if per_node is not None:
        _check_whole("ranks on a node", per_node, "Give at least 1, or None where all are on one")
    _check_kinds(problem)
    _check_values(problem)
    for figure, number in _figures(problem):
        if not _number(number) or not 0 <= number < math.inf:
            raise InputError(
                f"{figure} is {number!r}",
                "planning",
                "Times and sizes are finite and at least 0: look at the hardware profile or the measured costs",
            )
    if problem.scale is not None and len(problem.scale) != problem.microbatches:
        raise InputError(
            f"{len(problem.scale)} microbatches have a size, the step has {problem.microbatches}",
            "planning",
            "Give one size for each microbatch",
        )
    if problem.scale is not None and not sum(problem.scale):
        raise InputError("no microbatch has a size above 0", "planning", "Give the step something to do")
    work = sum(unit.work for unit in problem.units) * (sum(problem.scale or ()) or problem.microbatches)
    if not work < math.inf:
        raise InputError("the step takes more seconds than a float can hold", "planning", "Look at the measured costs")


def _check_values(problem: Problem) -> None:
    """Units that there are, the maker ahead of its readers, and of each reader whether it gives a gradient."""
    for number, value in enumerate(problem.values):
        units_there = range(len(problem.units))
        if not all(unit in units_there for unit in (value.maker, *value.readers)):
            raise InputError(
                f"value {number} goes from unit {value.maker} to {list(value.readers)} of {len(units_there)} units",
                "planning",
                "Number the units from 0, in an order in which they can run",
            )
        if any(reader <= value.maker for reader in value.readers) or len(value.gradient) != len(value.readers):
            raise InputError(
                f"value {number} goes from unit {value.maker} to {list(value.readers)}, with gradients "
                f"{list(value.gradient)}",
                "planning",
                "Units stand in an order in which they can run, and each reader gives a gradient or not",
            )


def _check_kinds(problem: Problem) -> None:
    """Every rank is of one kind and at one place; each kind has seconds of every unit; all have a limit, or none."""
    listed = sorted(rank for kind in problem.kinds for rank in kind.ranks)
    if problem.kinds and listed != list(range(problem.ranks)):
        raise InputError(
            f"the kinds name the ranks {listed}, and there are {problem.ranks}", "planning", "Name each rank once"
        )
    limited = [kind.memory is not None for kind in problem.kinds]
    if any(limited) and not all(limited):
        raise InputError(
            "some kinds of ranks have a memory limit and others have none", "planning", "Give all of them one, or none"
        )
    places = problem.network.places
    if places and len(places) != problem.ranks:
        raise InputError(
            f"the network has places of {len(places)} ranks, and there are {problem.ranks}",
            "planning",
            "Give one for each rank, or none",
        )
    for kind in problem.kinds:
        if len(kind.seconds) != len(problem.units):
            raise InputError(
                f"{kind.name} has the seconds of {len(kind.seconds)} units of {len(problem.units)}",
                "planning",
                "Give those of every unit",
            )


def check_asked(chunks: int | None, effort: float, limit: float | None) -> None:
    """The stages of a rank are a whole number; effort and seconds are finite and at least 0."""
    if chunks is not None:
        _check_whole("stages on a rank", chunks, "Ask for at least 1")
    for name, number in (("effort", effort), ("limit", 0.0 if limit is None else limit)):
        if not _number(number) or not 0 <= number < math.inf:
            raise InputError(f"{name} is {number!r}", "planning", "Give a finite number of at least 0")


def _number(number: object) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool)


def _check_whole(subject: str, number: object, remedy: str) -> None:
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
        raise InputError(f"there cannot be {number!r} {subject}", "planning", remedy)


def _figures(problem: Problem) -> Iterator[tuple[str, float]]:
    """Every number that goes into a plan, and what it is."""
    for unit in problem.units:
        for name in SECONDS:
            yield f"the {name.replace('_', ' ')} time of {unit.name}", getattr(unit, name)
        for name in BYTES:
            yield f"the {name} bytes of {unit.name}", getattr(unit, name)
    for value in problem.values:
        maker = problem.units[value.maker].name
        yield f"the size of a value of {maker}", value.size
        yield f"the size of the gradient of a value of {maker}", value.gradient_size
    yield "what the runtime takes for an action", problem.action
    yield "what it takes for an end of a message", problem.handling
    for number, factor in enumerate(problem.scale or ()):
        yield f"the size of microbatch {number}", factor
    for kind in problem.kinds:
        for unit, seconds in zip(problem.units, kind.seconds):
            for name, figure in zip(SECONDS, seconds):
                yield f"the {name.replace('_', ' ')} time of {unit.name} on {kind.name}", figure
    links = {"of the shards' gathers": problem.gathering}
    ends: tuple[Network | RankNodes, ...] = (problem.network, *problem.network.places)
    for end in ends:
        links |= {"within nodes": end.within, "between nodes": end.between}
        for where, link in links.items():
            yield f"the latency {where}", link.latency
            yield f"the seconds for a byte {where}", _for_a_byte(link.bandwidth)


def _for_a_byte(bandwidth: float) -> float:
    """What is no number stays what it is."""
    if not _number(bandwidth):
        return bandwidth
    return 1 / bandwidth if bandwidth else math.inf


# --- Fewer units for a search: some that are planned as one ----------------------------------------------------------
#
# Terms: see csc.planning.problem. A *lump* is a few units that stay together. The *frontiers* of a problem are as
# many as the product of its chains' lengths but the longest; the search for stages takes about as long.
#
# `lumped` takes runs of units of one chain and one component of which only the first reads from outside and only the
# last is read from outside. With one encoder beside the language model there are none. With three, the frontiers of
# all layers are tens of thousands, and a cut one layer further on makes little difference; moves of single units make
# up for it afterwards.


@dataclass(frozen=True)
class Lumped:
    """problem: the one with fewer units; members[u]: the units that its unit u stands for."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def stages(self, stages: Stages) -> Stages:
        """The stages with the units themselves, in order."""
        return tuple(tuple(sorted(u for lump in stage for u in self.members[lump])) for stage in stages)


def lumped(problem: Problem, most: int) -> Lumped:
    """The problem with lumps as small as `most` frontiers allow."""
    branching = branches(problem)
    short = branching.chains[:-1]
    frontiers = math.prod(len(chain) + 1 for chain in short)
    size = 1 if frontiers <= most else math.ceil((frontiers / most) ** (1 / len(short)))
    home = list(range(len(problem.units)))
    for chain in short if size > 1 else ():
        for run in _runs(problem, branching, chain):
            for i, unit in enumerate(run):
                home[unit] = run[min(i - i % size + size, len(run)) - 1]
    return together(problem, home)


def together(problem: Problem, home: Sequence[int]) -> Lumped:
    """home[u]: the last unit of u's lump, and the first that reads what others of it make. The same problem if every
    unit is alone, or there would be fewer lumps than ranks.
    """
    lasts = sorted(set(home))
    if len(lasts) == len(home) or len(lasts) < problem.ranks:
        return Lumped(problem, tuple((u,) for u in range(len(home))))
    number = {last: i for i, last in enumerate(lasts)}
    members: list[list[int]] = [[] for _ in lasts]
    for unit, last in enumerate(home):
        members[number[last]].append(unit)
    units = tuple(_together([problem.units[u] for u in lump]) for lump in members)
    values = tuple(kept for value in problem.values if (kept := _between(value, [number[h] for h in home])) is not None)
    kinds = tuple(replace(kind, seconds=_taken(kind, members)) for kind in problem.kinds)
    return Lumped(replace(problem, units=units, values=values, kinds=kinds), tuple(map(tuple, members)))


def _taken(kind: RankKind, members: Sequence[Sequence[int]]) -> tuple[tuple[float, float, float], ...]:
    """What lumps take on a rank of this kind."""
    return tuple(tuple(sum(kind.seconds[u][i] for u in lump) for i in range(3)) for lump in members)  # type: ignore[misc]


def _runs(problem: Problem, branching: Branches, chain: Sequence[int]) -> list[list[int]]:
    """The chain in runs that may be lumped."""
    runs = [[chain[0]]]
    for unit in chain[1:]:
        last = runs[-1][-1]
        same = problem.units[unit].component == problem.units[last].component
        if same and branching.before[unit] == (last,) and branching.after[last] == (unit,):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _together(units: Sequence[Unit]) -> Unit:
    """One unit that does and keeps what these do. It stands where the last one does."""
    return Unit(
        name=units[-1].name,
        component=units[-1].component,
        forward=sum(unit.forward for unit in units),
        backward_input=sum(unit.backward_input for unit in units),
        backward_weight=sum(unit.backward_weight for unit in units),
        has_b=any(unit.has_b for unit in units),
        has_w=any(unit.has_w for unit in units),
        saved=sum(unit.saved for unit in units if unit.has_b),
        stashed=sum(unit.stashed for unit in units if unit.has_w),
        state=sum(unit.state for unit in units),
        gathered=sum(unit.gathered for unit in units),
        working=max(unit.working for unit in units),
    )


def _between(value: Value, home: Sequence[int]) -> Value | None:
    """The value among lumps; None if it stays inside one."""
    maker = home[value.maker]
    gradient: dict[int, bool] = {}
    for reader, has_gradient in zip(value.readers, value.gradient):
        if home[reader] != maker:
            gradient[home[reader]] = gradient.get(home[reader], False) or has_gradient
    if not gradient:
        return None
    return replace(value, maker=maker, readers=tuple(gradient), gradient=tuple(gradient.values()))


# --- What each feature of a microbatch costs every unit: loads per stage from a model's numbers at a few sizes -------
#
# Terms
#   feature   a number that a microbatch has: 1, tiles, tokens, the sum of its samples' squared lengths, ...
#   rates     for each feature the seconds and bytes that one of it adds to a unit, or to a value between units
#
# Rates are never below 0: the least squares are those of Lawson and Hanson (1974).


UNIT = ("forward", "backward_input", "backward_weight", "saved", "stashed")
VALUE = ("size", "gradient_size")


@dataclass(frozen=True)
class SizeRates:
    """units[f]: the model's units with what one of feature f adds; values[f]: likewise. error: by how much the fit was
    off for the problems it was made from: the largest difference in seconds of a whole step, relative.
    """

    units: tuple[tuple[Unit, ...], ...]
    values: tuple[tuple[Value, ...], ...]
    error: float


def fitted(problems: Sequence[Problem], features: Sequence[Sequence[float]]) -> SizeRates:
    """Rates by least squares, each number relative to itself. InputError if there are fewer problems than features or
    they are not of one model.
    """
    counts = np.array(features, dtype=np.float64)
    names = {tuple(unit.name for unit in problem.units) for problem in problems}
    if counts.ndim != 2 or len(counts) != len(problems) or len(names) != 1:
        raise InputError(
            "the problems are not of one model, each with its features", "rates", "plan the same model at several sizes"
        )
    if np.linalg.matrix_rank(counts) < counts.shape[1]:
        raise InputError(
            f"{len(problems)} sizes do not tell {counts.shape[1]} features apart", "rates",
            "plan the model at more sizes, in which the features vary apart from each other",
        )  # fmt: skip
    first = problems[0]
    units = [_fitted([problem.units[u] for problem in problems], UNIT, counts) for u in range(len(first.units))]
    values = [_fitted([problem.values[v] for problem in problems], VALUE, counts) for v in range(len(first.values))]
    rates = SizeRates(tuple(zip(*units)), tuple(zip(*values)) or ((),) * counts.shape[1], 0.0)
    return replace(
        rates, error=max(_error(rates, problem, features_of) for problem, features_of in zip(problems, features))
    )


def _fitted(ones: Sequence[Any], figures: Sequence[str], counts: npt.NDArray[np.float64]) -> list[Any]:
    """One unit or value for each feature."""
    solutions: dict[str, npt.NDArray[np.float64]] = {}
    for name in figures:
        numbers = np.array([getattr(values, name) for values in ones], dtype=np.float64)
        weights = 1 / np.where(numbers > 0, numbers, numbers.max() or 1.0)
        scale = counts.max(axis=0)  # columns of one size, or the constant drowns in squares
        solutions[name] = nnls(counts / scale * weights[:, None], numbers * weights)[0] / scale
    changed = [{name: float(solutions[name][f]) for name in figures} for f in range(counts.shape[1])]
    return [replace(ones[0], **changed_values) for changed_values in changed]


def _error(rates: SizeRates, problem: Problem, features: Sequence[float]) -> float:
    right = sum(unit.work for unit in problem.units)
    return abs(sum(unit.work for unit in mean(rates, problem, features).units) / right - 1) if right else 0.0


def mean(rates: SizeRates, problem: Problem, features: Sequence[float]) -> Problem:
    """The problem of a microbatch with these features: that of the mean plans for all."""
    units = [_sum(ones, UNIT, features) for ones in zip(*rates.units)]
    values = [_sum(ones, VALUE, features) for ones in zip(*rates.values)]
    return replace(problem, units=tuple(units), values=tuple(values))


def _sum(ones: Sequence[Any], figures: Sequence[str], features: Sequence[float]) -> Any:
    changed = {name: sum(count * getattr(rate, name) for count, rate in zip(features, ones)) for name in figures}
    return replace(ones[0], **changed)


def loads(
    rates: SizeRates, problem: Problem, stages: Sequence[Sequence[int]], features: Sequence[Sequence[float]]
) -> Loads:
    """What microbatches with these features, of which the first is 1, take on these stages.

    What B and W, one right after the other, take for a moment is that of the largest unit for each feature: at least
    as much as it is.
    """
    bare = replace(problem, scale=None, action=0.0, handling=0.0)
    rate_pipelines = [
        pipeline(replace(bare, units=units, values=values), stages) for units, values in zip(rates.units, rates.values)
    ]
    rate_pipelines[0] = hosted(
        rate_pipelines[0], problem.action, problem.handling
    )  # once for a microbatch, not for each of its tokens
    stage_rates: list[tuple[StageWork, ...]] = list(zip(*(one.stages for one in rate_pipelines)))
    channels = rate_pipelines[0].messages
    return Loads(
        tuple(tuple(map(float, row)) for row in features),
        tuple(stage_rates),
        {channel: tuple(one.messages[channel] for one in rate_pipelines) for channel in channels},
    )
