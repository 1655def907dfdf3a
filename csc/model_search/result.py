"""What a search found: a row for each pair, the best first.

Terms
  planned   seconds and bytes of a step on the mesh that the user named
  front     the Pareto front: pairs that no other beats or equals in score, seconds and bytes at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from csc.composition import ComposedModel
from csc.errors import InputError
from csc.model_search.strategies import Curve, Pair


@dataclass(frozen=True)
class PairRow:
    """A pair. score, spread: its last ones; None: it has none. samples, seconds: of all its training. planned_seconds,
    planned_bytes: of a step on the user's mesh, and of the rank that holds the most; None: no mesh was named, or no
    plan fits. planned_joules: of all devices in that step; None: their profile has no measured power. joules: of its
    samples in such steps. dropped: why it is not the best; "" for the best.
    """

    encoder: str
    llm: str
    score: float | None
    spread: float | None
    samples: int
    seconds: float
    curve: Curve
    dropped: str
    planned_seconds: float | None = None
    planned_bytes: float | None = None
    planned_joules: float | None = None
    joules: float | None = None

    @property
    def pair(self) -> Pair:
        """Both names."""
        return self.encoder, self.llm


@dataclass(frozen=True)
class Counts:
    """samples: that trials were trained on; grid: that every pair to the end would take. captures: of models, by all
    processes, without those that the cache had. encoder_passes: how often each encoder ran on an item, in the mean.
    compile_seconds: to trace, plan and write programs; train_seconds: of steps; score_seconds: of scores.
    """

    samples: int
    grid: int
    captures: int
    encoder_passes: dict[str, float]
    compile_seconds: float
    train_seconds: float
    score_seconds: float

    @property
    def seconds(self) -> float:
        """Of all three."""
        return self.compile_seconds + self.train_seconds + self.score_seconds

    @property
    def compile_share(self) -> float:
        """Of all seconds."""
        return self.compile_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class SearchResult:
    """rows: the best first, those that failed or cannot be composed last. mesh: what steps were planned for."""

    rows: tuple[PairRow, ...]
    strategy: str
    budget: int
    full: int
    mesh: str
    perfect: float
    counts: Counts
    load: Callable[[Pair], ComposedModel]

    @property
    def best(self) -> PairRow:
        """The first row."""
        return self.rows[0]

    @property
    def front(self) -> frozenset[Pair]:
        """The Pareto front."""
        return pareto(self.rows)

    def winner(self) -> ComposedModel:
        """The best pair, with the weights that it was trained to: a model of csc.compose. Its language model is a copy,
        its encoder the one that was given.
        """
        return self.model(*self.best.pair)

    def model(self, encoder: str, llm: str) -> ComposedModel:
        """Any pair that was trained. InputError for another."""
        row = next((row for row in self.rows if row.pair == (encoder, llm)), None)
        if row is None or not row.samples:
            raise InputError(
                f"{encoder} x {llm} was not trained", "csc.search", "name a pair of result.rows with samples"
            )
        return self.load(row.pair)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        front = self.front
        return {
            "strategy": self.strategy, "budget": self.budget, "full": self.full, "mesh": self.mesh,
            "perfect": self.perfect,
            "rows": [{**asdict(row), "front": row.pair in front} for row in self.rows],
            "counts": {**asdict(self.counts), "compile_share": self.counts.compile_share},
        }  # fmt: skip


def pareto(rows: Iterable[PairRow]) -> frozenset[Pair]:
    """Of rows with a score, and with a plan if any has one."""
    scored = [row for row in rows if row.score is not None]
    scored = [row for row in scored if row.planned_seconds is not None] or scored
    figures = {row.pair: (-(row.score or 0.0), row.planned_seconds or 0.0, row.planned_bytes or 0.0) for row in scored}
    return frozenset(
        pair for pair, figures_here in figures.items()
        if not any(_beats(other, figures_here) for name, other in figures.items() if name != pair)
    )  # fmt: skip


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """In nothing worse, and in something better."""
    return all(a <= b for a, b in zip(one, other)) and one != other
