"""The least joules of a step that no choice of clocks can beat: a linear program, and its proven bound.

Terms: see csc.planning.energy.step_graph and csc.analysis.clocks. The *worth* of a setting is its joules without what
the device would draw while it waits for as long; a step's joules are the worth of all computes and, for every rank, the
waiting watts times the step. A *block* is computes of one rank that run at one clock; alone, a compute may also lie
between two neighbours of the lower convex hull of its (seconds, worth), which makes the program linear.

Every assignment of measured clocks is a point of the program, so its optimum is below them all. What is returned as
`bound` is not the solver's objective but the value of its dual prices, taken from the numbers of the program: whatever
the solver's tolerances, weak duality makes it a lower bound.
Source: Perseus, arXiv 2312.06902, section 4; the linear time-cost tradeoff is Fulkerson's and Kelley's (1961).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import linprog

from csc.analysis.clocks import Setting
from csc.errors import CscError
from csc.planning.energy.step_graph import Waits

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClockOptions:
    """What computes that share a clock may be set to: of each choice their settings, in one order. watts: what their
    rank draws while it waits.
    """

    choices: tuple[tuple[Setting, ...], ...]
    watts: float

    @classmethod
    def useful(cls, choices: Sequence[tuple[Setting, ...]], watts: float) -> ClockOptions:
        """Without the choices that another one beats in both seconds and worth; the fastest first."""
        every = cls(tuple(choices), watts)
        kept: list[tuple[Setting, ...]] = []
        least = math.inf
        for k in sorted(range(len(choices)), key=every.sums.__getitem__):
            if every.sums[k][1] < least:
                kept.append(every.choices[k])
                least = every.sums[k][1]
        return cls(tuple(kept), watts)

    @cached_property
    def sums(self) -> list[tuple[float, float]]:
        """Seconds and worth of each choice, all computes together."""
        sums = []
        for choice in self.choices:
            seconds = sum(setting.seconds for setting in choice)
            sums.append((seconds, sum(setting.joules for setting in choice) - self.watts * seconds))
        return sums

    @cached_property
    def corners(self) -> list[int]:
        """The choices on the lower convex hull of (seconds, worth), the fastest first; of useful ones."""
        kept: list[int] = []
        for k, (seconds, worth) in enumerate(self.sums):
            while len(kept) > 1:
                (s0, w0), (s1, w1) = self.sums[kept[-2]], self.sums[kept[-1]]
                if (s1 - s0) * (worth - w0) > (w1 - w0) * (seconds - s0):
                    break
                kept.pop()
            kept.append(k)
        return kept


@dataclass(frozen=True)
class ClockBlock:
    """Computes at one clock, of one rank, in their order."""

    computes: tuple[int, ...]
    options: ClockOptions

    @property
    def choices(self) -> tuple[tuple[Setting, ...], ...]:
        return self.options.choices

    def seconds(self, choice: int) -> float:
        """Of all its computes."""
        return self.options.sums[choice][0]

    def worth(self, choice: int) -> float:
        """Joules of all its computes, without what waiting as long would take."""
        return self.options.sums[choice][1]


@dataclass(frozen=True)
class Relaxed:
    """bound: joules of all ranks, below any assignment's. seconds: of each compute. step: seconds of the step. prices:
    joules that a second of each compute costs.
    """

    bound: float
    seconds: list[float]
    step: float
    prices: Floats


@dataclass(frozen=True)
class _Columns:
    """What may be taken of each: `most`, for `cost` joules (below 0) each; computes get `longer` seconds each."""

    cost: Floats
    most: Floats
    of: npt.NDArray[np.int64]  # compute and column of each entry
    column: npt.NDArray[np.int64]
    longer: Floats
    shares: list[tuple[int, int]]  # columns (from, to) of which no more than 1 is taken together


def _columns(blocks: Sequence[ClockBlock]) -> _Columns:
    cost: list[float] = []
    most: list[float] = []
    entries: list[tuple[int, int, float]] = []
    shares: list[tuple[int, int]] = []
    for block in blocks:
        if len(block.computes) == 1:
            corners = block.options.corners
            for k, after in pairwise(corners):
                length = block.seconds(after) - block.seconds(k)
                entries.append((block.computes[0], len(cost), 1.0))
                cost.append((block.worth(after) - block.worth(k)) / length)
                most.append(length)
        elif len(block.choices) > 1:
            first = len(cost)
            for choice in range(1, len(block.choices)):
                for compute, base, other in zip(block.computes, block.choices[0], block.choices[choice]):
                    entries.append((compute, len(cost), other.seconds - base.seconds))
                cost.append(block.worth(choice) - block.worth(0))
                most.append(1.0)
            shares.append((first, len(cost)))
    of, column, longer = zip(*entries) if entries else ((), (), ())
    return _Columns(
        np.array(cost), np.array(most), np.array(of, np.int64), np.array(column, np.int64), np.array(longer), shares
    )


def relaxed(
    waits: Waits, blocks: Sequence[ClockBlock], watts: float, limit: float, until: float | None = None
) -> Relaxed:
    """The program's optimum for steps of at most `limit` seconds. blocks: of useful options, which hold every
    compute once. watts: what all ranks draw while they wait, together. until: seconds for which they wait in any case,
    as other pipelines take that long; None: as long as the step takes.

    CscError if the step cannot be that short, which the caller has to know.
    """
    computes = len(waits.computes)
    base, least = np.zeros(computes), np.zeros(computes)
    for block in blocks:
        for i, compute in enumerate(block.computes):
            base[compute] = block.choices[0][i].seconds
            least[compute] = min(choice[i].seconds for choice in block.choices)
    columns = _columns(blocks)
    nodes, step = waits.nodes, waits.nodes  # the step is the column behind those of the nodes
    matrix, right = _rows(waits, base, columns)
    held = until is not None
    cost = np.concatenate([np.zeros(nodes), [0.0 if held else watts], columns.cost])
    early: Floats = np.array(waits.starts(least.tolist()))
    late: Floats = np.array(waits.latest(least.tolist(), limit))
    shortest = waits.step(least.tolist())
    low = np.concatenate([early, [shortest], np.zeros(len(columns.cost))])
    high = np.concatenate([np.maximum(late, early), [max(limit, shortest)], columns.most])
    # Figures near 1, whatever the unit of the step: solvers' tolerances are absolute.
    unit = limit or 1.0
    scale = np.concatenate([np.full(nodes + 1, unit), columns.most])
    solution = linprog(
        cost * scale, matrix @ sparse.diags(scale) / unit, right / unit,
        bounds=np.stack([low / scale, high / scale], axis=1), method="highs-ds",
    )  # fmt: skip
    if solution.status != 0:
        raise CscError(
            f"the linear program of the clocks has no answer: {solution.message}", "energy", "allow a longer step"
        )  # fmt: skip
    fixed = sum(block.worth(0) for block in blocks) + (watts * until if until is not None else 0.0)
    prices = np.maximum(-solution.ineqlin.marginals / unit, 0.0)
    reduced = cost + matrix.T @ prices
    bound = fixed - prices @ right + np.minimum(reduced * low, reduced * high).sum()
    answer = solution.x * scale
    seconds = base.copy()
    np.add.at(seconds, columns.of, columns.longer * answer[step + 1 :][columns.column])
    worth = np.zeros(computes)
    edges = len(waits.edges)
    before = np.fromiter((edge[0] for edge in waits.edges), np.int64, edges)
    inner = before < computes
    np.add.at(worth, before[inner], prices[:edges][inner])
    ends = _ends(waits)
    np.add.at(worth, ends, prices[edges : edges + len(ends)])
    return Relaxed(float(bound), seconds.tolist(), float(answer[step]), worth)


def _ends(waits: Waits) -> list[int]:
    """Computes that nothing waits for: the step ends no earlier than they do."""
    return [node for node in range(len(waits.computes)) if not waits.after[node]]


def _rows(waits: Waits, base: Floats, columns: _Columns) -> tuple[sparse.csr_matrix, Floats]:
    """matrix @ (starts, step, columns) <= right: every edge, every end, and shares of at most 1."""
    computes, nodes, step = len(base), waits.nodes, waits.nodes
    ends = _ends(waits)
    edges = len(waits.edges)
    before = np.array([edge[0] for edge in waits.edges] + ends, np.int64)
    after = np.array([edge[1] for edge in waits.edges] + [step] * len(ends), np.int64)
    delay = np.array([edge[2] for edge in waits.edges] + [0.0] * len(ends))
    rows = np.arange(edges + len(ends))
    lasting = np.where(before < computes, base[np.minimum(before, computes - 1)] if computes else 0.0, 0.0)
    right = -delay - lasting
    # Entries of columns: every row of a compute has those of that compute.
    order = np.argsort(columns.of, kind="stable")
    of, column, longer = columns.of[order], columns.column[order], columns.longer[order]
    first, last = np.searchsorted(of, before, "left"), np.searchsorted(of, before, "right")
    count = last - first
    entry = np.repeat(first - np.concatenate([[0], np.cumsum(count)[:-1]]), count) + np.arange(count.sum())
    row = np.concatenate([rows, rows, np.repeat(rows, count)])
    place = np.concatenate([before, after, nodes + 1 + column[entry]])
    value = np.concatenate([np.ones(len(rows)), -np.ones(len(rows)), longer[entry]])
    taken = len(rows)
    for first_column, last_column in columns.shares:
        width = last_column - first_column
        row = np.concatenate([row, np.full(width, taken)])
        place = np.concatenate([place, nodes + 1 + np.arange(first_column, last_column)])
        value = np.concatenate([value, np.ones(width)])
        right = np.append(right, 1.0)
        taken += 1
    matrix = sparse.csr_matrix((value, (row, place)), shape=(taken, nodes + 1 + len(columns.cost)))
    return matrix, right
