"""How others divide a step's samples: each by its own rule, as far as it is published.

Terms: see csc.planning.assign.step. A *division* is the features of each replica's microbatches.

    RIVALS: name -> function of a Division's question -> [replica][microbatch][feature]

    random     shuffled samples, equally many in each microbatch
    sorted     by length, equally many in each: neighbours are alike
    LPT        longest processing time first on the seconds of all stages together (Graham 1969)
    DistTrain  replicas by LPT, microbatches of equal counts by length, the smallest first and the p - 1 next ones last
               (arXiv 2408.04275, its two reorderings; filled by LPT where that is faster)
    DFLOP      the least of the largest encoder or language model load of a microbatch: an integer program, LPT on the
               larger load where time is over
    Entrain    microbatches by encoder load; what a microbatch has more than its part of the language model's load waits
               for the next one (arXiv 2605.27918, our port; to wait costs nothing)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from csc.planning.assign.portfolio import filled
from csc.planning.assign.step import Floats, SampleCosts, rounded

Lists = list[list[int]]


@dataclass(frozen=True)
class Question:
    """encoder, model: seconds of each sample on all encoder stages and all others; seed: of what is drawn."""

    step: SampleCosts
    encoder: Floats
    model: Floats
    seed: int
    seconds: float  # that an integer program may take for a replica; 0: none is tried

    @property
    def places(self) -> tuple[int, int]:
        return self.step.replicas, self.step.microbatches

    def of(self, groups: Sequence[Lists]) -> list[Floats]:
        """The features of groups by replica."""
        return [self.step.features(own) for own in groups]

    @property
    def both(self) -> Floats:
        """[sample][2]: shares of the two loads; a load that nobody has is left out."""
        loads = np.stack([self.encoder, self.model], axis=1)
        return loads[:, loads.sum(axis=0) > 0] / loads.sum(axis=0)[loads.sum(axis=0) > 0]


def _in_runs(order: Sequence[int], count: int) -> Lists:
    return [list(map(int, part)) for part in np.array_split(np.array(order), count)]


def _in_bins(items: Sequence[int], bins: Sequence[int], count: int) -> Lists:
    return [[item for item, place in zip(items, bins) if place == b] for b in range(count)]


def _replicas(asked: Question, loads: Floats) -> Lists:
    return _in_bins(range(len(loads)), filled(loads, np.ones(asked.step.replicas)), asked.step.replicas)


def _random(asked: Question) -> list[Floats]:
    replicas, microbatches = asked.places
    order = np.random.default_rng(asked.seed).permutation(len(asked.model))
    return asked.of([_in_runs(own, microbatches) for own in _in_runs(order, replicas)])


def _sorted(asked: Question) -> list[Floats]:
    replicas, microbatches = asked.places
    order = np.argsort(-(asked.encoder + asked.model), kind="stable")
    return asked.of([_in_runs(order[r::replicas], microbatches) for r in range(replicas)])


def _lpt(asked: Question) -> list[Floats]:
    whole = (asked.encoder + asked.model)[:, None]
    return asked.of([_filled(asked, own, whole) for own in _replicas(asked, whole)])


def _filled(asked: Question, own: Sequence[int], loads: Floats) -> Lists:
    count = asked.step.microbatches
    return _in_bins(own, filled(loads[list(own)] / loads.sum(axis=0), np.ones(count)), count)


def _disttrain(asked: Question) -> list[Floats]:
    """Of equal counts or filled by LPT, whichever is faster here."""
    whole = asked.encoder + asked.model
    found = []
    for own in _replicas(asked, whole[:, None]):
        by_size = sorted(own, key=lambda i: -whole[i])
        ways = [_in_runs(by_size, asked.step.microbatches), _filled(asked, own, whole[:, None])]
        reordered = [asked.step.features(_smallest_outside(way, whole, len(asked.step.orders))) for way in ways]
        found.append(min(reordered, key=asked.step.seconds_of))
    return found


def _smallest_outside(groups: Lists, whole: Floats, ranks: int) -> Lists:
    ascending = sorted(groups, key=lambda group: float(whole[group].sum()))
    last = ascending[1:ranks]
    return [ascending[0], *reversed(ascending[ranks:]), *reversed(last)]


def _dflop(asked: Question) -> list[Floats]:
    loads = asked.both
    return asked.of([_least_largest(asked, own, loads) for own in _replicas(asked, loads)])


def _least_largest(asked: Question, own: Sequence[int], loads: Floats) -> Lists:
    """Items into bins so that the largest load of any bin is least; LPT's way if none better is found in time."""
    count, items = asked.step.microbatches, len(own)
    start = _filled(asked, own, loads)
    largest = max(loads[group].sum(axis=0).max() for group in start)
    if not asked.seconds:
        return start
    size = items * count + 1
    rows, least, most = [], [], []
    for i in range(items):  # each item in one bin
        row = np.zeros(size)
        row[i * count : (i + 1) * count] = 1
        rows.append(row)
        least.append(1.0)
        most.append(1.0)
    for b in range(count):
        for load in loads[list(own)].T:  # no load of a bin above the last variable
            row = np.zeros(size)
            row[b:-1:count] = load
            row[-1] = -1
            rows.append(row)
            least.append(-np.inf)
            most.append(0.0)
    whole = np.append(np.ones(size - 1), 0)
    found = milp(
        np.append(np.zeros(size - 1), 1), constraints=LinearConstraint(np.array(rows), least, most),
        integrality=whole, bounds=Bounds(0, np.append(np.ones(size - 1), largest)),
        options={"time_limit": asked.seconds},
    )  # fmt: skip
    if found.x is None or found.x[-1] >= largest:
        return start
    places = found.x[:-1].reshape(items, count).argmax(axis=1)
    groups = _in_bins(own, places, count)
    return groups if all(groups) else start


def _entrain(asked: Question) -> list[Floats]:
    whole = (asked.encoder + asked.model)[:, None]
    found = []
    for own in _replicas(asked, asked.both):
        groups = _filled(asked, own, asked.encoder[:, None] if asked.encoder.sum() else whole)
        features = asked.step.features(groups)
        later = asked.step.features(_deferred(groups, asked.model))
        found.append(np.hstack([features[:, :2], later[:, 2:]]))
    return found


def _deferred(groups: Lists, model: Floats) -> Lists:
    """Which samples the language model runs with each microbatch: those that wait the longest first, as many as bring
    all until here to their part of the load; at least one each.
    """
    part = sum(model[group].sum() for group in groups) / len(groups)
    found: Lists = []
    waiting: list[int] = []
    taken = 0.0
    for number, group in enumerate(groups, start=1):
        waiting += group
        here = []
        while waiting and (not here or taken + model[waiting[0]] / 2 <= number * part or number == len(groups)):
            taken += model[waiting[0]]
            here.append(waiting.pop(0))
        found.append(here)
    return found


def equal(step: SampleCosts) -> list[Floats]:
    """Every microbatch the mean, which no samples are; for scale."""
    count = step.replicas * step.microbatches
    mean = rounded(step.samples.sum(axis=0) / count, step.multiple)
    return [np.tile([1.0, *mean], (step.microbatches, 1))] * step.replicas


RIVALS: dict[str, Callable[[Question], list[Floats]]] = {
    "random": _random,
    "sorted": _sorted,
    "LPT": _lpt,
    "DistTrain": _disttrain,
    "DFLOP": _dflop,
    "Entrain": _entrain,
}
