"""Which pairs are trained how far: strategies as values, which see scores and nothing else.

Terms
  pair      (encoder, language model), by name
  rung      pairs that are trained up to the same number of samples, each from where it was; they need nothing of
            each other
  full      samples of a training to the end: where scores are compared
  budget    samples that all trainings together may take
  curve     of a pair: (samples, score) at every rung that it was in; higher scores are better, `perfect` is the best
  error     perfect - score

`strategy.rungs(space, seed)` is a generator of rungs. It is sent the scores of each and returns a Choice.
No strategy trains for more samples than the budget; InputError if that is less than its first rung.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from csc.errors import InputError
from csc.model_search.forecast import LEAST, Curve, Pair, figure, forecast
from csc.model_search.similarity import Clusters, Floats, clusters

ROUNDING = 1e-9  # a share of the budget that is the same budget


@dataclass(frozen=True)
class Space:
    """What there is to choose from. least: samples of a batch; a rung has whole batches. encoder_distances: of every
    two encoders, in order; None where no strategy asks. impossible: pairs that cannot be composed.
    """

    encoders: tuple[str, ...]
    llms: tuple[str, ...]
    full: int
    budget: int
    least: int = 1
    perfect: float = 1.0
    encoder_distances: Floats | None = None
    impossible: frozenset[Pair] = frozenset()

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Those that can be composed, encoder after encoder."""
        every = ((encoder, llm) for encoder in self.encoders for llm in self.llms)
        return tuple(pair for pair in every if pair not in self.impossible)


@dataclass(frozen=True)
class Rung:
    """why: what it is for, in a few words."""

    samples: int
    pairs: tuple[Pair, ...]
    why: str


@dataclass
class Seen:
    """What training has shown. failed: pairs whose training or score broke: no rung has them again. llm_distances: of
    the language models behind an encoder whose pairs were trained.
    """

    curves: dict[Pair, Curve] = field(default_factory=dict)
    failed: set[Pair] = field(default_factory=set)
    llm_distances: Callable[[str], Floats] | None = None

    def reached(self, pair: Pair) -> int:
        """How many samples it was trained on."""
        curve = self.curves.get(pair, ())
        return curve[-1][0] if curve else 0

    def score(self, pair: Pair) -> float:
        """Its last."""
        return self.curves[pair][-1][1]

    def cost(self, rung: Rung) -> int:
        """Samples that a rung takes."""
        return sum(max(0, rung.samples - self.reached(pair)) for pair in rung.pairs if pair not in self.failed)

    @property
    def spent(self) -> int:
        """Samples of all trainings so far."""
        return sum(self.reached(pair) for pair in self.curves)


@dataclass(frozen=True)
class Choice:
    """ranking: every pair that can be composed and did not fail, the best first. dropped: why a pair is not the first,
    in a sentence.
    """

    ranking: tuple[Pair, ...]
    dropped: Mapping[Pair, str]


Rungs = Generator[Rung, Seen, Choice]


class Strategy(Protocol):
    """A value that decides. clusters: whether it asks for distances."""

    @property
    def name(self) -> str:
        """What it is called in `csc.search(strategy=...)`."""

    @property
    def clusters(self) -> bool:
        """Whether it asks for distances."""

    def rungs(self, space: Space, seed: int) -> Rungs:
        """Rung after rung."""


def drive(
    strategy: Strategy,
    space: Space,
    seed: int,
    train: Callable[[Rung, Seen], Mapping[Pair, float | None]],
    llm_distances: Callable[[str], Floats] | None = None,
) -> tuple[Choice, Seen]:
    """Run a strategy to its end. train: gives each pair's score at the rung's samples; None: it failed."""
    seen = Seen(llm_distances=llm_distances)
    rungs = strategy.rungs(space, seed)
    try:
        rung = next(rungs)
        while True:
            wanted = replaced(rung, [pair for pair in rung.pairs if pair not in seen.failed])
            if seen.spent + seen.cost(wanted) > space.budget * (1 + ROUNDING):
                raise AssertionError(f"{strategy.name} went over its budget: {wanted}")
            for pair, score in train(wanted, seen).items():
                if score is None:
                    seen.failed.add(pair)
                elif seen.reached(pair) < wanted.samples:
                    seen.curves[pair] = (*seen.curves.get(pair, ()), (wanted.samples, score))
            rung = rungs.send(seen)
    except StopIteration as end:
        return end.value, seen


def replaced(rung: Rung, pairs: Iterable[Pair]) -> Rung:
    """The rung with these pairs."""
    return Rung(rung.samples, tuple(pairs), rung.why)


# --- strategies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Every pair to the end: the truth, and what the others are measured against."""

    name: ClassVar[str] = "grid"
    clusters: ClassVar[bool] = False

    def rungs(self, space: Space, seed: int) -> Rungs:
        """One rung."""
        _fits(space, len(space.pairs) * space.full, self.name, "the whole grid")
        seen = yield Rung(space.full, space.pairs, "every pair to the end")
        return _choice(space, seen, {})


@dataclass(frozen=True)
class Random:
    """As many pairs as the budget has room for, at random, each to the end."""

    name: ClassVar[str] = "random"
    clusters: ClassVar[bool] = False

    def rungs(self, space: Space, seed: int) -> Rungs:
        """One rung."""
        _fits(space, space.full, self.name, "one training to the end")
        count = min(len(space.pairs), space.budget // space.full)
        drawn = random.Random(seed).sample(space.pairs, count)
        seen = yield Rung(space.full, tuple(drawn), "drawn at random")
        return _choice(space, seen, {pair: "it was not drawn" for pair in space.pairs if pair not in drawn})


@dataclass(frozen=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all pairs for a few samples, the best `keep` of
    them for 1 / keep times as many, until one is left, which is trained to the end. A pair stays by its own score and
    by what all curves so far let expect of it, half and half; see csc.model_search.forecast.
    """

    keep: float = 0.5
    name: ClassVar[str] = "halving"
    clusters: ClassVar[bool] = False

    def rungs(self, space: Space, seed: int) -> Rungs:
        """The first rung is the longest that the budget has room for."""
        _check_share("keep", self.keep)
        active = space.pairs
        ladder = self._ladder(space, len(active))
        dropped: dict[Pair, str] = {}
        for number, (samples, _) in enumerate(ladder):
            seen = yield Rung(samples, active, f"rung {number + 1} of {len(ladder)}")
            active = _alive(active, seen)
            count = min(len(active), ladder[number + 1][1]) if number + 1 < len(ladder) else len(active)
            best = _promising(active, space, seen)
            for pair in best[count:]:
                dropped[pair] = f"after {samples:,} samples {number_text(count)} of {len(active)} promised more"
            active = tuple(best[:count])
        return _choice(space, seen, dropped)

    def _ladder(self, space: Space, count: int) -> list[tuple[int, int]]:
        """Samples and pairs of each rung, the last one `full`; as many rungs as the budget asks for."""
        cost, ladder = math.inf, [(space.full, count)]
        for rungs in range(1, 64):
            steps = sorted({_whole(space.full * self.keep**up, space) for up in range(rungs)})
            ladder = [(steps[0], count)]
            for samples in steps[1:]:
                ladder.append((samples, math.ceil(ladder[-1][1] * self.keep)))
            cost = _ladder_cost(ladder)
            if cost <= space.budget or len(steps) < rungs:
                break
        _fits(space, math.ceil(cost), self.name, f"its shortest way, from {ladder[0][0]:,} samples each on,")
        return _decided_late(ladder, space)


@dataclass(frozen=True)
class Mordal:
    """Mordal (arXiv 2502.00241): clusters of encoders by what they make of the probe, clusters of language models
    behind each cluster's medoid; successive halving over pairs of medoids; then the members of the best clusters, of
    which those are trained further whose extrapolated error may be the least.

    share: of candidates that are clusters. best: clusters whose members are trained. width: of an interval, in standard
    deviations of the fit.
    """

    share: float = 0.5
    best: int = 2
    width: float = 2.0
    name: ClassVar[str] = "mordal"
    clusters: ClassVar[bool] = True

    def rungs(self, space: Space, seed: int) -> Rungs:
        """Warm-up, halving over medoids, members of the best clusters."""
        _check_share("share", self.share)
        assert space.encoder_distances is not None
        encoders = clusters(space.encoder_distances, math.ceil(self.share * len(space.encoders)))
        leaders = [space.encoders[medoid] for medoid in encoders.medoids]
        warm = tuple(pair for pair in space.pairs if pair[0] in leaders)
        first = self._first(space, len(warm))
        seen = yield Rung(first, warm, "warm-up behind the medoids of encoders")

        assert seen.llm_distances is not None
        groups: dict[Pair, tuple[Pair, ...]] = {}  # by its medoids' pair, the pairs that it stands for
        for cluster, leader in enumerate(leaders):
            llms = self._llm_clusters(space, leader, seen)
            for number, medoid in enumerate(llms.medoids):
                members = tuple(
                    (space.encoders[e], space.llms[m]) for e in encoders.members[cluster] for m in llms.members[number]
                )
                members = tuple(pair for pair in members if pair in space.pairs)
                alive = [(leader, space.llms[m]) for m in (medoid, *llms.members[number])]
                head = next((pair for pair in alive if pair in seen.curves and pair not in seen.failed), None)
                if head is not None:
                    groups[head] = members
        if not groups:
            return _choice(space, seen, {})
        dropped: dict[Pair, str] = {}

        active, samples = tuple(groups), first
        while len(active) > self.best and 2 * samples < space.full:
            kept = tuple(_best(active, seen)[: max(self.best, math.ceil(len(active) / 2))])
            rung = Rung(2 * samples, kept, "successive halving over medoids")
            if not _leaves_an_end(rung, space, seen):
                break
            for pair in set(active) - set(kept):
                dropped.update(self._of_cluster(groups[pair], pair, samples, len(kept)))
            samples, active = 2 * samples, kept
            seen = yield rung
            active = _alive(active, seen)
        heads = _best(active, seen)
        for pair in heads[self.best :]:
            dropped.update(self._of_cluster(groups[pair], pair, samples, self.best))
        members = tuple(dict.fromkeys(pair for head in heads[: self.best] for pair in groups[head]))
        return (yield from self._within(space, seen, members, first, dropped))

    def _within(self, space: Space, seen: Seen, members: Sequence[Pair], first: int, dropped: dict[Pair, str]) -> Rungs:
        """Of the members of the best clusters, those whose interval reaches the best, twice as far each time."""
        active, samples = _alive(members, seen), first
        while active:
            rung = Rung(samples, _affordable(active, samples, space, seen), "members of the best clusters")
            for pair in set(active) - set(rung.pairs):
                dropped[pair] = f"the budget had no room to train it on {samples:,} samples"
            seen = yield rung
            active = _alive(rung.pairs, seen)
            if samples >= space.full:
                break
            intervals = extrapolated(
                {pair: seen.curves[pair] for pair in active}, space.full, space.perfect, self.width
            )
            best = min((high for _, high in intervals.values()), default=0.0)
            for pair, (low, _) in intervals.items():
                if low > best:
                    dropped[pair] = (
                        f"from {samples:,} samples its error at {space.full:,} is at least {low:.3g}, and that of "
                        f"another at most {best:.3g}"
                    )
            active = tuple(pair for pair in active if pair not in dropped)
            samples = min(space.full, 2 * samples) if len(active) > 1 else space.full
        return _choice(space, seen, dropped)

    def _first(self, space: Space, warm: int) -> int:
        """Samples of the warm-up: a quarter of the budget at most."""
        samples = space.full
        while samples > _whole(samples / 2, space) and warm * samples > space.budget / 4:
            samples = _whole(samples / 2, space)
        _fits(space, warm * samples + space.full - samples, self.name, "the warm-up and one training to the end")
        return samples

    def _llm_clusters(self, space: Space, leader: str, seen: Seen) -> Clusters:
        assert seen.llm_distances is not None
        return clusters(seen.llm_distances(leader), math.ceil(self.share * len(space.llms)))

    def _of_cluster(self, members: Iterable[Pair], head: Pair, samples: int, count: int) -> dict[Pair, str]:
        behind = f"was behind {number_text(count)} after {samples:,} samples"
        return dict.fromkeys(members, f"{' x '.join(head)}, which stands for its cluster, {behind}")


STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in (Halving(), Mordal(), Random(), Grid())}


# --- what they share --------------------------------------------------------------------------------------------------


def extrapolated(
    curves: Mapping[Pair, Curve], samples: int, perfect: float, width: float
) -> dict[Pair, tuple[float, float]]:
    """By pair the least and the largest error to be expected at so many samples: log error = a + b log samples, by
    least squares, give or take `width` standard deviations of what is predicted.

    The deviation of points from their lines is one for all curves, as most have two or three points; b is at most 0:
    more samples do no harm. A curve of one point says nothing of b: its interval is that of all others' slopes.

    InputError for a score above `perfect`, of which there is no error.
    """
    for pair, curve in curves.items():
        highest = max(score for _, score in curve)
        if highest > perfect:
            raise InputError(
                f"{' x '.join(pair)} has a score of {highest:g}, and perfect is {perfect:g}", "csc.search",
                "give the score of no error as perfect; what is trained is kept, and the same call goes on",
            )  # fmt: skip
    fits = {pair: _line(curve, perfect) for pair, curve in curves.items()}
    squares = sum(fit.squares for fit in fits.values())
    freedom = sum(fit.freedom for fit in fits.values())
    spread = math.sqrt(squares / freedom) if freedom else 0.1
    spread = max(spread, 0.02)
    steepest = min((fit.slope for fit in fits.values() if fit.points > 1), default=-1.0)
    bounds = {}
    for pair, fit in fits.items():
        log_samples = math.log(samples)
        if fit.points == 1:
            low = fit.mean + min(0.0, steepest) * (log_samples - fit.centre) - width * spread
            high = fit.mean + width * spread
        else:
            middle = fit.mean + min(0.0, fit.slope) * (log_samples - fit.centre)
            deviation = spread * math.sqrt(1 / fit.points + (log_samples - fit.centre) ** 2 / fit.range)
            low, high = middle - width * deviation, middle + width * deviation
            high = min(high, fit.last + width * spread)
        bounds[pair] = (math.exp(low), math.exp(high))
    return bounds


@dataclass(frozen=True)
class _Line:
    """mean + slope * (log samples - centre). squares: of what is left; range: squares of log samples around centre."""

    points: int
    centre: float
    mean: float
    slope: float
    range: float
    squares: float
    last: float

    @property
    def freedom(self) -> int:
        return max(0, self.points - 2)


def _line(curve: Curve, perfect: float) -> _Line:
    x = np.log([samples for samples, _ in curve])
    y = np.log([max(LEAST, perfect - score) for _, score in curve])
    centre, mean = float(x.mean()), float(y.mean())
    across = float(((x - centre) ** 2).sum())
    slope = float(((x - centre) * (y - mean)).sum()) / across if len(curve) > 1 else 0.0
    left = y - mean - slope * (x - centre)
    return _Line(len(curve), centre, mean, slope, across, float((left**2).sum()), float(y[-1]))


def _whole(samples: float, space: Space) -> int:
    """The next number of samples that are whole batches."""
    return min(space.full, space.least * max(1, math.ceil(samples / space.least - ROUNDING)))


def _alive(pairs: Iterable[Pair], seen: Seen) -> tuple[Pair, ...]:
    return tuple(pair for pair in pairs if pair not in seen.failed)


def _best(pairs: Iterable[Pair], seen: Seen) -> list[Pair]:
    """By their last scores; of equals the one named first."""
    return sorted(pairs, key=lambda pair: -seen.score(pair))


def _promising(pairs: Sequence[Pair], space: Space, seen: Seen) -> list[Pair]:
    """Pairs of one rung by their own figures and by those that all curves let expect at the end, half and half."""
    own = figure(seen.curves, space.perfect)
    expected = forecast(seen.curves, pairs, space.full, space.perfect) if seen.curves else {}
    return sorted(pairs, key=lambda pair: -own(seen.score(pair)) - expected[pair])


def _leaves_an_end(rung: Rung, space: Space, seen: Seen) -> bool:
    """Whether what the rung leaves of the budget trains one of its pairs to the end."""
    return seen.spent + seen.cost(rung) + space.full - rung.samples <= space.budget


def _affordable(pairs: Sequence[Pair], samples: int, space: Space, seen: Seen) -> tuple[Pair, ...]:
    """The pairs that the budget has room to train so far, and one of them to the end; those that are furthest and best
    first, at least one.
    """
    order = sorted(pairs, key=lambda pair: (-seen.reached(pair), -seen.score(pair) if pair in seen.curves else 0.0))
    kept: list[Pair] = []
    for pair in order:
        rung = Rung(samples, (*kept, pair), "")
        if not kept or _leaves_an_end(rung, space, seen):
            kept.append(pair)
    return tuple(kept)


def _ladder_cost(ladder: Sequence[tuple[int, int]]) -> int:
    """Samples that a ladder takes at most."""
    cost, before = 0, 0
    for samples, count in ladder:
        cost += count * (samples - before)
        before = samples
    return cost


def _decided_late(ladder: list[tuple[int, int]], space: Space) -> list[tuple[int, int]]:
    """The ladder with what it leaves of the budget: the last two pairs go on side by side for as long as there is room,
    as what is decided late is decided by curves that are nearly at their ends.
    """
    chosen = ladder
    for number in range(1, len(ladder)):
        samples, count = ladder[number]
        if count == 1:
            later = [*chosen[:number], (samples, 2), *chosen[number + 1 :]]
            if _ladder_cost(later) > space.budget:
                break
            chosen = later
    return chosen


def _choice(space: Space, seen: Seen, dropped: Mapping[Pair, str]) -> Choice:
    """Pairs that were trained furthest by score, and behind them all others by what curves let expect of them."""
    pairs = _alive(space.pairs, seen)
    furthest = max(map(seen.reached, pairs), default=0)
    if not furthest:
        return Choice(pairs, dict.fromkeys(pairs[1:], "it was not trained"))
    last = [pair for pair in pairs if seen.reached(pair) == furthest]
    others = [pair for pair in pairs if pair not in last]
    expected = forecast(seen.curves, others, space.full, space.perfect)
    every = (*_best(last, seen), *sorted(others, key=lambda pair: -expected[pair]))
    reasons = {}
    for pair in every[1:]:
        reached = seen.reached(pair)
        why = f"its score after {reached:,} samples is no higher" if reached else "it was not trained"
        reasons[pair] = dropped.get(pair, why)
    return Choice(every, reasons)


def _fits(space: Space, cost: int, name: str, subject: str) -> None:
    if cost > space.budget * (1 + ROUNDING):
        raise InputError(
            f"the budget is {space.budget:,} samples, and {subject} takes {cost:,} with the strategy {name!r} for "
            f"{len(space.pairs)} pairs of up to {space.full:,} samples each",
            "csc.search",
            "raise budget, lower samples, or leave candidates out",
        )


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise InputError(f"{name} is {value!r}", "csc.search, strategy", "give a share between 0 and 1")


def number_text(count: int) -> str:
    """A count in words where it is small."""
    return {1: "one", 2: "two", 3: "three"}.get(count, str(count))


def named(strategy: str | Strategy) -> Strategy:
    """A strategy by its name, or one that is a value already. InputError for another name."""
    if not isinstance(strategy, str):
        return strategy
    if strategy not in STRATEGIES:
        raise InputError(f"there is no strategy {strategy!r}", "csc.search", f"give one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]
