"""How the losses of microbatches make that of the whole batch.

Combination(weight="tokens", counted="cross_entropy_loss")          the mean over counted labels
Combination(weight="terms", terms=(Term("add", 0, ..), ..))         a sum of terms, each divided by another number
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Divisor:
    """What a loss, or a term of it, is divided by: n + added, or `least` if that is more; no limit with 0. n is the
    number of rows of the batch entry `rows`; or of the labels that the call `counted` of the captured graph is a mean
    over; or, with `value`, what that call gives: where it is 0, what is divided by it need not be.
    """

    rows: str = ""
    counted: str = ""
    added: float = 0.0
    least: float = 0.0
    value: bool = False

    @property
    def can_be_zero(self) -> bool:
        """Whether a microbatch may have nothing of it, other than rows, and would divide by 0."""
        return bool(self.counted) and self.least <= 0 and self.added <= 0

    @property
    def for_zero(self) -> int:
        """What a microbatch divides by where this is 0: -1 instead of a value, for no count of a batch is -1, and so
        no weight is 1 then, as that of a batch alone; a mean over no label is 0 whatever it is.
        """
        return -int(self.can_be_zero and self.value)

    def renamed(self, names: Mapping[str, str]) -> Divisor:
        """With another name for the call that is counted."""
        return replace(self, counted=names.get(self.counted, ""))


@dataclass(frozen=True)
class Term:
    """The operand of the call of the captured graph that adds it to the others, or stacks them. One that is the same
    for every batch is a mean over whatever its divisor counts.
    """

    call: str
    operand: int
    divisor: Divisor


@dataclass(frozen=True)
class Combination:
    """What the graph shows (csc.analysis.samples.combining).

    weight: "tokens", "mean", "sum" or "terms"; "" if it could not be proven, and `problem` (a phrase with an operation
    as its subject) and `where` say why. rows: the batch entry whose rows count, with "mean"; counted, added, least: see
    Divisor, with "tokens". terms: those that do not weigh alike; what is added to them is a sum over samples. whole:
    batch entries without a sample dimension, which every microbatch has whole. summed: ranks that share the tokens of a
    microbatch have parts of its loss, and count alike; else each has a loss over its own labels.
    """

    weight: str = ""
    rows: str = ""
    counted: str = ""
    added: float = 0.0
    least: float = 0.0
    terms: tuple[Term, ...] = ()
    whole: tuple[str, ...] = ()
    summed: bool = False
    problem: str = ""
    where: str = ""

    def renamed(self, names: Mapping[str, str]) -> Combination:
        """With other names for the calls of the captured graph."""
        terms = tuple(replace(term, call=names[term.call], divisor=term.divisor.renamed(names)) for term in self.terms)
        return replace(self, counted=names.get(self.counted, ""), terms=terms)

    @property
    def divisors(self) -> tuple[Divisor, ...]:
        """Of the terms, each once."""
        return tuple(dict.fromkeys(term.divisor for term in self.terms))
