"""A quick look at what a partition can do: named schedules, greedy orders, and small changes of the partition."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from csc.errors import InputError
from csc.planning.partition import moved, moves
from csc.planning.problem import Problem, Stages, branches, pipeline
from csc.planning.schedules.auto import Fits, improve
from csc.planning.schedules.greedy import Rule, hastened, settled_all
from csc.planning.schedules.named import ORDERS, depths
from csc.planning.schedules.work import Fitted, WorkTables, excess, fitted, makespan, room

# --- How long a search may go on -------------------------------------------------------------------------------------
#
# Simulated actions are counted, so that its result does not depend on the machine, and a clock may end it.
#
# What a part spends, the whole has spent; what it leaves is there for the parts after it.


Tell = Callable[[str, float], None]


class Budget:
    """actions: to simulate in all. seconds: of wall clock from now on; what was found by then has to do. tell: called
    with what is being done and the seconds of the best step so far.
    """

    def __init__(self, actions: float = math.inf, seconds: float | None = None, tell: Tell | None = None) -> None:
        self.left = actions
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._tell = tell
        self._whole: Budget | None = None

    def part(self, share: float) -> Budget:
        """A budget with a share of what is left, under the same clock."""
        part = Budget(self.left * share, None, self._tell)
        part._end, part._whole = self._end, self
        return part

    def at_most(self, actions: float) -> Budget:
        """A budget of so many actions, or what is left if that is less, under the same clock."""
        part = self.part(1.0)
        part.left = min(actions, self.left)
        return part

    def spend(self, actions: float) -> None:
        """Note that so many actions were simulated."""
        self.left -= actions
        if self._whole is not None:
            self._whole.spend(actions)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._end

    @property
    def spent(self) -> bool:
        """Whether nothing is left, of actions or of time."""
        return self.left <= 0 or self.late

    def tell(self, what: str, seconds: float) -> None:
        """Say what is being done now."""
        if self._tell is not None:
            self._tell(what, seconds)


# --- A quick look at what a partition can do: named schedules, greedy orders, and small changes of the partition -----
#
# Terms: see csc.planning.schedules.work and greedy. A *trial* is a partition on its ranks with the best order found. A
# *style* is a way to make an order.


# A named schedule, or a greedy rule: urgency of F, of B and of W (the least goes first); in flight as a multiple of the
# depth (None: as memory allows); patience and fused as in csc.planning.schedules.greedy.
Rules = tuple[tuple[int, int, int], float | None, float, bool]


@dataclass(frozen=True)
class NamedScheduleGreedy:
    """Greedy in the order of a named schedule: a rank that would wait goes ahead with what is next and ready, and one
    whose memory is full holds back what would not fit.
    """

    name: str
    fused: bool
    patience: float = 0.0


Style = str | Rules | NamedScheduleGreedy
NAMED: tuple[Style, ...] = ("1f1b", "zb-h1", "zb-h2", "eager-1f1b", "interleaved-1f1b", "interleaved-zb", "zb-v")
FEW: tuple[Style, ...] = (
    *NAMED,
    ((0, 1, 2), None, 0.0, False),
    ((0, 1, 2), 1.0, 0.0, False),
    ((0, 1, 2), 1.0, 0.5, False),
    ((0, 1, 2), 2.0, 0.0, False),
    ((1, 0, 2), None, 0.5, False),
    ((0, 1, 2), None, 0.0, True),
    ((1, 0, 2), None, 0.5, True),
)
GREEDY: tuple[Style, ...] = tuple(product(((0, 1, 2), (1, 0, 2)), (None, 1.0, 1.5, 2.0), (0.0, 0.5), (False, True)))

# For several stages on a rank: the published orders first, and what greedy makes of them.
TURNS: tuple[Style, ...] = (
    "interleaved-1f1b",
    "interleaved-zb",
    "zb-v",
    NamedScheduleGreedy("interleaved-1f1b", fused=True),
    NamedScheduleGreedy("interleaved-zb", fused=False),
)
# For steps so large that few orders can be looked at, the most useful first.
QUICK: tuple[Style, ...] = ("1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb", "zb-v", "eager-1f1b")
NAMED_COST, GREEDY_COST = 2, 5  # actions simulated, in time, for each action of an order
COUNTED = 2  # the same for the messages that wait

CLIMB = 120_000  # actions put in order while moving units, by default
LEAST = 20  # changes of an order below which it is not worth while
POLISH_COST = 2  # a change is also made and its critical path walked
POLISH = 500_000  # actions simulated while changing the order, by default


@dataclass(frozen=True)
class Trial:
    """stages, the rank of each, and for each rank the lanes it runs in order; seconds: their makespan. room: bytes for
    activations of each rank that they were made under, with those of messages left out; None: no limit.
    """

    stages: Stages
    placement: tuple[int, ...]
    seconds: float
    style: Style
    work: WorkTables
    orders: list[list[int]]
    room: list[float] | None


def screen(
    problem: Problem,
    stages: Stages,
    placement: Sequence[int],
    styles: Sequence[Style] = FEW,
    below: float = math.inf,
    budget: Budget | None = None,
) -> Trial | None:
    """The best of the orders of these styles. None if a rank's memory cannot hold one microbatch at a time, or if all
    are far from `below` seconds, which is what they have to beat. Once something is found, it ends when the budget is
    spent.
    """
    budget = budget or Budget()
    work = WorkTables.of(pipeline(problem, stages, placement), placement, problem.microbatches)
    try:
        allowed = room(work, problem.limits)
    except InputError:
        return None
    best = None
    for style in styles:
        if best is not None and budget.spent:
            break
        fitted_orders = _fitted(
            work, style, allowed, best.seconds * (1 - 1e-9) if best else below, problem.waiting, budget
        )
        if fitted_orders is not None and fitted_orders.seconds < (best.seconds * (1 - 1e-9) if best else math.inf):
            best = Trial(
                stages, tuple(placement), fitted_orders.seconds, style, work, fitted_orders.orders, fitted_orders.room
            )
    return best


def _fitted(
    work: WorkTables, style: Style, allowed: list[float] | None, best: float, waiting: bool, budget: Budget
) -> Fitted | None:
    """The orders of a style. None if they do not fit, with the messages that wait if those count."""

    def make(room: Sequence[float] | None) -> tuple[list[list[int]], float] | None:
        ordered = _ordered(work, style, room, best)
        if ordered is not None:
            budget.spend((cost(style) + COUNTED * waiting) * len(work.lanes) * work.microbatches)
        return ordered

    if allowed is not None and waiting:
        return fitted(work, make, allowed, best)
    made_orders = make(allowed)
    return None if made_orders is None else Fitted(*made_orders, allowed)


def cost(style: Style) -> float:
    """About how many actions are simulated, for each action of the step, to look at a style."""
    return NAMED_COST if isinstance(style, str) else GREEDY_COST


def _ordered(
    work: WorkTables, style: Style, allowed: Sequence[float] | None, best: float
) -> tuple[list[list[int]], float] | None:
    """The orders of a style and their makespan; None if they do not fit."""
    if isinstance(style, str):
        return _named(work, style, allowed)
    if isinstance(style, NamedScheduleGreedy):
        return _following(work, style, allowed, best)
    return _greedy(work, style, allowed, best)


def _named(work: WorkTables, name: str, allowed: Sequence[float] | None) -> tuple[list[list[int]], float] | None:
    """The orders of a named schedule and their makespan; None if it wants its stages elsewhere or more memory."""
    try:
        orders = settled_all(work, ORDERS[name](work, allowed), allowed)
    except InputError:
        return None
    return None if orders is None else (orders, makespan(work, orders))


def _greedy(
    work: WorkTables, style: Rules, allowed: Sequence[float] | None, best: float
) -> tuple[list[list[int]], float]:
    """The orders of a greedy rule and their makespan; inf if it is far from the best."""
    urgency, ahead, patience, fused = style
    count = work.microbatches
    priority = [[urgency[kind] * count * 2.0 + k for k in range(count)] for kind in range(3)]
    in_flight = None if ahead is None else [max(1, round(ahead * d)) for d in depths(work)]
    lanes = [priority[kind] for _ in work.pipeline.stages for kind in range(3)]
    return hastened(work, Rule(lanes, in_flight, None, allowed, patience, fused), best)


def _following(
    work: WorkTables, style: NamedScheduleGreedy, allowed: Sequence[float] | None, best: float
) -> tuple[list[list[int]], float] | None:
    """As `_greedy`, by the places that actions have in the named schedule; None if it wants its stages elsewhere."""
    try:
        orders = ORDERS[style.name](work, allowed)
    except InputError:
        return None
    priority = [[0.0] * work.microbatches for _ in range(work.size)]
    for order in orders:
        head = [0] * work.size
        for place, entry in enumerate(order):
            lane = work.lane_of[entry]
            for moved_on in (lane,) if entry == lane else (lane, lane + 1):
                priority[moved_on][head[moved_on]] = place + 0.5 * (moved_on - lane)
                head[moved_on] += 1
    return hastened(work, Rule(priority, None, None, allowed, style.patience, style.fused), best)


def climb(problem: Problem, trial: Trial, budget: Budget, effort: float = 1.0) -> Trial:
    """Move one unit at a time to a neighbouring stage while that shortens the step under the trial's own rule, and
    until the budget is spent.
    """
    branching = branches(problem)
    left = max(4, int(CLIMB * effort / (len(trial.work.lanes) * problem.microbatches)))
    better = True
    while better and left > 0:
        better = False
        for unit, source, target in list(moves(branching, trial.stages)):
            if left <= 0 or budget.spent:
                return trial
            if source >= len(trial.stages) or unit not in trial.stages[source] or len(trial.stages[source]) == 1:
                continue
            stages = moved(branching, trial.stages, unit, target)
            if stages is None:
                continue
            left -= 1
            other = screen(problem, stages, trial.placement, (trial.style,), trial.seconds, budget)
            if other is not None and other.seconds < trial.seconds * (1 - 1e-6):
                trial, better = other, True
    return trial


def polish(problem: Problem, trial: Trial, enough: float, budget: Budget, effort: float = 1.0) -> Trial:
    """Local search on the order (csc.planning.schedules.auto), until the makespan is `enough`. Nothing for steps of
    which only a few could be tried.
    """
    size = len(trial.work.lanes) * problem.microbatches
    trials = 0 if budget.late else int(min(POLISH * effort, budget.left / POLISH_COST) / size)
    if trials < LEAST:
        return trial
    budget.spend(POLISH_COST * trials * size)
    fits = fitting(problem, trial.work)
    orders, seconds = improve(trial.work, trial.orders, trial.room, trials, random.Random(0), enough, fits)
    return replace(trial, seconds=seconds, orders=orders)


def fitting(problem: Problem, work: WorkTables) -> Fits | None:
    """Whether orders leave room for the messages that wait; None where these do not count."""
    allowed = room(work, problem.limits)
    if allowed is None or not problem.waiting:
        return None
    return lambda orders, starts: not excess(work, orders, allowed, starts)
