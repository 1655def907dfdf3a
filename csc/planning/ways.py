"""What is tried: where stages stand, and the partitions for each such placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from csc.errors import InputError
from csc.planning import partition
from csc.planning.partition import MIDDLE, InFlight, balance, candidates, contiguous
from csc.planning.problem import Problem, Stages, Unit
from csc.planning.schedules import placement as placed
from csc.planning.schedules import stages_per_rank
from csc.planning.screen import Style, cost, screen

# --- Partitions for two stages on each rank, balanced by what the two take together ----------------------------------
#
# Terms: the *first* stages are those of which each rank runs one before any rank runs a second; the *cut* is the unit
# with which the second ones begin. Units are taken in order of execution. A *load* is the time of both stages of a
# rank for one microbatch. It has to be as long as that of its neighbours, the two stages do not: much of a frozen
# encoder may share a rank with little of what is trained.


CLOSE = 1.01  # how much larger than the least the largest load of a partition may be
TRIED = 12  # partitions of which a few orders are simulated
KEPT = 2
STYLES: tuple[Style, ...] = ("interleaved-zb", "zb-v", ((0, 1, 2), 1.0, 0.5, False))


def paired(problem: Problem, placement: Sequence[int], actions: float = math.inf) -> list[Stages]:
    """Of the partitions whose largest load is near the least, the fastest under a few orders that keep to the memory of
    the problem. actions: that may be simulated for it; if they are too few to choose, none are.
    """
    ranks = problem.ranks
    if not sorted(placement[:ranks]) == sorted(placement[ranks:]) == list(range(ranks)):
        return []
    pairs = list(_balanced(problem, placement))
    if not pairs:
        return []
    least = min(load for load, _ in pairs)
    close = [stages for load, stages in pairs if load <= CLOSE * least]
    actions_each = 6 * ranks * problem.microbatches * sum(map(cost, STYLES))  # F, B and W of two stages on each rank
    tried = int(min(TRIED, actions // actions_each))
    if tried <= KEPT:
        return close[:: -(-len(close) // KEPT)]
    trials = [screen(problem, stages, placement, STYLES) for stages in close[:: -(-len(close) // tried)]]
    ranked = sorted((trial for trial in trials if trial is not None), key=lambda trial: trial.seconds)
    return [trial.stages for trial in ranked[:KEPT]]


def _balanced(problem: Problem, placement: Sequence[int]) -> Iterator[tuple[float, Stages]]:
    """(largest load, partition) for every cut: the first stages even, then the second ones beside them."""
    count, ranks = len(problem.units), problem.ranks
    works = works_of(problem, placement)
    for cut in range(ranks, count - ranks + 1):
        loads = [0.0] * ranks
        ends: list[int] = []
        for part, (a, b) in enumerate(((0, cut), (cut, count))):
            homes = placement[part * ranks : (part + 1) * ranks]
            works_here = works[part * ranks : (part + 1) * ranks]
            ends += filled(works_here, [loads[rank] for rank in homes], a, b)
            for rank, work, start, end in zip(homes, works_here, [a, *ends[-ranks:]], ends[-ranks:]):
                loads[rank] += sum(work[start:end])
        yield max(loads), tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends))


def works_of(problem: Problem, home: Sequence[int]) -> list[list[float]]:
    """Seconds of all units, F, B and W, on each of these ranks; one list for ranks that are alike."""
    of_kind = [[unit.work for unit in units] for units in problem.units_on]
    return [of_kind[problem.kind_of[rank]] for rank in home]


def filled(
    works: Sequence[Sequence[float]], loads: Sequence[float], first: int = 0, last: int | None = None
) -> list[int]:
    """The end of each of as many non-empty stages as there are loads, in which the largest load with the stage's work
    added is least. works: of each stage what the units take on its rank, of which those from `first` up to `last` are
    divided: as many as stages, or more. Of equals, those whose early stages are the longest.
    """
    last = len(works[0]) if last is None else last
    count = last - first
    spans: dict[int, npt.NDArray[np.float64]] = {}  # [start, end]
    for work in works:
        if id(work) not in spans:
            before = np.concatenate([[0.0], np.cumsum(np.asarray(work[first:last], dtype=np.float64))])
            spans[id(work)] = np.where(np.tri(count + 1, dtype=bool), np.inf, before - before[:, None])
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)  # [end]: the least of the largest loads so far
    starts = []
    for load, work in zip(loads, works):
        load_of = np.maximum(best[:, None], load + spans[id(work)])
        starts.append(count - load_of[::-1].argmin(axis=0))
        best = load_of.min(axis=0)
    ends = [count]
    for row in reversed(starts[1:]):
        ends.append(int(row[ends[-1]]))
    return [first + end for end in reversed(ends)]


# --- What is tried: where stages stand, and the partitions for each such placement -----------------------------------
#
# Terms: see csc.planning.problem and csc.planning.problem. A *placement* is the rank of each stage; *chunks* are the
# stages of a rank. Units are in order of execution.


FUSED = (0.25, 0.5, 0.75, 1.0)  # shares of the ways there and back for partitions under memory limits
CHUNKS = (3, 4, 5, 6, 7, 8, 10, 12, 16)  # stages on a rank that are tried besides one and two
WAIT = (1, 3)  # messages for which partitions leave room
# Ranks times units up to which partitions are searched for thoroughly, and up to which they are searched for at all;
# beyond that only evened out.
THOROUGH, SEARCHED = 4_000, 40_000

Placement = tuple[int, ...]


def checked(problem: Problem, home: Sequence[int]) -> Placement:
    """A placement that names every rank."""
    if set(home) != set(range(problem.ranks)):
        raise InputError(
            f"the placement {list(home)} does not give each of {problem.ranks} ranks a stage",
            "placement",
            f"Name the ranks 0 to {problem.ranks - 1}, each at least once",
        )
    return tuple(home)


def placements(
    problem: Problem, schedule: str, chunks: int | None, stages: Stages | None, placement: Sequence[int] | None
) -> list[Placement]:
    """The placements to try. InputError for more stages than units."""
    ranks, units = problem.ranks, len(problem.units)
    wanted = stages_per_rank(schedule)  # also says if there is no such schedule
    if placement is not None:
        return [checked(problem, placement)]
    if stages is not None:
        if len(stages) % ranks:
            raise InputError(
                f"{len(stages)} stages do not spread evenly over {ranks} ranks", "stages", "Give a placement too"
            )
        chunks = len(stages) // ranks
    elif chunks is not None and chunks * ranks > units:
        raise InputError(
            f"{units} regions cannot fill {chunks * ranks} stages, {chunks} on each of {ranks} ranks",
            "chunks",
            f"Ask for {units // ranks} on a rank at most",
        )
    candidates = [placed(schedule, ranks, wanted if chunks is None else chunks)]
    if schedule == "auto" and (chunks == 2 or (chunks is None and units >= 2 * ranks > 2)):
        candidates += [placed(name, ranks, 2) for name in ("interleaved-1f1b", "zb-v")]
    if schedule == "auto" and chunks is None and ranks > 1:
        candidates += [placed("interleaved-1f1b", ranks, n) for n in CHUNKS if units >= n * ranks]
    if problem.kinds and stages is None:
        turns = partition.orders(problem)
        candidates = [
            [turn[rank] for rank in candidate]
            for candidate in candidates
            for turn in turns[: 1 if len(candidate) > 2 * ranks else None]
        ]
    return list(dict.fromkeys(tuple(candidate) for candidate in candidates))


def partitions(
    problem: Problem,
    home: Sequence[int],
    limits: Sequence[InFlight | None],
    found_before: dict[int, list[Stages]] | None = None,
    actions: float = math.inf,
) -> list[Stages]:
    """Partitions into one stage for each entry of `home`. limits: what the stages of a depth hold, tried in turn.
    found_before: what was searched for other placements of as many stages; it is added to. actions: see
    csc.planning.ways.

    Which are searched for depends on how large the problem is: there is always one. InputError if nothing fits.
    """
    known = {} if found_before is None else found_before
    size = len(home) * len(problem.units)
    if problem.kinds and len(home) == problem.ranks:
        stages_found = [
            *(partition.partitions(problem, home, limits) if size <= SEARCHED else ()),
            *even(problem, home),
        ]
    elif problem.kinds:
        stages_found = [
            *spread(problem, home),
            *(paired(problem, home, actions) if size <= 2 * THOROUGH else ()),
            *even(problem, home),
        ]
    elif len(home) == problem.ranks:
        stages_found = _single(problem, limits, size)
    elif len(home) == 2 * problem.ranks and size <= 2 * THOROUGH:
        if len(home) not in known:
            known[len(home)] = _searched(problem, len(home))
        stages_found = [*known[len(home)], *even(problem, home), *paired(problem, home, actions)]
    else:
        stages_found = [*(spread(problem, home) or _searched(problem, len(home))), *even(problem, home)]
    return list(dict.fromkeys(stages_found))


def _single(problem: Problem, limits: Sequence[InFlight | None], size: int) -> list[Stages]:
    """One stage on a rank."""
    stages_found: list[Stages] = []
    thorough = size <= THOROUGH
    cuts: list[Stages] = []
    if problem.memory is not None or not thorough:
        limited = problem if problem.memory is not None else replace(problem, memory=float("inf"))
        cuts = [stages] if (stages := contiguous(limited)) is not None else []
    if size > SEARCHED:
        return cuts + even(problem, range(problem.ranks))
    for limit in limits:
        exhaustive = thorough and not stages_found
        try:
            stages_found += (
                candidates(problem, limit) if exhaustive else candidates(problem, limit, (MIDDLE,), layouts=False)
            )
        except InputError:
            if limit is limits[-1] and not stages_found:
                raise
        if problem.memory is None or (stages_found and not thorough):
            break
    if problem.memory is not None and thorough:
        with suppress(InputError):
            stages_found += candidates(_fused(problem), limits[0], FUSED, layouts=False)
    stages_found += cuts
    if problem.memory is not None and problem.waiting and thorough:
        stages_found += _with_messages(problem, limits)
    return stages_found if thorough else stages_found + even(problem, range(problem.ranks))


def _with_messages(problem: Problem, limits: Sequence[InFlight | None]) -> list[Stages]:
    """One stage on a rank, in less memory by some of the largest messages: how many wait follows from the order."""
    largest = max((max(value.size, value.gradient_size) for value in problem.values), default=0.0)
    stages_found: list[Stages] = []
    for count in WAIT:
        less = problem.less(count * largest)
        for limit in limits:
            with suppress(InputError):
                stages_found += candidates(less, limit, (MIDDLE,), layouts=False)
        stages = contiguous(less)
        stages_found += [] if stages is None else [stages]
    return stages_found


def _searched(problem: Problem, count: int) -> list[Stages]:
    """More stages than ranks, as if each had a rank: by work, and by work and the ways there and back.

    Memory is the rank's, not the stage's: the first look away from it and let the schedule say what fits.
    """
    every = replace(problem, ranks=count, memory=None)
    stages_found = candidates(every, shares=(0.0, MIDDLE), layouts=False)
    if problem.memory is not None:
        with suppress(InputError):
            share = replace(every, memory=problem.memory * problem.ranks / count)
            stages_found += candidates(share, one_in_flight, (0.0,), layouts=False)
    return stages_found


def spread(problem: Problem, home: Sequence[int]) -> list[Stages]:
    """Stages in turns, n on each rank: the units are divided into n parts, each part among all ranks such that those
    who have much of the parts before get less of it. Divided by work, by forward time, by number; filled from the first
    part on, and from the last.
    """
    ranks, units = problem.ranks, problem.units
    chunks = len(home) // ranks
    if len(home) != chunks * ranks or list(home) != list(home[:ranks]) * chunks or len(home) > len(units):
        return []
    works = works_of(problem, home[:ranks])
    stages_found: list[Stages] = []
    for measure in ([unit.work for unit in units], [unit.forward for unit in units], [1.0] * len(units)):
        starts = _roomy(balance([round(1e9 * seconds) for seconds in measure], chunks), ranks, len(units))
        parts = list(pairwise([*starts, len(units)]))
        for turned in (False, True):
            loads = [0.0] * ranks
            ends: dict[int, list[int]] = {}
            for a, b in reversed(parts) if turned else parts:
                ends[a] = filled(works, [loads[rank] for rank in home[:ranks]], a, b)
                for rank, work, start, end in zip(home, works, [a, *ends[a]], ends[a]):
                    loads[rank] += sum(work[start:end])
            bounds = [0, *(end for a in sorted(ends) for end in ends[a])]
            stages_found.append(tuple(tuple(range(a, b)) for a, b in pairwise(bounds)))
    return list(dict.fromkeys(stages_found))


def _roomy(starts: Sequence[int], ranks: int, count: int) -> list[int]:
    """Where parts begin, moved so that each has a unit for every rank."""
    moved = [max(start, i * ranks) for i, start in enumerate(starts)]
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + ranks)
    return [min(start, count - (len(moved) - i) * ranks) for i, start in enumerate(moved)]


def even(problem: Problem, home: Sequence[int]) -> list[Stages]:
    """The units in their order in stages on these ranks, of which the longest is as short as it can be: blind to what
    is frozen, and by all work.
    """
    if problem.kinds:
        ends = filled(works_of(problem, home), [0.0] * len(home))
        return [tuple(tuple(range(a, b)) for a, b in pairwise([0, *ends]))]
    count = len(home)
    measures: tuple[Callable[[Unit], float], ...] = (lambda unit: unit.forward, lambda unit: unit.work)
    stages_found = []
    for seconds in measures:
        starts = balance([round(1e9 * seconds(unit)) for unit in problem.units], count)
        stages_found.append(tuple(tuple(range(a, b)) for a, b in pairwise([*starts, len(problem.units)])))
    return stages_found


def _fused(problem: Problem) -> Problem:
    """The problem in which gradients come back only after W, as they do where memory lets no W wait."""
    units = (
        replace(unit, backward_input=unit.backward_input + unit.backward_weight, backward_weight=0.0)
        for unit in problem.units
    )
    return replace(problem, units=tuple(units))


def one_in_flight(depth: int) -> float:
    """In flight at the least: schedules that look at the memory slow down rather than hold more."""
    return 1.0
