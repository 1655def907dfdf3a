"""Which values F keeps for B and which B makes again: a minimum cut.

Terms
  step      one call of F, or a value that enters it; `inputs` are the steps it reads
  price     what one second of work is worth in bytes kept for it: 0 keeps the fewest bytes
  kept      bytes of the steps that F keeps; rematerialised: seconds of those that B runs again

A step that B needs is there if F keeps it, or if B runs it again, for which its own inputs have to be there. The least
`kept + price * rematerialised` is a minimum cut: every step has two ends, in and out; cutting between them keeps it
(its bytes), leaving "in" on B's side runs it again (its price), and whoever is run again pulls its inputs' ends to B's
side.
(PyTorch's own partitioner cuts a graph like this one; it bans costly calls where this one prices them.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

UNIT = 1024  # of a byte: room below one byte, so that of equal cuts the one with fewer repeated steps is taken
DEAREST = 1e30  # bytes a second: nothing is made again that can be kept


@dataclass(frozen=True)
class Candidate:
    """size: bytes that keeping it takes; None: it cannot be kept. seconds: of running it again; None: it cannot be."""

    inputs: tuple[int, ...] = ()
    size: int | None = 0
    seconds: float | None = 0.0


@dataclass(frozen=True)
class StashChoice:
    """kept_steps: what F keeps; again: what B runs again. price: the highest at which this is best."""

    kept_steps: frozenset[int]
    kept: int
    rematerialised: float
    price: float
    again: frozenset[int] = frozenset()


def least(steps: Sequence[Candidate], needed: Iterable[int], price: float) -> StashChoice:
    """The least kept + price * rematerialised, with price finite and at least 0. Inputs of a step come before it.

    ValueError if something needed can neither be kept nor made again.
    """
    wanted = sorted(set(needed))
    graph = nx.DiGraph()
    graph.add_node("F")
    graph.add_node("B")
    for i in _above(steps, wanted):
        step = steps[i]
        _edge(graph, ("in", i), ("out", i), None if step.size is None else step.size * UNIT)
        _edge(graph, "F", ("in", i), None if step.seconds is None else _worth(step.seconds, price))
        for used in step.inputs:
            _edge(graph, ("out", used), ("in", i), None)
    for i in wanted:
        _edge(graph, ("out", i), "B", None)
    try:
        _, (_, later) = nx.minimum_cut(graph, "F", "B", flow_func=boykov_kolmogorov)
    except nx.NetworkXUnbounded:
        raise ValueError("a step that B needs can neither be kept nor made again") from None
    kept = frozenset(i for i in range(len(steps)) if ("out", i) in later and ("in", i) not in later)
    return _saving(steps, kept, [i for i in range(len(steps)) if ("in", i) in later], price)


def _worth(seconds: float, price: float) -> int:
    return round(seconds * price * UNIT) + (1 if seconds else 0)


def _edge(graph: nx.DiGraph, source: object, target: object, capacity: int | None) -> None:
    """An edge; without a capacity it cannot be cut."""
    if capacity is None:
        graph.add_edge(source, target)
    else:
        graph.add_edge(source, target, capacity=capacity)


def _above(steps: Sequence[Candidate], wanted: Sequence[int]) -> list[int]:
    """What the wanted steps depend on, themselves included."""
    above: set[int] = set()
    stack = list(wanted)
    while stack:
        i = stack.pop()
        if i not in above:
            above.add(i)
            stack.extend(steps[i].inputs)
    return sorted(above)


def _saving(steps: Sequence[Candidate], kept: frozenset[int], again: Sequence[int], price: float) -> StashChoice:
    work = sum(steps[i].seconds or 0.0 for i in again)
    return StashChoice(kept, sum(steps[i].size or 0 for i in kept), work, price, frozenset(again))


def savings(steps: Sequence[Candidate], needed: Iterable[int]) -> list[StashChoice]:
    """The savings that are best at some price, prices falling: the corners of the lower hull of (rematerialised, kept).

    The first makes nothing again that takes time, as far as that can be, and is best up to any price. Between two
    corners the next is looked for at the price at which both cost the same (Eisner and Severance, 1976).
    """
    wanted = sorted(set(needed))
    first = least(steps, wanted, DEAREST)
    last = least(steps, wanted, 0.0)
    corners = [first, *_between(steps, wanted, first, last)]
    if last.kept < corners[-1].kept:
        corners.append(last)
    return [replace(s, price=math.inf if i == 0 else _even(corners[i - 1], s)) for i, s in enumerate(corners)]


def _even(first: StashChoice, second: StashChoice) -> float:
    """The price at which both cost the same."""
    return (first.kept - second.kept) / max(second.rematerialised - first.rematerialised, 1e-30)


def _between(
    steps: Sequence[Candidate], wanted: Sequence[int], first: StashChoice, last: StashChoice
) -> list[StashChoice]:
    if last.kept >= first.kept or last.rematerialised <= first.rematerialised:
        return []
    price = _even(first, last)
    middle = least(steps, wanted, price)
    line = first.kept + price * first.rematerialised
    if middle.kept + price * middle.rematerialised >= line * (1 - 1e-9) or not last.kept < middle.kept < first.kept:
        return []
    return [
        *_between(steps, wanted, first, middle),
        middle,
        *_between(steps, wanted, middle, last),
    ]
