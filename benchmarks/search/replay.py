"""Strategies on recorded learning curves: what they spend, and how good their pair is.

Terms
  recorded  the curves of all pairs by seed: what a seed decides is the projector and the order of samples
  truth     of a pair: the mean over seeds of its score at the end
  noise     the standard deviation of such a score between seeds, pooled over pairs
  regret    how far the truth of the pair that was found lies below the best
  draw      a search of the replay: for each pair the curve of one of the recorded seeds, drawn at random

    recorded = Recorded.of_file(path)
    outcome(recorded, strategy, budget, draw) -> Outcome
    least_budget(recorded, strategy, regret, draws) -> share of the grid
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import weightedtau

from csc.errors import InputError
from csc.model_search.strategies import Pair, Rung, Seen, Space, Strategy, drive

BUDGETS = tuple(1 / 24 * 2 ** (step / 4) for step in range(19))  # shares of the grid, from one training to the end on


@dataclass(frozen=True)
class Outcome:
    """pair: what was found; spent: samples; ranking: all pairs, the best first."""

    pair: Pair
    spent: int
    ranking: tuple[Pair, ...]


@dataclass(frozen=True)
class Recorded:
    """seeds: what benchmarks.search.record wrote of each."""

    seeds: tuple[dict[str, Any], ...]

    @classmethod
    def of_file(cls, path: Path) -> Recorded:
        """Of a task's."""
        return cls(tuple(json.loads(path.read_text())))

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Encoder after encoder."""
        first = self.seeds[0]
        return tuple((encoder, llm) for encoder in first["encoders"] for llm in first["llms"])

    @property
    def full(self) -> int:
        """Samples of a training to the end."""
        return self.seeds[0]["samples"]

    @property
    def grid(self) -> int:
        """Samples of all of them."""
        return self.full * len(self.pairs)

    @cached_property
    def ends(self) -> dict[Pair, list[float]]:
        """Scores at the end, by seed."""
        return {pair: [seed["curves"][" x ".join(pair)][-1][1] for seed in self.seeds] for pair in self.pairs}

    @cached_property
    def truth(self) -> dict[Pair, float]:
        """Means over seeds."""
        return {pair: float(np.mean(scores)) for pair, scores in self.ends.items()}

    @cached_property
    def noise(self) -> float:
        """Pooled over pairs."""
        return math.sqrt(float(np.mean([np.var(scores, ddof=1) for scores in self.ends.values()])))

    def regret(self, pair: Pair) -> float:
        """Of a pair."""
        return max(self.truth.values()) - self.truth[pair]

    def tau(self, ranking: Sequence[Pair]) -> float:
        """Weighted Kendall tau of a ranking and the truth: pairs at the top count most."""
        place = {pair: -float(number) for number, pair in enumerate(ranking)}
        return float(
            weightedtau([self.truth[pair] for pair in self.pairs], [place[pair] for pair in self.pairs]).statistic
        )


def outcome(recorded: Recorded, strategy: Strategy, budget: float, draw: int) -> Outcome:
    """budget: a share of the grid. InputError where it is below the first rung."""
    chance = random.Random(draw)
    of_pair = {pair: chance.choice(recorded.seeds) for pair in recorded.pairs}
    of_search = chance.choice(recorded.seeds)
    curves = {pair: dict(map(tuple, seed["curves"][" x ".join(pair)])) for pair, seed in of_pair.items()}
    warm: list[int] = []

    def train(rung: Rung, seen: Seen) -> dict[Pair, float | None]:
        warm.append(rung.samples)
        return {pair: curves[pair][rung.samples] for pair in rung.pairs}

    def llm_distances(encoder: str) -> Any:
        """As they were after the first rung."""
        known = of_search["llm_distances"]
        return np.array(known[min(known, key=lambda samples: abs(int(samples) - warm[0]))][encoder])

    first = recorded.seeds[0]
    space = Space(
        tuple(first["encoders"]), tuple(first["llms"]), recorded.full, math.floor(budget * recorded.grid + 1e-6),
        first["batch"], encoder_distances=np.array(of_search["encoder_distances"]),
    )  # fmt: skip
    choice, seen = drive(strategy, space, draw, train, llm_distances)
    return Outcome(choice.ranking[0], seen.spent, choice.ranking)


def mean_regret(recorded: Recorded, strategy: Strategy, budget: float, draws: int) -> float:
    """Infinite where the budget is below the first rung."""
    try:
        found = [outcome(recorded, strategy, budget, draw) for draw in range(draws)]
    except InputError:
        return math.inf
    return float(np.mean([recorded.regret(one.pair) for one in found]))


def least_budget(recorded: Recorded, strategy: Strategy, regret: float, draws: int) -> float:
    """The smallest of BUDGETS with so little mean regret; 1.0, the grid, if none has."""
    return next((share for share in BUDGETS if mean_regret(recorded, strategy, share, draws) <= regret + 1e-12), 1.0)
