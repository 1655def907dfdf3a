"""Lower bounds of the makespan of one step: what no partition and no order of work can beat.

Terms: see csc.planning.branches. The proofs are in docs/planning-bound.md. Messages take no time on their way
and memory is left out, so the bounds hold for every network and every memory limit. Where ranks are of several
kinds, see csc.planning.kind_bound.

    stage_bound(problem, units)        seconds: a rank that runs these units as one stage
    lower_bound(problem)               -> Bound: over every partition into one stage on each rank
    shared_lower_bound(problem)        -> Bound: over every plan whatever, several stages on a rank included

For a stage S with summed times F, B, W, with m the sum of the microbatches' scales and r the least of them, and with
the longest paths of one microbatch of scale 1 that arrive from outside before its F (f) and its B (b, at least f + F),
and that leave it after its B (y) and its F (x, at least B + y and B + W):

    bound(S) = max( r (f + x) + m F,  r (f + y) + m (F + B),  r f + m (F + B + W),  r (b + y) + m B,  r b + m (B + W) )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csc.errors import InputError
from csc.planning import kind_bound
from csc.planning.branches import branches, numbered, ramps
from csc.planning.extension import EXACT
from csc.planning.figures import check_figures
from csc.planning.frontiers import least
from csc.planning.pace import paced
from csc.planning.problem import Problem
from csc.planning.segment_bounds import ChainTables, segments, stage_bounds, stages_between

EXACTLY, NEARLY = 4_000, 1e-3  # ranks times units up to which the bound is exact, and how far it may be below elsewhere
SOON = 0.2  # of the way from a cap found impossible to one that was reached: in large problems the first costs little
ALONE = "the time that one microbatch takes through all regions and back"
THERE = "the time that one microbatch takes to get there and back"


@dataclass(frozen=True)
class Bound:
    """seconds that no plan of its kind can beat; stages: a partition for which the bound is as low as that (none for
    plans with several stages on a rank); term: which of its parts is the largest, in words.
    """

    seconds: float
    stages: tuple[tuple[int, ...], ...]
    term: str


def round_trip(problem: Problem) -> float:
    """Seconds of the largest microbatch alone: the longest path through its F, B and W."""
    return ramps(problem).round_trip * max(problem.scale or (1.0,))


def stage_bound(problem: Problem, units: Sequence[int]) -> float:
    """Seconds of the step, at least, if one rank runs `units` and nothing else as one stage.

    InputError if units outside lie between them, which makes them impossible as a stage.
    """
    found = branches(problem)
    chosen = set(units)
    numbered(found, [min(chosen) if u in chosen else u for u in range(len(problem.units))])
    return stage_bounds(segments(problem, found), [units])[0]


def check_ranks(problem: Problem) -> None:
    """InputError unless every rank can have a unit."""
    if problem.ranks < 1:
        raise InputError(f"there cannot be {problem.ranks} stages", "partition", "Ask for at least 1")
    if problem.ranks > len(problem.units):
        raise InputError(
            f"{len(problem.units)} regions cannot fill {problem.ranks} stages",
            "partition",
            f"Ask for at most {len(problem.units)} stages",
        )
    if problem.microbatches < 1:
        raise InputError(f"there cannot be {problem.microbatches} microbatches", "planning", "Ask for at least 1")


def floor_of(problem: Problem, tables: ChainTables) -> float:
    """Seconds below which no partition can be, without looking at any."""
    single = max(stage_bounds(tables, [[u] for u in range(len(problem.units))]))
    work = sum(unit.work for unit in problem.units) * tables.work / problem.ranks
    return max(round_trip(problem), single, work)


def lower_bound(problem: Problem) -> Bound:
    """What no plan with one stage on each rank can beat, whatever its partition and order.

    The minimum, over every acyclic assignment of the units to exactly `ranks` non-empty stages, of the largest
    `stage_bound` of a stage, and one microbatch's whole round trip: exact to a relative 1e-9, in large problems up to
    0.1 % below that. Raised, where that is higher, to what csc.planning.pace proves. InputError for more ranks than
    units.
    """
    check_figures(problem)
    check_ranks(problem)
    if problem.kinds:
        seconds, stages = kind_bound.lower_bound(problem)
        seconds = _with_actions(problem, seconds)
        term = f"the work of one rank at its own speed, and {THERE}"
        return Bound(seconds, stages, ALONE if seconds <= round_trip(problem) * (1 + 1e-9) else term)
    tables = segments(problem, branches(problem))
    floor = floor_of(problem, tables)
    within, share = (EXACT, 0.5) if problem.ranks * len(problem.units) <= EXACTLY else (NEARLY, SOON)
    found = least(tables, problem.ranks, floor, within=within, share=share)
    assert found is not None  # without a memory limit every partition has a finite bound
    seconds, frontiers = max(floor, found[0] / (1 + within) if within > EXACT else found[0]), found[1]
    stages = stages_between(tables, frontiers)
    seconds = _with_actions(problem, seconds)
    higher = paced(problem, tables, problem.ranks, seconds)
    if higher > seconds:
        return Bound(higher, stages, "the pace of the slowest forward, which all microbatches go through")
    costs = stage_bounds(tables, stages)
    worst = max(range(len(stages)), key=lambda s: costs[s])
    term = f"the work of stage {worst}, and {THERE}"
    if costs[worst] < round_trip(problem) * (1 - 1e-9):
        term = ALONE
    return Bound(seconds, stages, term)


def _with_actions(problem: Problem, seconds: float) -> float:
    """With what the runtime takes for actions: a stage whose own bound is above the round trip pays it in every
    microbatch, for its F or for its B, whichever its bound comes from.
    """
    above = seconds > round_trip(problem) * (1 + 1e-9)
    return seconds + problem.microbatches * problem.action if above else seconds


def _runtime_of_a_rank(problem: Problem) -> float:
    """Seconds that every rank's runtime takes at least: an F of each microbatch, and one end of a message if the units
    hang together, since others are on other ranks.
    """
    links = [(value.maker, reader) for value in problem.values for reader in value.readers]
    together = problem.ranks > 1 and len(reached(len(problem.units), links)) == len(problem.units)
    return problem.microbatches * (problem.action + together * problem.handling)


def reached(count: int, links: Sequence[tuple[int, int]]) -> set[int]:
    """Which of `count` units links lead to from the first one, whichever way."""
    beside: list[list[int]] = [[] for _ in range(count)]
    for one, other in links:
        beside[one].append(other)
        beside[other].append(one)
    found, open_ = {0}, [0]
    while open_:
        new = [other for other in beside[open_.pop()] if other not in found]
        found.update(new)
        open_ += dict.fromkeys(new)
    return found


def shared_lower_bound(problem: Problem) -> Bound:
    """What no plan can beat that runs every unit on one rank, with any number of stages on a rank.

    The largest of: one microbatch's round trip; every unit's own `stage_bound`; as each rank waits for its first action
    and has nothing to do after its last one, (all work + the `ranks` shortest ways to a first F + the `ranks` shortest
    ways on after a last action) / ranks; and, as of any k ranks + 1 units some rank has k + 1, the work of the k + 1
    least of the k ranks + 1 largest units, for every k. InputError for more ranks than units.
    """
    check_figures(problem)
    check_ranks(problem)
    paths = ramps(problem)
    tables = segments(problem, branches(problem))
    ahead = sorted(paths.to_forward[u] - unit.forward for u, unit in enumerate(problem.units))
    behind = []
    for u, unit in enumerate(problem.units):
        after_f = float(paths.from_forward[u]) - unit.forward
        after_b = float(paths.from_backward[u]) - unit.backward_input
        behind.append(0.0 if unit.has_w else after_b if unit.has_b else after_f)
    behind.sort()
    n = problem.ranks
    if problem.kinds:
        spread = kind_bound.spread(problem, [a + b for a, b in zip(ahead[:n], behind[:n])])
    else:
        work = sum(unit.work for unit in problem.units) * tables.work
        spread = (work + tables.ramp * (sum(ahead[:n]) + sum(behind[:n]))) / n
    largest = sorted((unit.work for unit in problem.units), reverse=True)
    crowded = max(sum(largest[k * n - k : k * n + 1]) for k in range((len(largest) - 1) // n + 1)) * tables.work
    runtime = _runtime_of_a_rank(problem)
    of_units = stage_bounds(tables, [[u] for u in range(len(problem.units))])
    slowest = max(range(len(of_units)), key=lambda u: of_units[u])
    terms = {
        ALONE: round_trip(problem),
        f"the work of {problem.units[slowest].name}, and {THERE}": of_units[slowest],
        "the largest regions, of which some rank has to run several": crowded + runtime,
        "all work divided equally, and the time that ranks wait for their first and after their last": spread + runtime,
    }
    term = max(terms, key=lambda name: terms[name])
    return Bound(float(terms[term]), (), term)
