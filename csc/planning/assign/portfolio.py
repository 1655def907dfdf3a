"""An assignment of a step's samples: replicas first, then a portfolio of ways to fill microbatches, scored."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import comb, prod
from random import Random

import numpy as np

from csc.errors import InputError
from csc.planning.assign.step import BatchLayout, Floats, Groups, LinearStep, SampleCosts
from csc.planning.schedules.work import reserve

# --- Samples into bins so that no resource of any bin is overfull ----------------------------------------------------
#
# The rule is longest processing time first, over several loads.
#
# Graham 1969 with one load and equal bins. Here an item loads several resources (the ranks of a pipeline), and bins
# have *targets*: a bin with half the target is to have half the load.


def filled(loads: Floats, targets: Floats) -> list[int]:
    """loads: [item][resource], each resource's shares summing to 1. An item goes, the largest first, where the fullest
    resource is the least full after it. No bin stays empty if there are as many items.
    """
    return fillings(loads, targets[None])[0]


def fillings(loads: Floats, ways: Floats) -> list[list[int]]:
    """ways: [way][bin], targets."""
    order = np.argsort(-loads.max(axis=1), kind="stable")
    wanted = ways / ways.sum(axis=1, keepdims=True)
    every = np.arange(len(ways))
    full = np.zeros((*ways.shape, loads.shape[1]))
    counts = np.zeros(ways.shape, dtype=np.int64)
    bins = np.zeros((len(ways), len(loads)), dtype=np.int64)
    for left, item in zip(range(len(order), 0, -1), order):
        after = full + loads[item]
        level = after.max(axis=2) / wanted
        if left <= ways.shape[1]:
            crowded = left <= (counts == 0).sum(axis=1)
            level[crowded[:, None] & (counts > 0)] = np.inf
        chosen = level.argmin(axis=1)
        bins[:, item] = chosen
        full[every, chosen] = after[every, chosen]
        counts[every, chosen] += 1
    return bins.tolist()


# --- Targets of microbatches that rise at the front of a step --------------------------------------------------------


PARTS = (0.05, 0.2, 0.5)  # of the others' size, for the first microbatch
LENGTHS = (1, 2, 4, 6)  # of a ramp, in p - 1


def ramps(count: int, ranks: int) -> Iterator[Floats]:
    """count: of microbatches; ranks: of the pipeline."""
    for length in dict.fromkeys(min(many * (ranks - 1), count - 1) for many in LENGTHS):
        for part in PARTS if length > 0 else ():
            rising = np.ones(count)
            rising[:length] = np.linspace(part, 1.0, length, endpoint=False)
            yield rising


# --- Samples into bins of neighbours in length: what is padded to the longest of a bin then loses little -------------
#
# The largest load that any bin has, in times its target, is found by bisection: from the longest sample on, each bin
# takes samples while it stays below. Bins with larger targets have the longer samples.


HALVINGS = 8


class SampleRuns:
    """Of these samples of a step that has a layout."""

    def __init__(self, step: SampleCosts, own: Sequence[int]) -> None:
        layout = step.layout
        assert layout is not None
        self._order = sorted(range(len(own)), key=lambda k: (-layout.lengths[own[k]], k))
        ordered = [own[k] for k in self._order]
        self._widths = np.array([float(layout.size([i])[-1]) for i in ordered])
        units = layout.samples[ordered, :-2] @ step.rank_rates[1:-2]
        self._units = np.vstack([np.zeros((1, units.shape[1])), np.cumsum(units, axis=0)])
        self._rates = step.rank_rates
        self._whole = np.maximum((step.samples @ step.rank_rates[1:]).sum(axis=0), 1e-300)
        self._known: dict[int, list[float]] = {}

    def bins(self, targets: Floats) -> list[int]:
        """targets: of each bin, no more than there are samples."""
        bins = sorted(range(len(targets)), key=lambda b: (-targets[b], b))
        wanted = targets[bins].tolist()
        low, high = 0.0, self._loads(0)[-1] / min(wanted) + 1e-12
        best = self._ends(wanted, high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            ends = self._ends(wanted, middle)
            if ends is None:
                low = middle
            else:
                best, high = ends, middle
        assert best is not None
        placed = [0] * len(self._order)
        start = 0
        for place, end in zip(bins, best):
            for k in self._order[start:end]:
                placed[k] = place
            start = end
        return placed

    def _ends(self, wanted: Sequence[float], most: float) -> list[int] | None:
        """Where each bin ends if none has more than `most` times its target; None if samples are left over."""
        ends, start, count = [], 0, len(self._order)
        for place, target in enumerate(wanted):
            rest = len(wanted) - place - 1
            fits = bisect_right(self._loads(start), most * target)
            start += max(1, min(fits, count - start - rest))
            ends.append(start)
        return ends if start == count else None

    def _loads(self, start: int) -> list[float]:
        """The load of a bin of samples start, ..., start + k for each k, as a share of the fullest rank's work."""
        if start not in self._known:
            width = self._widths[start] if start < len(self._widths) else 0.0
            rows = np.arange(1, len(self._widths) - start + 1)[:, None]
            seconds = self._units[start + 1 :] - self._units[start]
            seconds = seconds + rows * (width * self._rates[-2] + width**2 * self._rates[-1])
            self._known[start] = (seconds / self._whole).max(axis=1).tolist()
        return self._known[start]


# --- Sizes of microbatches that make a step the shortest if samples could be divided like water ----------------------
#
# Terms
#   shape   of a step: by position what a microbatch has of the samples, in times the mean one
#
# Every microbatch is a part of the mean one here. The best sizes grow over the first half of the step and shrink over
# the second: an action that takes a little longer than the one before hides the way there and back.


Shape = tuple[float, ...]
PEAKS = (0.2, 0.35, 0.5, 0.65)  # of the step: where the largest samples stand
LEAST = 1e-3  # of the mean microbatch: targets are above 0


def fluid_shapes(step: SampleCosts, room: Sequence[float] | None = None) -> list[Shape]:
    """Of any samples, and such as have room for the largest ones, whole, beside each other in several places. room:
    bytes for activations by rank; None: no limit. None of a step of one microbatch, or if no sizes fit.
    """
    count = step.microbatches
    if count < 2:
        return []
    sizes = np.sort(step.shares.max(axis=1) * count * step.replicas)
    largest = sizes[::-1][step.replicas // 2 :: step.replicas][:count]  # those that a replica has
    mean = step.samples.sum(axis=0) / (count * step.replicas)
    program = LinearStep(step, mean[None], room)
    program.equal([(program.amount(k, 0), 1.0) for k in range(count)], float(count))
    shares = [np.full(count, min(1.0, float(least))) for least in (sizes[0], sizes.mean())]
    shares += [_beside_each_other(largest, count, peak, min(1.0, sizes[0])) for peak in PEAKS if largest[0] > 1]
    solutions = [program.solved({program.amount(k, 0): least for k, least in enumerate(share)}) for share in shares]
    return list(dict.fromkeys(_shape(solution[:count]) for solution in solutions if solution is not None))


def _shape(amounts: Floats) -> Shape:
    return tuple(np.maximum(amounts, LEAST).tolist())


def _beside_each_other(largest: Floats, count: int, peak: float, least: float) -> Floats:
    """By position the least size, so that each of the largest samples has a microbatch, the nearer to the peak the
    larger.
    """
    floors = np.full(count, least)
    near = np.argsort(np.abs(np.arange(count) - peak * (count - 1)), kind="stable")
    for place, size in zip(near, largest[largest > 1]):
        floors[place] = size
    return floors * min(1.0, 0.98 * count / floors.sum())


# --- What ways to fill microbatches take, many at a time: bytes beyond the room first, then seconds ------------------


Figures = tuple[float, float]  # by how many bytes the room is exceeded, seconds
Lists = list[list[int]]


@dataclass(frozen=True)
class Score:
    """Of ways to fill a replica's microbatches. room: bytes by rank; None: no limit."""

    step: SampleCosts
    room: Sequence[float] | None

    def best_of_each(self, replicas: Sequence[Sequence[Lists]]) -> list[tuple[Lists, Figures, int]]:
        """The first of the best of each replica's ways, all timed in one go."""
        seconds = iter(self.step.seconds_of_ways(list(chain.from_iterable(replicas))))
        return [self._first(candidates, [next(seconds) for _ in candidates]) for candidates in replicas]

    def below(self, ways: Sequence[Lists], least: Figures) -> list[tuple[Figures, int]]:
        """Which of the ways cost no more, the best first."""
        seconds = self.step.seconds_of_ways(ways)
        scored = (
            (self._figures(candidate, took, least), place) for place, (candidate, took) in enumerate(zip(ways, seconds))
        )
        return sorted(pair for pair in scored if pair[0] <= least)

    def each(self, ways: Sequence[Lists]) -> list[Figures]:
        """Of each way."""
        return [self._figures(candidate, took, None) for candidate, took in zip(ways, self.step.seconds_of_ways(ways))]

    def _first(self, candidates: Sequence[Lists], seconds: Sequence[float]) -> tuple[Lists, Figures, int]:
        best, least = 0, self._figures(candidates[0], seconds[0], None)
        for place in sorted(range(1, len(candidates)), key=seconds.__getitem__):
            figures = self._figures(candidates[place], seconds[place], least)
            if figures < least:
                best, least = place, figures
        return candidates[best], least, best

    def _figures(self, groups: Groups, seconds: float, least: Figures | None) -> Figures:
        """least: what is to be beaten; of what does not, bytes are left out."""
        if self.room is None:
            return 0.0, seconds
        if least is not None and not least[0] and seconds > least[1]:
            return math.inf, seconds
        taken = self.step.activations(self.step.features(groups))
        return max(0.0, *(peak - limit for peak, limit in zip(taken, self.room))), seconds


# --- Small changes to an assignment, kept where the step is not longer for them --------------------------------------


TRIED = 48  # changes a round: one walk times them all


def polished(replicas: Sequence[Lists], rounds: int, score: Score) -> list[Lists]:
    """After so many rounds of changes to the replica that costs the most: the step lasts as long as that one. A change
    moves a sample, swaps two, or exchanges two groups' places; of those of a round that cost no more, the best is made,
    or all that touch different groups, if that is better still. The same arguments give the same result.
    """
    best = [[list(group) for group in groups] for groups in replicas]
    if rounds < 1 or len(best[0]) < 2:
        return best
    costs, random = score.each(best), Random(0)
    for _ in range(rounds):
        slowest = costs.index(max(costs))
        now = best[slowest]
        tried = [change for change in (_change(now, random) for _ in range(TRIED)) if change is not None]
        good = score.below([_changed(now, [change]) for change in tried], costs[slowest])
        if not good:
            continue
        costs[slowest], place = good[0]
        best[slowest] = _changed(now, [tried[place]])
        together = _apart([tried[place] for _, place in good])
        if len(together) > 1:
            candidate = _changed(now, together)
            for figures, _ in score.below([candidate], costs[slowest]):
                best[slowest], costs[slowest] = candidate, figures
    return best


Change = dict[int, list[int]]  # by place the samples of its group afterwards


def _changed(groups: Lists, changes: Sequence[Change]) -> Lists:
    changed = list(groups)
    for change in changes:
        for place, group in change.items():
            changed[place] = group
    return changed


def _apart(changes: Sequence[Change]) -> list[Change]:
    """Those that touch no group which one before them touches."""
    touched: set[int] = set()
    found = []
    for change in changes:
        if touched.isdisjoint(change):
            touched.update(change)
            found.append(change)
    return found


def _change(groups: Lists, random: Random) -> Change | None:
    """None where it would leave a microbatch empty."""
    a, b = random.sample(range(len(groups)), 2)
    kind = random.randrange(3)
    if kind == 0:
        return {a: groups[b], b: groups[a]}
    i = random.randrange(len(groups[a]))
    left = groups[a][:i] + groups[a][i + 1 :]
    if kind == 1:
        return {a: left, b: [*groups[b], groups[a][i]]} if left else None
    j = random.randrange(len(groups[b]))
    return {a: [*left, groups[b][j]], b: [*groups[b][:j], *groups[b][j + 1 :], groups[a][i]]}


# --- An assignment brought to sizes that have programs already -------------------------------------------------------
#
# Samples change places until every microbatch has one.
#
# A microbatch of an unknown size gives a sample to another one, takes one, or swaps two; of all changes that leave
# both with known sizes those that move the least load are timed, and the fastest is made, unless the step becomes much
# longer for it: a program is compiled once, and a step that is longer is paid for every time. What that leaves is
# tried with any other microbatch and more samples, and for more.


@dataclass(frozen=True)
class Effort:
    """load: of a microbatch's, more is not moved. others: microbatches that it is tried with, of the nearest load.
    samples: that each of the two gives at most. longer: by how much of itself a step may become for a known size.
    tries: changes that are looked at, over all microbatches of unknown sizes; of large ones there are too many.
    """

    load: float
    others: int
    samples: int
    longer: float
    tries: int = 2**14


CHEAP = (Effort(0.3, 12, 1, 0.01), Effort(0.8, 12, 1, 0.01))
EVERY = (*CHEAP, Effort(4.0, 1000, 2, 0.05))


def settled(
    step: SampleCosts, groups: Sequence[Sequence[int]], fits: Callable[[Lists], bool], efforts: Sequence[Effort] = EVERY
) -> Lists:
    """fits: whether the groups' activations do. efforts: one after the other, for what is left."""
    layout = step.layout
    assert layout is not None
    settled_groups = [list(group) for group in groups]
    for effort in efforts if layout.known else ():
        unknown = [
            place for place in range(len(settled_groups)) if not layout.knows(layout.size(settled_groups[place]))
        ]
        for place in unknown:
            if layout.knows(layout.size(settled_groups[place])):  # it took part in another's change
                continue
            candidates = list(_ways(settled_groups, place, layout, step.shares, effort, effort.tries // len(unknown)))
            now, *seconds = step.seconds_of_ways([settled_groups, *candidates])
            for took, candidate in sorted(zip(seconds, candidates), key=lambda pair: pair[0]):
                if took > now * (1 + effort.longer):
                    break
                if fits(candidate):
                    settled_groups = candidate
                    break
    return settled_groups


def _ways(
    groups: Lists, place: int, layout: BatchLayout, shares: Floats, effort: Effort, tries: int
) -> Iterator[Lists]:
    """With each of the other microbatches, as far as tries go, the change that moves the least load."""
    for other in _partners(groups, place, shares)[: effort.others]:
        samples = next((n for n in range(effort.samples, 0, -1) if _tries(groups[place], groups[other], n) <= tries), 0)
        if not samples:
            return
        tries -= _tries(groups[place], groups[other], samples)
        change = _least_change(groups[place], groups[other], layout, shares, effort.load, samples)
        if change is not None:
            candidate = list(groups)
            candidate[place], candidate[other] = change
            yield candidate


def _partners(groups: Lists, place: int, shares: Floats) -> list[int]:
    """The other microbatches, those of the nearest load first."""
    levels = np.array([shares[group].sum(axis=0) for group in groups])
    apart = np.abs(levels - levels[place]).max(axis=1)
    return [int(other) for other in np.argsort(apart, kind="stable") if other != place]


def _least_change(
    mine_before: list[int], theirs: list[int], layout: BatchLayout, shares: Floats, load: float, samples: int
) -> tuple[list[int], list[int]] | None:
    """What both have after the change that moves the least load, where both have known sizes then, or the other one had
    none before either.
    """
    demanding = layout.knows(layout.size(theirs))
    best: tuple[float, tuple[list[int], list[int]]] | None = None
    most = load * float(shares[mine_before].sum(axis=0).max())
    for given_away in _parts(mine_before, samples):
        for taken in _parts(theirs, samples):
            mine, left = _exchanged(mine_before, given_away, theirs, taken)
            if not mine or not left or not layout.knows(layout.size(mine)):
                continue
            if demanding and not layout.knows(layout.size(left)):
                continue
            moved = float(np.abs(shares[list(given_away)].sum(axis=0) - shares[list(taken)].sum(axis=0)).max())
            if moved <= most and (best is None or moved < best[0]):
                best = moved, (mine, left)
    return best[1] if best is not None else None


def _tries(mine: list[int], theirs: list[int], samples: int) -> int:
    """How many changes there are between the two, of at most so many samples of each."""
    return prod(sum(comb(len(group), count) for count in range(samples + 1)) for group in (mine, theirs))


def _parts(group: list[int], most: int) -> list[tuple[int, ...]]:
    """None of it, single ones, and so on."""
    return list(chain.from_iterable(combinations(group, count) for count in range(most + 1)))


def _exchanged(
    mine_before: list[int], given_away: tuple[int, ...], theirs: list[int], taken: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Both, with what one gives and takes."""
    mine = [*(item for item in mine_before if item not in given_away), *taken]
    left = [*(item for item in theirs if item not in taken), *given_away]
    return mine, left


# --- Where an assignment starts: samples given to replicas, and each replica's microbatches filled equally full ------
#
# Terms
#   division   of a step: the samples of each replica
#   filling    from targets of microbatches, by position, to the samples of each


ORDERINGS = 3  # shapes that equal microbatches are ordered by
Filling = Callable[[Sequence[Floats]], list[Lists]]


@dataclass(frozen=True)
class Start:
    """A replica's samples. groups: the best of what fills its microbatches without a ramp; filling: from targets to
    groups.
    """

    figures: Figures
    groups: list[list[int]]
    filling: Filling


def starts(score: Score, shapes: Sequence[Shape]) -> list[Start]:
    """By replica, of the division in which the slowest one is the fastest. shapes: the first of them are orders that
    equal microbatches may come in.
    """
    divisions = divisions_of(score.step)
    candidates = [
        _level_ways(score.step, members_of_replica, shapes[:ORDERINGS])
        for division in divisions
        for members_of_replica in division
    ]
    best = iter(
        score.best_of_each([[groups for groups, _ in candidates_of_replica] for candidates_of_replica in candidates])
    )
    candidate = iter(candidates)
    starts_found = []
    for division in divisions:
        chosen = [(next(best), next(candidate)) for _ in division]
        starts_found.append([Start(figures, groups, them[place][1]) for (groups, figures, place), them in chosen])
    return min(starts_found, key=lambda division: max(start.figures for start in division))


def _level_ways(
    step: SampleCosts, own_samples: Sequence[int], orderings: Sequence[Shape]
) -> list[tuple[Lists, Filling]]:
    """To fill a replica's microbatches equally full, each with the filling that it is of or stands nearest to."""
    equal, loads, ranks = [np.ones(step.microbatches)], step.shares, len(step.orders)
    kinds = [(kind(equal)[0], kind) for kind in _fillings(step, own_samples)]
    candidates = [*kinds, *((_smallest_outside(groups, loads, ranks), kind) for groups, kind in kinds)]
    candidates += [(groups, kinds[0][1]) for groups in _by_whole(step, own_samples)]
    return candidates + [(_as_shape(groups, loads, shape), kind) for groups, kind in kinds for shape in orderings]


def _fillings(step: SampleCosts, own_samples: Sequence[int]) -> list[Filling]:
    """Ways to fill a replica's microbatches to targets: by load, and by length where rows are padded."""
    loads, count = step.shares[list(own_samples)], step.microbatches

    def by_load(targets_list: Sequence[Floats]) -> list[Lists]:
        return [members(own_samples, bins, count) for bins in fillings(loads, np.array(targets_list))]

    if step.layout is None or step.layout.packed:
        return [by_load]
    runs = SampleRuns(step, own_samples)

    def by_length(targets_list: Sequence[Floats]) -> list[Lists]:
        return [members(own_samples, runs.bins(targets), count) for targets in targets_list]

    return [by_load, by_length]


def divisions_of(step: SampleCosts) -> list[list[list[int]]]:
    """Ways to give samples to replicas: by what loads a rank the most, then by the seconds of all ranks together."""
    if step.replicas == 1:
        return [[list(range(len(step.samples)))]]
    divisions = [_replicas(step, step.shares), _replicas(step, _whole(step)[:, None])]
    return divisions[:1] if divisions[0] == divisions[1] else divisions


def _replicas(step: SampleCosts, loads: Floats) -> list[list[int]]:
    """The samples of each replica, each with at least one for every microbatch."""
    bins = filled(loads, np.ones(step.replicas))
    replicas = [[i for i, b in enumerate(bins) if b == r] for r in range(step.replicas)]
    for replica in replicas:  # a replica of few large samples takes small ones of the one that has the most
        while len(replica) < step.microbatches:
            most = max(replicas, key=len)
            replica.append(most.pop(min(range(len(most)), key=lambda k: loads[most[k]].max())))
    return replicas


def _whole(step: SampleCosts) -> Floats:
    """[sample]: seconds of all ranks together."""
    return (step.samples @ step.rank_rates[1:]).sum(axis=1)


def members(own: Sequence[int], bins: Sequence[int], count: int) -> list[list[int]]:
    """[bin]: those of these samples that are in it."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for item, place in zip(own, bins):
        groups[place].append(item)
    return groups


def _smallest_outside(groups: list[list[int]], loads: Floats, ranks: int) -> list[list[int]]:
    """The smallest microbatch first, the next ones last, as many as make the drain: where they are nearly equal that is
    worth more than another filling. loads: of each sample.
    """
    ascending = sorted(groups, key=lambda group: float(loads[group].sum()))
    return [ascending[0], *reversed(ascending[ranks:]), *reversed(ascending[1:ranks])]


def _as_shape(groups: list[list[int]], loads: Floats, shape: Shape) -> list[list[int]]:
    """The smallest microbatch where the shape is the smallest, and so on: of unequal ones neighbours differ little."""
    ordered: list[list[int]] = [[] for _ in groups]
    ascending = sorted(groups, key=lambda group: float(loads[group].sum(axis=0).max()))
    for place, group in zip(np.argsort(shape, kind="stable"), ascending):
        ordered[place] = group
    return ordered


def _by_whole(step: SampleCosts, own_samples: Sequence[int]) -> list[list[list[int]]]:
    """What others make of a replica's samples by the seconds that each takes of all ranks together: longest first, and
    as many samples in each microbatch, both reordered (DistTrain, arXiv 2408.04275); so no step is longer than theirs.
    """
    sample_loads = _whole(step)
    count, ranks, mine = step.microbatches, len(step.orders), sample_loads[list(own_samples)]
    longest_first = members(own_samples, filled(mine[:, None] / (mine.sum() or 1.0), np.ones(count)), count)
    ordered = sorted(own_samples, key=lambda sample: -sample_loads[sample])
    as_many = [part.tolist() for part in np.array_split(np.array(ordered), count)]
    return [longest_first, *(_smallest_outside(groups, sample_loads, ranks) for groups in (longest_first, as_many))]


# --- Shapes that steps of some lengths are filled to, learned before the first one from a few that are like them -----
#
# Candidates are what samples would make if they could be divided like water, some powers of that (where samples are
# large a steeper shape leaves room for them), and ramps with drains. Learned once for a plan, on one rank: solvers of
# linear programs may end elsewhere on another machine, and every rank must decide alike.


SHAPES = 16  # that are kept: each is tried for every replica of every step
POWERS = (0.5, 0.75, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)


def learned(steps: Sequence[SampleCosts], room: Sequence[float] | None, most: int = SHAPES) -> list[Shape]:
    """At most so many shapes that together make these steps the shortest, picked greedily. steps: alike but for their
    samples; room: bytes for activations by rank, None: no limit.
    """
    candidates = _candidates(steps[0], room)
    if not candidates:
        return []
    table = np.array([row for step in steps for row in _gains(Score(step, room), candidates)])
    chosen: list[int] = []
    best = np.ones(len(table))
    while len(chosen) < most:
        means = np.minimum(best[:, None], table).mean(axis=0)
        pick = int(means.argmin())
        if means[pick] >= best.mean():
            break
        chosen.append(pick)
        best = np.minimum(best, table[:, pick])
    return [tuple(candidates[pick].tolist()) for pick in chosen]


def _candidates(step: SampleCosts, room: Sequence[float] | None) -> list[Floats]:
    fluid = [np.array(shape) ** power for shape in fluid_shapes(step, room) for power in POWERS]
    rising = [np.ones(step.microbatches), *ramps(step.microbatches, len(step.orders))]
    both = [np.minimum(ramp, drain[::-1]) for ramp in rising for drain in rising][1:]
    return [np.maximum(shape, min(PARTS)) for shape in (*fluid, *both)]


def _gains(score: Score, candidates: Sequence[Floats]) -> list[list[float]]:
    """By replica what filling to each candidate makes of its seconds, in times those of equal microbatches."""
    gains = []
    for start in starts(score, ()):
        ways = start.filling(candidates)
        row = [figures[1] / start.figures[1] if not figures[0] else 1.0 for figures in score.each(ways)]
        gains.append([min(1.0, gain) for gain in row])
    return gains


# --- An assignment of a step's samples -------------------------------------------------------------------------------
#
# Replicas come first, then a portfolio of ways to fill microbatches, which are scored in full.
#
# Microbatches at the two ends of a step make its ramp and drain: with small ones there the pipeline fills and empties
# sooner, and sizes that grow and shrink slowly between hide the way. So microbatches are filled to shapes that were
# learned for such steps; where there are none, to ramps over p - 1 positions and
# multiples of that, from several parts of the others' size, then with drains. Microbatches in the middle get larger
# for it, so it is memory that ends this. The ways of all replicas are timed in one go. The same samples and shapes
# give the same assignment on every rank.


ROUNDS = 12  # of local changes
SIZE = 128  # microbatches times stages from which on there are fewer, so that a decision takes no longer


@dataclass(frozen=True)
class Assignment:
    """groups[replica][position]: samples, ascending. seconds: of the slowest replica."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: float
    peaks: tuple[float, ...]


def assign(
    step: SampleCosts,
    room: Sequence[float] | None = None,
    rounds: int = ROUNDS,
    numbers: Sequence[int] | None = None,
    shapes: Sequence[Shape] = (),
) -> Assignment:
    """The fastest assignment of the portfolio whose activations fit. room: bytes by rank, None: no limit; rounds: of
    local changes that are tried afterwards; numbers: what samples are called in errors; shapes: of the step, to fill
    microbatches to.

    InputError if there are fewer samples than microbatches, or for a sample that does not fit alone: which, and what
    would do.
    """
    count = step.replicas * step.microbatches
    if len(step.samples) < count:
        raise InputError(
            f"{len(step.samples)} samples do not fill {count} microbatches", "batch_size",
            f"take {count} samples a step or more, or fewer microbatches",
        )  # fmt: skip
    if room is not None:
        _check_alone(step, room, numbers or range(len(step.samples)))
    score = Score(step, room)
    groups = _shaped(score, starts(score, shapes), shapes)
    tries = (1 + step.replicas) // 2 * (rounds * SIZE // max(SIZE, _size(step)))
    groups = polished(groups, max(tries, min(rounds, 1)), score)
    taken = step.peaks(groups)
    if room is not None and any(peak > limit for peak, limit in zip(taken, room)):
        raise InputError(
            f"no assignment was found whose activations fit: {max(taken):.4g} bytes where there is room for "
            f"{min(room):.4g}", "memory", "take more microbatches, or a schedule that holds fewer of them",
        )  # fmt: skip
    return _assignment(step, groups)


def _size(step: SampleCosts) -> int:
    """What a candidate's simulation takes grows with it."""
    return step.microbatches * len(step.placement)


def _assignment(step: SampleCosts, replicas: Sequence[Groups]) -> Assignment:
    groups = tuple(tuple(tuple(sorted(group)) for group in replica) for replica in replicas)
    return Assignment(groups, max(step.seconds(groups)), tuple(step.peaks(groups)))


def even(step: SampleCosts) -> list[list[list[int]]]:
    """What equal loads make of a step, where nothing is tried."""
    count = step.microbatches
    return [members(own, filled(step.shares[own], np.ones(count)), count) for own in divisions_of(step)[0]]


def _shaped(score: Score, starts_found: Sequence[Start], shapes: Sequence[Shape]) -> list[Lists]:
    """Of each replica the same or faster: filled to shapes, or if there are none with a ramp, then with a drain too."""
    if shapes:
        targets = [np.array(shape) for shape in shapes]
        return [
            best[0] for best in score.best_of_each([[start.groups, *start.filling(targets)] for start in starts_found])
        ]
    rising = list(ramps(score.step.microbatches, len(score.step.orders)))
    if not rising:
        return [start.groups for start in starts_found]
    targets = [np.ones(score.step.microbatches), *rising]
    first = score.best_of_each([[start.groups, *start.filling(rising)] for start in starts_found])
    drained = [[np.minimum(targets[place], row[::-1]) for row in rising] for _, _, place in first]
    candidates = [
        [groups, *start.filling(targets_of_start)]
        for start, targets_of_start, (groups, _, _) in zip(starts_found, drained, first)
    ]
    return [groups for groups, _, _ in score.best_of_each(candidates)]


def with_known_sizes(
    step: SampleCosts, found: Assignment, room: Sequence[float] | None = None, efforts: Sequence[Effort] = EVERY
) -> Assignment:
    """The assignment, changed as little as it takes for microbatches to have sizes that the step's layout knows, as far
    as they can be had with these efforts and fit.
    """
    layout = step.layout
    if layout is None or not layout.known:
        return found

    def fits(groups: Groups) -> bool:
        return room is None or all(peak <= limit for peak, limit in zip(step.peaks([groups]), room))

    return _assignment(step, [settled(step, groups, fits, efforts) for groups in found.groups])


def _check_alone(step: SampleCosts, room: Sequence[float], numbers: Sequence[int]) -> None:
    """InputError for a sample that a rank has no room for even alone."""
    alone = step.samples.max(axis=0)
    if all(peak <= limit for peak, limit in zip(_peaks_of(step, alone), room)):
        return
    for index, sample in enumerate(step.samples):
        for rank, (peak, limit) in enumerate(zip(_peaks_of(step, sample), room)):
            if peak > limit:
                raise InputError(
                    f"sample {numbers[index]} alone takes {peak:.4g} bytes on rank {rank}, which has room for "
                    f"{limit:.4g}", "memory",
                    f"allow {peak:.4g} bytes for activations or more, cut the sample, or leave it out",
                )  # fmt: skip


def _peaks_of(step: SampleCosts, sample: Floats) -> list[float]:
    """What a microbatch of one sample takes, by rank."""
    work = step.work(np.tile([1.0, *sample], (step.microbatches, 1)))
    return [reserve(work, rank).most for rank in range(work.ranks)]
