"""Few changes of clock: computes of a rank that follow each other share one, and a change costs seconds.

Terms: see csc.planning.energy.clock_program and csc.planning.energy.frontier. A *run* is computes of a rank between two
changes. The program's prices say what a second of each compute is worth in joules; with them the runs of a rank are its
own business: a dynamic program over its computes takes the runs and clocks of the least joules and priced seconds.
What follows from prices need not fit into the step, so with these runs the program is solved once more, and rounded.

A rank's last run is followed by its first one of the next step: where their clocks differ, that is a change as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from csc.analysis.clocks import ClockCurve, Setting
from csc.errors import InputError
from csc.planning.energy.clock_program import ClockBlock, ClockOptions, Relaxed, relaxed
from csc.planning.energy.clock_rounding import assigned, seconds_of
from csc.planning.energy.step_graph import Waits

Floats = npt.NDArray[np.float64]
Run = tuple[int, int]  # positions of a rank's computes, from and to
DEARER = (1.0, 4.0, 16.0, 64.0)  # times the price of a change, until the runs fit into the step
ROUNDS = 3
SLIGHT = 1e-9  # of the step, for sums of floats


def in_runs(
    waits: Waits, curves: Sequence[ClockCurve], watts: Sequence[float], answer: Relaxed, limit: float, charge: float,
    most: int | None, until: float | None,
) -> list[Setting]:  # fmt: skip
    """The setting of each compute, changes not charged. curves: of each compute. watts: of each rank. answer: of the
    program in which every compute has a clock of its own. charge: seconds of a change. most: changes of a rank in a
    step; None: any number. until: as of csc.planning.energy.clock_program.
    """
    ranks: list[list[int]] = [[] for _ in watts]
    for compute, rank in enumerate(waits.rank_of):
        ranks[rank].append(compute)
    clocks = [_shared([curves[compute] for compute in computes]) for computes in ranks]
    best: tuple[float, list[Setting]] | None = None
    for dearer in DEARER:
        prices = answer.prices
        for _ in range(ROUNDS):
            blocks = []
            for computes, shared, watts_of_rank in zip(ranks, clocks, watts):
                if computes:
                    tables = _RankTables([curves[compute] for compute in computes], shared, watts_of_rank)
                    blocks += _blocks(computes, tables, *_runs(tables, prices[computes], charge * dearer, most), charge)
            least = [0.0] * len(curves)
            for block in blocks:
                for i, compute in enumerate(block.computes):
                    least[compute] = min(choice[i].seconds for choice in block.choices)
            if waits.step(_together(blocks, least)) > limit * (1 + SLIGHT):
                break
            relaxation = relaxed(waits, blocks, sum(watts), limit, until)
            picks = assigned(waits, blocks, relaxation)
            if waits.step(seconds_of(blocks, picks, len(curves))) > limit * (1 + SLIGHT):
                break
            settings: list[Setting | None] = [None] * len(curves)
            for block, pick in zip(blocks, picks):
                for compute, setting in zip(block.computes, block.choices[pick]):
                    settings[compute] = curves[compute].at(setting.clock)
            chosen = [setting for setting in settings if setting is not None]
            worth = sum(setting.joules - watts[waits.rank_of[c]] * setting.seconds for c, setting in enumerate(chosen))
            if best is None or worth < best[0]:
                best = (worth, chosen)
            prices = relaxation.prices
        if best is not None:
            return best[1]
    # No run of other clocks fits: each rank at the one clock with which the step is shortest.
    return _alone(waits, curves, ranks, clocks, limit)


def _together(blocks: Sequence[ClockBlock], least: list[float]) -> list[float]:
    """Seconds of each compute at the choice of its block in which all take the least time together."""
    seconds = list(least)
    for block in blocks:
        fastest = min(range(len(block.choices)), key=block.seconds)
        for compute, setting in zip(block.computes, block.choices[fastest]):
            seconds[compute] = setting.seconds
    return seconds


def _alone(
    waits: Waits, curves: Sequence[ClockCurve], ranks: Sequence[Sequence[int]], clocks: Sequence[Sequence[int]],
    limit: float,
) -> list[Setting]:  # fmt: skip
    """Each rank at one clock, that of its fewest seconds or else the highest. InputError if the step is too long with
    either.
    """
    shortest = math.inf
    for highest in (False, True):
        settings: list[Setting] = [curve.fastest for curve in curves]
        for computes, shared in zip(ranks, clocks):
            totals = {clock: sum(curves[compute].at(clock).seconds for compute in computes) for clock in shared}
            for compute in computes:
                settings[compute] = curves[compute].at(shared[0] if highest else min(totals, key=totals.__getitem__))
        step = waits.step([setting.seconds for setting in settings])
        shortest = min(step, shortest)
        if step <= limit * (1 + SLIGHT):
            return settings
    raise InputError(
        f"with so few changes of clock the step takes {shortest:.6g} s, and {limit:.6g} s is the limit", "changes",
        f"allow {shortest / limit - 1:.2%} more time, or more changes",
    )  # fmt: skip


def _shared(curves: Sequence[ClockCurve]) -> list[int]:
    """The clocks that all of these were measured at, the highest first."""
    common = set.intersection(*({setting.clock for setting in curve.settings} for curve in curves)) if curves else set()
    if curves and not common:
        raise InputError(
            "the curves of a rank's computes have no clock in common", curves[0].where,
            "measure forwards and backwards at the same clocks",
        )  # fmt: skip
    return sorted(common, reverse=True)


class _RankTables:
    """Seconds and worth of a rank's computes [compute, clock]."""

    def __init__(self, curves: Sequence[ClockCurve], clocks: Sequence[int], watts: float) -> None:
        self.clocks, self.watts = list(clocks), watts
        known: dict[int, list[Setting]] = {}
        self.settings = [known.setdefault(id(c), [c.at(clock) for clock in clocks]) for c in curves]
        self.seconds = np.array([[setting.seconds for setting in row] for row in self.settings])
        self.worth = np.array([[s.joules - watts * s.seconds for s in row] for row in self.settings])


def _runs(tables: _RankTables, prices: Floats, charge: float, most: int | None) -> tuple[list[Run], bool]:
    """The runs of the least worth and priced seconds; and whether the last one has the clock of the first, so that the
    next step begins without a change. Made for each first clock, since the last one counts with it.
    """
    cost = tables.worth + prices[:, None] * tables.seconds
    computes, clocks = cost.shape
    changing = prices * charge
    counted = most is not None
    layers = min(most, computes) if most is not None else 0
    value = np.full((clocks, layers + 1, clocks), math.inf)  # [first clock, changes, clock]: the least until here
    value[np.arange(clocks), 0, np.arange(clocks)] = cost[0]
    changed = np.zeros((computes, clocks, layers + 1, clocks), bool)
    came = np.zeros((computes, clocks, layers + 1), np.int32)
    for i in range(1, computes):
        least, clock = value.min(axis=2) + changing[i], value.argmin(axis=2)
        if counted:
            least = np.concatenate([np.full((clocks, 1), math.inf), least[:, :-1]], axis=1)
            clock = np.concatenate([np.zeros((clocks, 1), int), clock[:, :-1]], axis=1)
        came[i] = clock
        changed[i] = least[:, :, None] < value
        value = np.minimum(value, least[:, :, None]) + cost[i]
    apart = (1 - np.eye(clocks))[:, None, :]  # the next step begins with a change
    total = value + changing[0] * apart
    if counted:
        total = np.where(np.arange(layers + 1)[None, :, None] + apart > layers, math.inf, total)
    first, layer, clock = (int(place) for place in np.unravel_index(int(np.argmin(total)), total.shape))
    closed = first == clock
    bounds = [computes]
    for i in range(computes - 1, 0, -1):
        if changed[i, first, layer, clock]:
            bounds.append(i)
            clock = int(came[i, first, layer])
            layer -= counted
    bounds = [*reversed(bounds)]
    return list(zip([0, *bounds], bounds)), closed


def _blocks(
    computes: Sequence[int], tables: _RankTables, runs: Sequence[Run], closed: bool, charge: float
) -> list[ClockBlock]:  # fmt: skip
    """A block for each run, which begins with a change; with `closed` one for the last and the first run together."""
    parts = [list(range(first, last)) for first, last in runs]
    starts = {part[0] for part in parts} if len(parts) > 1 else set()
    if closed and len(parts) > 1:
        starts.discard(0)
        parts = [parts[0] + parts[-1], *parts[1:-1]]
    blocks_made = []
    for part in parts:
        choices = [
            tuple(_charged(tables.settings[i][k], charge * (i in starts), tables.watts) for i in part)
            for k in range(len(tables.clocks))
        ]
        blocks_made.append(ClockBlock(tuple(computes[i] for i in part), ClockOptions.useful(choices, tables.watts)))
    return blocks_made


def _charged(setting: Setting, more: float, watts: float) -> Setting:
    """The setting of a compute before which the rank waits so long for its clock."""
    return Setting(setting.clock, setting.seconds + more, setting.joules + watts * more) if more else setting
