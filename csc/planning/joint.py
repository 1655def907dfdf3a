"""The search of schedule `auto`: partitions, placements and orders together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.partition import candidates, contiguous, homes_of, moves
from csc.planning.partition_bound import Bound, lower_bound, shared_lower_bound
from csc.planning.problem import Branches, Problem, Stages, branches, numbered, pipeline
from csc.planning.schedules.auto import auto, finish, searched_orders
from csc.planning.schedules.auto import lower_bound as makespan_bound
from csc.planning.schedules.greedy import spared
from csc.planning.schedules.named import ORDERS
from csc.planning.schedules.work import WorkTables, excess, makespan, peaks, reserve, room, start_times, state
from csc.planning.screen import (
    FEW,
    GREEDY,
    QUICK,
    TURNS,
    Budget,
    NamedScheduleGreedy,
    Style,
    Trial,
    climb,
    cost,
    fitting,
    polish,
    screen,
)
from csc.planning.ways import Placement, even, one_in_flight, partitions, spread

# --- Small changes of stages and of where they stand: what a search for free placements tries next -------------------
#
# Terms: see csc.planning.problem. An *arrangement* is stages with the rank of each. Every rank keeps a stage.


class Arrangement(NamedTuple):
    """stages[s]: its units; placement[s]: its rank."""

    stages: Stages
    placement: tuple[int, ...]


def changes(found: Branches, now: Arrangement, ranks: int) -> Iterator[Arrangement]:
    """Every small change, those that move the least first."""
    home, where = homes_of(now.stages), dict(enumerate(now.placement))
    for stage, rank in where.items():
        for other in range(ranks):
            if other != rank:
                yield from _arranged(found, home, {**where, stage: other}, ranks)
    for stage, rank in where.items():
        for other in range(stage):
            if where[other] != rank:
                yield from _arranged(found, home, {**where, stage: where[other], other: rank}, ranks)
    for unit, _, target in moves(found, now.stages):
        yield from _arranged(found, [target if u == unit else s for u, s in enumerate(home)], where, ranks)
    new = len(where)
    for stage in range(new):
        for part in parts(found, now.stages[stage]):
            split = [new if u in part else s for u, s in enumerate(home)]
            for other in range(ranks):
                yield from _arranged(found, split, {**where, new: other}, ranks)
    for stage, rank in where.items():
        for other in range(stage):
            if where[other] == rank:
                yield from _arranged(found, [other if s == stage else s for s in home], where, ranks)


def parts(found: Branches, units: Sequence[int]) -> list[frozenset[int]]:
    """What a stage can be divided into: its first units, the others, and those of one chain."""
    listed = sorted(units)
    cuts = [frozenset(listed[:cut]) for cut in range(1, len(listed))]
    cuts += [frozenset(listed[cut:]) for cut in range(1, len(listed))]
    chains = sorted({found.place[u][0] for u in listed})
    cuts += [frozenset(u for u in listed if found.place[u][0] == chain) for chain in chains if len(chains) > 1]
    return list(dict.fromkeys(cuts))


def _arranged(branching: Branches, home: Sequence[int], where: dict[int, int], ranks: int) -> Iterator[Arrangement]:
    """The arrangement, if every rank has a stage and no stages wait for each other in a circle."""
    if len({where[stage] for stage in home}) < ranks:
        return
    try:
        stages = numbered(branching, home)
    except InputError:
        return
    yield Arrangement(stages, tuple(where[home[units[0]]] for units in stages))


# --- Stages on any ranks: what the turns and the V of published schedules leave out ----------------------------------
#
# An encoder's layers on a rank of the language model that would wait, three stages on one rank and one on another:
# from the best plans of fixed placements on, stages are moved, swapped, divided and put together. Every change is
# simulated, with an order made for it under the memory limit, unless a bound already says that it takes too long.
#
# The search goes on from the fastest arrangement that has changes left, and keeps those that are a little slower than
# the best, too: two changes may help where neither does alone.


# Orders that suit any placement; of these, the best few for the first arrangement are made for all that follow.
STYLES: tuple[Style, ...] = (
    ((0, 1, 2), None, 0.0, False),
    ((1, 0, 2), None, 0.5, False),
    ((0, 1, 2), 1.0, 0.5, False),
    ((0, 1, 2), 2.0, 0.0, False),
    ((0, 1, 2), None, 0.0, True),
)
TRIED = 2  # of them, where all are too many
STARTS = 2  # trials that are gone on from beside the best
SLACK = 1.1  # times the best step, up to which an arrangement is gone on from
PATIENCE = 400  # arrangements simulated without a better one
KEPT, LOOK = 10, 100  # arrangements that a closer look is worth, with so many actions for each of the step, or fewer
FREE_ACTIONS = 800_000  # simulated by default; as many microseconds
STEPS = 20  # seconds of a search for each second of a step: what a plan that is 2 % slower loses in 1,000 steps
CLOSER_FREE = 0.3  # of these for a closer look
WORTH = 400  # actions for each of the best step: with fewer, only some arrangements could be looked at
APART, SMALL = 20, 8  # units up to which each is also tried as a stage of its own, and all styles are
NEAR = 1.003  # times what no plan can beat, where it is not worth while
GAIN = 0.997  # an arrangement has to be so much faster: it may have more stages
PRICED = 2_000  # actions simulated, in time, to price an arrangement, before any order is made of it


def rearranged(problem: Problem, best: Trial, trials: Sequence[Trial], budget: Budget, effort: float = 1.0) -> Trial:
    """The best trial after changes of it, and of the first of the others, that shorten the step. Nothing where it takes
    so many actions that few changes could be tried.
    """
    size = len(best.work.lanes) * problem.microbatches
    part = budget.at_most(min(FREE_ACTIONS * effort, 1e6 * STEPS * best.seconds))
    if WORTH * size > FREE_ACTIONS * effort or part.spent:
        return best
    enough = shared_lower_bound(problem).seconds * NEAR
    if best.seconds <= enough:
        return best
    budget.tell("moving stages", best.seconds)
    starts = [best, *sorted(trials, key=lambda trial: trial.seconds)[:STARTS]]
    found = _searched(problem, starts, enough, part.part(1 - CLOSER_FREE))
    limit = GAIN * best.seconds
    found = found[: max(1, int(part.left / (LOOK * size)))]
    for number, trial in enumerate(found):
        other = polish(problem, trial, enough, part.part(1 / (len(found) - number)), effort)
        if other.seconds < limit:
            best, limit = other, other.seconds
    return best


def _searched(problem: Problem, trials: Sequence[Trial], enough: float, budget: Budget) -> list[Trial]:
    """The fastest arrangements found, the trials' own among them, KEPT at most. It ends when one takes `enough`."""
    branching = branches(problem)
    styles = _free_styles(problem, trials[0], budget)
    open_: list[tuple[float, int, Iterator[Arrangement]]] = []
    known: dict[Arrangement, Trial | None] = {}

    def add(arrangement: Arrangement, trial: Trial) -> None:
        known[arrangement] = trial
        heappush(open_, (trial.seconds, len(known), changes(branching, arrangement, problem.ranks)))

    for trial in sorted([*trials, *_apart(problem, trials[0], styles, budget)], key=lambda trial: trial.seconds):
        arrangement = Arrangement(trial.stages, trial.placement)
        if arrangement not in known:
            add(arrangement, trial)
    best, idle = open_[0][0], 0
    while open_ and open_[0][0] <= best * SLACK and best > enough and idle < PATIENCE and not budget.spent:
        other = next(open_[0][2], None)
        if other is None:
            heappop(open_)
        elif other not in known:
            known[other] = None
            if _possible(problem, other, best * SLACK, budget):
                idle += 1
                screened = screen(problem, other.stages, other.placement, styles, best * SLACK, budget)
                if screened is not None and screened.seconds < best * SLACK:
                    add(other, screened)
                    best, idle = (screened.seconds, 0) if screened.seconds < best * (1 - 1e-6) else (best, idle)
    kept = [trial for trial in known.values() if trial is not None]
    return sorted(kept, key=lambda trial: (trial.seconds, len(trial.stages)))[:KEPT]


def _free_styles(problem: Problem, trial: Trial, budget: Budget) -> tuple[Style, ...]:
    """The trial's own style, and those that suit it best."""
    styles: list[tuple[float, int, Style]] = []
    for style in STYLES:
        other = screen(problem, trial.stages, trial.placement, (style,), budget=budget)
        if other is not None:
            styles.append((other.seconds, len(styles), style))
    count = len(STYLES) if len(problem.units) <= SMALL else TRIED
    return tuple(dict.fromkeys([trial.style, *(style for *_, style in sorted(styles)[:count])]))


def _apart(problem: Problem, trial: Trial, styles: Sequence[Style], budget: Budget) -> Iterator[Trial]:
    """The trial with every unit as a stage of its own, where these are few."""
    if len(problem.units) <= APART:
        home = [trial.placement[stage] for stage in homes_of(trial.stages)]
        other = screen(problem, tuple((u,) for u in range(len(home))), home, styles, budget=budget)
        yield from [other] if other is not None else []


def _possible(problem: Problem, other: Arrangement, below: float, budget: Budget) -> bool:
    """Whether it may take less than `below` seconds: its ranks' work, then the ways to it and back."""
    loads = [0.0] * problem.ranks
    for units, rank in zip(other.stages, other.placement):
        unit_costs = problem.units_on[problem.kind_of[rank]]
        loads[rank] += sum(unit_costs[u].work for u in units)
    if max(loads) * sum(problem.scale or (1.0,) * problem.microbatches) >= below:
        return False
    work = WorkTables.of(pipeline(problem, other.stages, other.placement), other.placement, problem.microbatches)
    budget.spend(PRICED)
    try:
        return makespan_bound(work, room(work, problem.limits)) < below
    except InputError:  # it does not fit
        return False


# --- Small changes of a placement: two ranks that differ, or stand on different nodes, change places -----------------
#
# Terms: see csc.planning.screen.


def swapped(problem: Problem, trial: Trial, budget: Budget) -> Trial:
    """The trial after the swaps that shorten its step, until the budget is spent. Nothing where ranks are alike and
    in a row.
    """
    better = True
    while better:
        better = False
        for one, other in _pairs(problem):
            if budget.spent:
                return trial
            change = {one: other, other: one}
            home = [change.get(rank, rank) for rank in trial.placement]
            tried = screen(problem, trial.stages, home, (trial.style,), trial.seconds, budget)
            if tried is not None and tried.seconds < trial.seconds * (1 - 1e-6):
                trial, better = tried, True
    return trial


def _pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    places = problem.network.places
    for one in range(problem.ranks):
        for other in range(one + 1, problem.ranks):
            apart = bool(places) and places[one].nodes != places[other].nodes
            if apart or problem.kind_of[one] != problem.kind_of[other]:
                yield one, other


# --- The published schedules as they are: what a plan has to be at least as good as ----------------------------------
#
# Terms: see csc.planning.ways and csc.planning.screen. A search makes its own orders of these, with B and W apart
# wherever there is room. As published, they may hold less; and they are few, so all of them are looked at, whatever
# else a search has time for.


PUBLISHED_KEPT = 2
# With one stage on each rank, and with more; GPipe is never faster than those that hold less.
ALONE, NAMES = ("1f1b", "zb-h1", "zb-h2", "eager-1f1b"), ("interleaved-1f1b", "interleaved-zb", "zb-v")
CUTS = 20_000  # stages times units up to which cuts by csc's bound are made


def published(problem: Problem, ways: Sequence[Placement], fixed: Stages | None, budget: Budget) -> list[Trial]:
    """Of every placement, every schedule that runs on it and every split, as long as the budget allows it."""
    trials: list[Trial] = []
    for home in ways:
        for stages in [fixed] if fixed else splits(problem, home):
            trials += _on(problem, stages, home, budget)
            if trials and budget.spent:
                return _best(problem, trials)
    return _best(problem, trials)


def _best(problem: Problem, trials: Sequence[Trial]) -> list[Trial]:
    kept: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: trial.seconds):
        if len(kept) < PUBLISHED_KEPT and trial.seconds < math.inf and _fits(problem, trial):
            kept.append(trial)
    return kept


def splits(problem: Problem, home: Placement) -> list[Stages]:
    """In order of execution."""
    stages_found = even(problem, home)
    if not problem.kinds and len(home) * len(problem.units) <= CUTS:
        aware = contiguous(replace(problem, ranks=len(home), memory=math.inf))
        stages_found += [] if aware is None else [aware]
    return list(dict.fromkeys(stages_found))


def _on(problem: Problem, stages: Stages, home: Placement, budget: Budget) -> Iterator[Trial]:
    work = WorkTables.of(pipeline(problem, stages, home), home, problem.microbatches)
    try:
        allowed = room(work, problem.limits)
    except InputError:
        return
    for name in NAMES if len(home) > problem.ranks else ALONE:
        if budget.spent and name not in (ALONE[0], NAMES[0]):
            return
        try:
            orders = ORDERS[name](work, allowed)
        except InputError:
            continue  # it wants its stages elsewhere
        budget.spend(len(work.lanes) * work.microbatches)
        yield Trial(stages, home, makespan(work, orders), name, work, orders, _held(work, orders, allowed))


def _held(work: WorkTables, orders: Sequence[Sequence[int]], allowed: Sequence[float] | None) -> list[float] | None:
    """What the orders hold themselves, so that changes of them leave the rest to messages; enough for other orders."""
    if allowed is None:
        return None
    needed = (reserve(work, rank).most for rank in range(work.ranks))
    return [min(has, max(rank_peaks)) for has, *rank_peaks in zip(allowed, peaks(work, orders), needed)]


def _fits(problem: Problem, trial: Trial) -> bool:
    allowed = room(trial.work, problem.limits)
    if allowed is None:
        return True
    if problem.waiting:
        return excess(trial.work, trial.orders, allowed) is None
    return all(most <= has * (1 + 1e-9) for most, has in zip(peaks(trial.work, trial.orders), allowed))


# --- Drafts: what even cuts come to on every placement, each under the orders that do best there ---------------------
#
# Terms: see csc.planning.ways and csc.planning.screen.
#
# Where a step has many actions, the search of partitions takes so long that few of them are ever ordered, and most of
# the time on few placements. A draft searches for nothing: units evened out by work over all stages of a placement,
# and a greedy order in the turns of the published schedule with B and W apart. It takes a small part of the time, and
# where stages are many it is often the better plan. Of the placements on which that is fastest more cuts are looked
# at.


CLOSER_DRAFTS = 3  # placements of which more cuts are looked at
LARGE = 10_000  # actions of a step, beyond which only these numbers of stages on a rank are looked at
SOME = (1, 2, 4, 6, 8, 12)
DRAFTED_ALONE: tuple[Style, ...] = ("1f1b", "zb-h1", "eager-1f1b", ((0, 1, 2), None, 0.0, False))
DRAFTED_TURNS: tuple[Style, ...] = (NamedScheduleGreedy("interleaved-zb", fused=False),)
FOLDED: tuple[Style, ...] = ("zb-v",)


def drafts(problem: Problem, ways: Sequence[Placement], fixed: Stages | None, budget: Budget) -> list[Trial]:
    """fixed: the stages, if they are given. Once something is found it ends when the budget is spent."""
    trials_of: dict[Placement, list[Trial]] = {}

    def look(home: Placement, cuts: Sequence[Stages]) -> None:
        for stages in cuts:
            best = min((trial.seconds for listed in trials_of.values() for trial in listed), default=math.inf)
            if trials_of and budget.spent:
                return
            trial = screen(problem, stages, home, _draft_styles(problem, home), best, budget)
            if trial is not None:
                trials_of.setdefault(home, []).append(trial)

    for home in ways if fixed else _some(problem, ways):
        look(home, [fixed] if fixed else _first(problem, home))
    if not fixed and not problem.kinds:
        for home in sorted(trials_of, key=lambda placement: trials_of[placement][0].seconds)[:CLOSER_DRAFTS]:
            look(home, spread(problem, home))
    return sorted((trial for listed in trials_of.values() for trial in listed), key=lambda trial: trial.seconds)


def _some(problem: Problem, candidates: Sequence[Placement]) -> list[Placement]:
    actions = 3 * problem.microbatches
    return [home for home in candidates if actions * len(home) <= LARGE or len(home) // problem.ranks in SOME]


def _first(problem: Problem, home: Placement) -> list[Stages]:
    stages_found = even(problem, home)[-1:]  # by all work
    if len(home) == problem.ranks and problem.memory is not None and not problem.kinds:
        roomy = contiguous(problem)
        stages_found += [] if roomy is None else [roomy]
    return list(dict.fromkeys(stages_found))


def _draft_styles(problem: Problem, home: Placement) -> Sequence[Style]:
    ranks = problem.ranks
    if len(home) == ranks:
        return DRAFTED_ALONE
    return DRAFTED_TURNS if home == home[:ranks] * (len(home) // ranks) else FOLDED


# --- The search of schedule `auto`: partitions, placements and orders together ---------------------------------------
#
# Terms: see csc.planning.ways and csc.planning.screen. A *round* looks at many trials; the best of it go on to the
# next.
#
# From many trials, looked at quickly, to few, searched well: the partitions of every placement under a few orders;
# units moved between stages of the best; the full search of orders on what is left; stages of the best on other ranks
# than those of the placements. Nothing depends on time or chance, unless the budget's
# clock ends the search.


ACTIONS = 8e6  # simulated by default, below a microsecond each
AT_LEAST = 16  # for each action of the step with one stage on a rank, however many these are
FINALISTS = 2  # trials that get more than a quick look
SHARED = 0.999  # several stages on a rank have to be this much faster
SEARCH_GAINS = 1.05  # at most by this factor is a plan expected to get faster after a quick look
AUTO = 500  # actions that the search of orders simulates for each action of the step
RULES = 30  # of these, without which it could only try published orders again, and fewer than ten rules
# Of what is left of the budget, at most this goes into: one stage on a rank and two; more of them; what becomes of the
# best with one stage on a rank, if others are as fast; and of that a closer look, moves of units, changes of the order.
FIRST, DEEP, HALF = 0.3, 0.25, 0.5
CLOSER, MOVED, CHANGED = 0.3, 0.3, 0.4
PAIRED = 0.1  # at most, into partitions for two stages on a rank, for each placement
PUBLISHED = 0.05  # at most, into schedules as they are published
DRAFTED = 0.3  # the same into drafts
SWAPPED = 0.2  # the same where ranks differ


@dataclass(frozen=True)
class JointPlan:
    """The best plan. bound: of plans with one stage on a rank, None if there are fewer units than ranks."""

    seconds: float
    stages: Stages
    placement: Placement
    schedule: Schedule
    bound: Bound | None


def budget_of(problem: Problem, effort: float) -> float:
    """Actions that a search simulates, all in all."""
    return max(ACTIONS * effort, float(AT_LEAST * 3 * problem.ranks * problem.microbatches))


def searched(
    problem: Problem,
    ways: Sequence[Placement],
    fixed: Stages | None,
    budget: Budget,
    effort: float = 1.0,
    swaps: bool = False,
    free: bool = False,
) -> JointPlan:
    """The best plan found. fixed: the stages, if they are given. swaps: ranks may change places. free: and stages may
    stand on any rank, in any number. InputError if the memory is too small for any.
    """
    bound = lower_bound(problem) if len(problem.units) >= problem.ranks else None
    enough = bound.seconds * (1 + 1e-6) if bound else 0.0
    known = published(problem, ways, fixed, budget.part(PUBLISHED))
    known += drafts(problem, ways, fixed, budget.part(DRAFTED))
    trials = [*known, *_screened(problem, ways, fixed, bound, budget)]
    if not trials and problem.waiting:
        raise InputError("nothing fits with the messages that wait", "plan", "Allow more memory, or more ranks")
    single = [trial for trial in trials if len(trial.placement) == problem.ranks]
    several = [trial for trial in trials if len(trial.placement) != problem.ranks]
    if not trials:  # auto says why
        stages = (
            fixed
            or (partitions(problem, ways[0], [one_in_flight]) if problem.kinds else candidates(problem, one_in_flight))[
                0
            ]
        )
        auto(pipeline(problem, stages, ways[0]), ways[0], problem.microbatches, problem.limits)
    part = budget.part(HALF if several else 1.0)
    best_single = _refined(problem, single, enough, fixed is None, swaps, part, effort)
    limit = SHARED * best_single.seconds if best_single else math.inf
    close = [trial for trial in several if trial.seconds < SEARCH_GAINS * limit]
    best_several = _refined(problem, close, 0.0, fixed is None, swaps, budget, effort)
    best = best_several if best_several is not None and best_several.seconds < limit else best_single
    assert best is not None
    if free:
        best = rearranged(problem, best, trials, budget, effort)
    orders = spared(best.work, best.orders)
    fits = fitting(problem, best.work)
    if fits is not None and not fits(orders, start_times(best.work, orders) or []):
        orders = best.orders
    return JointPlan(
        best.seconds, best.stages, best.placement, finish("auto", best.work, orders, problem.limits), bound
    )


def _screened(
    problem: Problem, candidates: Sequence[Placement], fixed: Stages | None, bound: Bound | None, budget: Budget
) -> list[Trial]:
    """A first look at every placement. Where the budget is small for that, first partitions come before second ones."""
    ranks = problem.ranks
    shallow = [home for home in candidates if len(home) <= 2 * ranks]
    trials: list[Trial] = []
    known: dict[int, list[Stages]] = {}
    for homes, share in ((shallow, FIRST), ([home for home in candidates if home not in shallow], DEEP)):
        part = budget.part(share)
        tried = []  # (which of the placement's partitions, the placement, the partition)
        for home in homes:
            listed = _tried(problem, home, fixed, bound, known, PAIRED * budget.left)
            tried += [(turn, home, stages) for turn, stages in enumerate(listed)]
        size = 3 * problem.microbatches
        wanted = sum(size * len(home) * sum(map(cost, _styles(home, ranks))) for _, home, _ in tried)
        if wanted > part.left:
            tried.sort(key=lambda item: item[0])
        for _, home, stages in tried:
            if trials and part.spent:
                break
            styles = _styles(home, ranks) if wanted <= part.left else QUICK
            trial = screen(problem, stages, home, styles, budget=part)
            if trial is not None:
                trials.append(trial)
                budget.tell(f"{len(home) // ranks} on a rank", min(trial.seconds for trial in trials))
    return trials


def _tried(
    problem: Problem, home: Placement, fixed: Stages | None, bound: Bound | None, known: dict[int, list[Stages]],
    actions: float,
) -> list[Stages]:  # fmt: skip
    """The partitions for a placement."""
    if fixed:
        return [fixed]
    stages_found = partitions(problem, home, [None, one_in_flight], known, actions)
    if len(home) == problem.ranks and bound and not problem.kinds:
        stages_found = [bound.stages, *stages_found]
    return list(dict.fromkeys(stages_found))


def _styles(home: Placement, ranks: int) -> Sequence[Style]:
    if len(home) <= 2 * ranks:
        return FEW if len(home) <= ranks else (*FEW, *TURNS)
    return TURNS if home == home[:ranks] * (len(home) // ranks) else FEW  # turns have no orders for other placements


def _refined(
    problem: Problem,
    trials: Sequence[Trial],
    enough: float,
    climbing: bool,
    swaps: bool,
    budget: Budget,
    effort: float,
) -> Trial | None:
    """What the full search makes of the best of these trials."""
    ranked = sorted(trials, key=lambda trial: trial.seconds)
    if not ranked:
        return None
    closer = budget.part(CLOSER)
    best = ranked[0]
    for trial in _finalists(ranked):
        if closer.spent:
            break
        other = screen(problem, trial.stages, trial.placement, GREEDY, trial.seconds, closer)
        best = min(best, trial, other or trial, key=lambda candidate: candidate.seconds)
    if swaps and best.seconds > enough:
        best = swapped(problem, best, budget.part(SWAPPED))
    if climbing and best.seconds > enough:
        best = climb(problem, best, budget.part(MOVED), effort)
    budget.tell("changing the order", best.seconds)
    best = polish(problem, best, enough, budget.part(CHANGED), effort)
    size = len(best.work.lanes) * problem.microbatches
    allowed = int(min(AUTO * effort * size, budget.left))
    if best.seconds > enough and allowed > RULES * size and not budget.late:
        best = _reordered(problem, best, allowed)
        budget.spend(allowed)
    return best


def _reordered(problem: Problem, trial: Trial, actions: int) -> Trial:
    """The trial under the orders that csc.planning.schedules.auto finds, if these are faster and fit."""
    memory = None if trial.room is None else [has + fixed for has, fixed in zip(trial.room, state(trial.work))]
    orders = searched_orders(trial.work, memory, actions)
    fits = fitting(problem, orders.work)
    if orders.seconds >= trial.seconds or not (
        fits is None or fits(orders.orders, start_times(orders.work, orders.orders) or [])
    ):
        return trial
    return replace(trial, seconds=orders.seconds, work=orders.work, orders=orders.orders)


def _finalists(ranked: Sequence[Trial]) -> list[Trial]:
    """The best trials, and the best with half as many stages on a rank or fewer: those with fewer have shorter orders,
    of which more can be looked at.
    """
    trials = list(ranked[:FINALISTS])
    trials += [trial for trial in ranked if 2 * len(trial.placement) <= len(ranked[0].placement)][:1]
    return list({id(trial): trial for trial in trials}.values())
