"""Ways back: what is left of a job after ranks failed, and which of the ways to go on gets the most steps done.

Terms
  layout    for each replica its ranks, by stage, the stages that they run, and its microbatches; see Placed
  holder    of a unit: a rank that has its parameters and optimizer state
  move      one unit that a rank lacks, from a holder
  way       smaller   a replica that lost ranks runs on those it has left, from a smaller template, or ends
            borrowed  it takes ranks from the deepest other replicas, which run from smaller templates
            merged    what is left of it joins another replica
            anew      the fastest arrangement of all ranks that are left
            rerouted  nobody moves: peers do the lost rank's microbatches (csc.planning.survive.reroute)

All are pure functions of numbers: every survivor comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from csc.errors import InputError
from csc.planning.problem import Problem, Stages
from csc.planning.survive.reroute import Rerouted, rerouted
from csc.planning.survive.templates import PipelineTemplate, ReplicaArrangement, arranged, arrangements
from csc.simulation.pipeline import Link

Kind = Literal["smaller", "borrowed", "merged", "anew", "rerouted"]
HORIZON = 3600.0  # seconds until the next failure, if nothing is known


@dataclass(frozen=True)
class Placed:
    """One replica. ranks[s]: the rank of stage s; stages[s]: its units."""

    ranks: tuple[int, ...]
    stages: Stages
    microbatches: int


Layout = tuple[Placed, ...]


class StateMove(NamedTuple):
    """A unit's parameters and optimizer state go from one rank to another."""

    unit: int
    source: int
    destination: int
    size: float


@dataclass(frozen=True)
class WayBack:
    """seconds: of a step from then on; moved: until every rank has what it lacks. layout: of the way back; of a
    rerouted one the old layout, whose lost ranks are gone. rerouted: by depth, what the replicas of it run.
    """

    kind: Kind
    layout: Layout
    seconds: float
    moves: tuple[StateMove, ...] = ()
    moved: float = 0.0
    rerouted: Mapping[int, Rerouted] | None = None

    def steps(self, horizon: float) -> float:
        """Done within so many seconds from now."""
        return max(0.0, horizon - self.moved) / self.seconds


def layout_of(arrangement: ReplicaArrangement, templates: Mapping[int, PipelineTemplate]) -> Layout:
    """Replica after replica on ranks 0, 1, ...; the last ranks are to spare."""
    placed, first = [], 0
    for replica in arrangement.replicas:
        ranks = tuple(range(first, first + replica.depth))
        placed.append(Placed(ranks, templates[replica.depth].stages, replica.microbatches))
        first += replica.depth
    return tuple(placed)


def holders(layout: Layout) -> dict[int, tuple[int, ...]]:
    """By unit the ranks that hold it, in the order of replicas."""
    holders_of: dict[int, list[int]] = {}
    for replica in layout:
        for rank, units in zip(replica.ranks, replica.stages):
            for unit in units:
                holders_of.setdefault(unit, []).append(rank)
    return {unit: tuple(ranks) for unit, ranks in sorted(holders_of.items())}


def moves(before: Layout, after: Layout, lost: Collection[int], sizes: Sequence[float]) -> tuple[StateMove, ...]:
    """What ranks of `after` lack, each from the holder that has given the fewest bytes so far.

    Args:
        before: The layout in which ranks failed.
        after: The one to come.
        lost: Ranks that failed.
        sizes: Bytes of each unit's parameters and optimizer state.

    Raises:
        InputError: No rank that is left holds some unit.
    """
    left = {unit: [r for r in ranks if r not in lost] for unit, ranks in holders(before).items()}
    gone = [unit for unit, ranks in left.items() if not ranks]
    if gone:
        raise InputError(
            f"no rank that is left holds {len(gone)} of {len(left)} regions, the first is number {gone[0]}",
            "survive",
            "Go on from the last checkpoint; more replicas survive such a failure",
        )
    sent: dict[int, float] = {}
    found_moves = []
    for replica in after:
        for rank, units in zip(replica.ranks, replica.stages):
            for unit in units:
                if rank not in left[unit]:
                    source = min(left[unit], key=lambda r: (sent.get(r, 0.0), r))
                    sent[source] = sent.get(source, 0.0) + sizes[unit]
                    found_moves.append(StateMove(unit, source, rank, sizes[unit]))
    return tuple(found_moves)


def moving(moves: Sequence[StateMove], link: Link) -> float:
    """Seconds of the moves: each rank sends one after the other and receives one after the other."""
    load: dict[tuple[str, int], float] = {}
    for move in moves:
        for end in (("out", move.source), ("in", move.destination)):
            load[end] = load.get(end, 0.0) + link.seconds(move.size)
    return max(load.values(), default=0.0)


def seated(
    before: Layout, arrangement: ReplicaArrangement, templates: Mapping[int, PipelineTemplate],
    survivors: Collection[int], sizes: Sequence[float],
) -> Layout:  # fmt: skip
    """The arrangement on the survivors: of all ranks and places the pair that keeps the most bytes first, then the
    next, so that what ranks lack is little. Ranks and places that keep nothing come last, in their order.
    """
    held = {rank: set(units) for replica in before for rank, units in zip(replica.ranks, replica.stages)}
    places = [
        (number, stage) for number, replica in enumerate(arrangement.replicas) for stage in range(replica.depth)
    ]  # fmt: skip
    stages = [templates[replica.depth].stages for replica in arrangement.replicas]
    kept = []
    for rank in sorted(survivors):
        held_units = held.get(rank, set())
        for number, stage in places:
            shared = held_units.intersection(stages[number][stage])
            if shared:
                kept.append((-sum(sizes[unit] for unit in shared), rank, number, stage))
    seat: dict[tuple[int, int], int] = {}
    used: set[int] = set()
    for _, rank, number, stage in sorted(kept):
        if rank not in used and (number, stage) not in seat:
            seat[number, stage] = rank
            used.add(rank)
    free = iter(rank for rank in sorted(survivors) if rank not in used)
    for place in places:
        if place not in seat:
            seat[place] = next(free)
    return tuple(
        Placed(tuple(seat[number, s] for s in range(replica.depth)), stages[number], replica.microbatches)
        for number, replica in enumerate(arrangement.replicas)
    )


def ways_back(
    problem: Problem,
    templates: Mapping[int, PipelineTemplate],
    before: Layout,
    lost: Collection[int],
    spare: Collection[int] = (),
    replicas: int = 1,
    horizon: float = HORIZON,
    link: Link | None = None,
) -> list[WayBack]:
    """The ways to go on, the one that gets the most steps done within the horizon first; of equals the one that moves
    fewer bytes.

    Args:
        problem: As `templates` were made from.
        templates: By depth.
        before: What ran. Replicas have the stages of the templates of their depths.
        lost: Ranks that failed.
        spare: Ranks that had nothing to do and are alive.
        replicas: The fewest to go on with; fewer where the ranks that are left have no room for them.
        horizon: Seconds until another failure is to be expected.
        link: That state moves over; None: the slower of the network's.

    Raises:
        InputError: No rank that is left holds some unit, or the ranks that are left cannot hold a replica.
    """
    survivors = sorted({*spare, *(rank for replica in before for rank in replica.ranks)} - set(lost))
    sizes = [unit.state for unit in problem.units]
    moves(before, (), lost, sizes)  # says what is gone
    least = min(templates)
    if len(survivors) < least:
        raise InputError(
            f"{len(survivors)} ranks are left, and a replica takes {least}", "survive",
            f"Go on from the last checkpoint on {least} ranks or more",
        )  # fmt: skip
    link = link or max(
        (problem.network.within, problem.network.between), key=lambda link: (1 / link.bandwidth, link.latency)
    )
    microbatches = sum(replica.microbatches for replica in before)
    wanted = min(replicas, len(survivors) // least)
    found_ways: list[WayBack] = []
    for kind, depths in _depths(before, set(lost), len(survivors), templates).items():
        if len(depths) < wanted:
            continue
        arrangement = arranged(templates, len(survivors), depths, microbatches)
        if arrangement is not None:
            found_ways.append(_way(kind, before, arrangement, templates, survivors, lost, sizes, link))
    best = arrangements(templates, [len(survivors)], microbatches, wanted).get(len(survivors))
    if best is not None:
        found_ways.append(_way("anew", before, best, templates, survivors, lost, sizes, link))
    away = _rerouted(templates, before, set(lost))
    copies = min(sum(rank not in lost for rank in ranks) for ranks in holders(before).values())
    if away is not None and copies >= wanted:
        found_ways.append(away)
    return sorted(found_ways, key=lambda way: (-way.steps(horizon), sum(move.size for move in way.moves)))


def _way(
    kind: Kind, before: Layout, arrangement: ReplicaArrangement, templates: Mapping[int, PipelineTemplate],
    survivors: Sequence[int], lost: Collection[int], sizes: Sequence[float], link: Link,
) -> WayBack:  # fmt: skip
    layout = seated(before, arrangement, templates, survivors, sizes)
    needed = moves(before, layout, lost, sizes)
    return WayBack(kind, layout, arrangement.seconds, needed, moving(needed, link))


def _depths(
    before: Layout, lost: set[int], survivors: int, templates: Mapping[int, PipelineTemplate]
) -> dict[Kind, list[int]]:  # fmt: skip
    """The depths of each way that there is, in the order of the replicas."""
    old = [len(replica.ranks) for replica in before]
    left = [sum(rank not in lost for rank in replica.ranks) for replica in before]
    hit = [i for i, (was, now) in enumerate(zip(old, left)) if now < was]
    if not hit:
        return {}
    depths_of: dict[Kind, list[int]] = {}
    smaller = [_template_within(templates, now) for now in left]
    depths_of["smaller"] = [depth for depth in smaller if depth]
    unhurt = [i for i in range(len(old)) if i not in hit]
    borrowed: list[int] | None = list(left)
    for i in hit:
        while borrowed is not None and borrowed[i] < old[i]:
            lenders = [j for j in range(len(old)) if j not in hit and _template_within(templates, borrowed[j] - 1)]
            if not lenders:
                borrowed = None
                break
            lender = max(lenders, key=lambda j: (borrowed[j], -j))
            borrowed[lender] -= 1
            borrowed[i] += 1
    if borrowed is not None and all(depth in templates for depth in borrowed):
        depths_of["borrowed"] = borrowed
    if unhurt:
        merged = {i: left[i] for i in unhurt}
        for i in hit:
            to = min(merged, key=lambda j: (merged[j], j))
            merged[to] += left[i]
        depths = [_template_within(templates, size) for size in merged.values()]
        depths_of["merged"] = [depth for depth in depths if depth]
    return {kind: depths for kind, depths in depths_of.items() if depths and sum(depths) <= survivors}


def _template_within(templates: Mapping[int, PipelineTemplate], ranks: int) -> int:
    """The deepest template of so many ranks at most; 0 if there is none."""
    return max((depth for depth in templates if depth <= ranks), default=0)


def _rerouted(templates: Mapping[int, PipelineTemplate], before: Layout, lost: set[int]) -> WayBack | None:
    """Replicas of a depth that lost ranks, together; the others as they were."""
    seconds, runs = 0.0, {}
    for depth in sorted({len(replica.ranks) for replica in before}):
        group = [replica for replica in before if len(replica.ranks) == depth]
        gone = [(r, s) for r, replica in enumerate(group) for s, rank in enumerate(replica.ranks) if rank in lost]
        template = templates.get(depth)
        if template is None or any(replica.stages != template.stages for replica in group):
            return None
        if not gone:
            seconds = max([seconds, *(template.seconds(replica.microbatches) for replica in group)])
            continue
        run = rerouted(template, [replica.microbatches for replica in group], gone)
        if run is None:
            return None
        runs[depth] = run
        seconds = max(seconds, run.seconds)
    return WayBack("rerouted", before, seconds, rerouted=runs)
