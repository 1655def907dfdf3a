"""Jitter: computes that now and then take longer than modelled.

Terms: e is a rank's running mean of the modelled seconds c of its computes, e = 0.9 e + 0.1 c. A *hit* adds
alpha max(burst, e) (0.5 + U) seconds to one compute, U uniform on [0, 1); each compute is hit with `probability`.
The model and the figures of J3 are those of RRFP (arXiv 2605.18750).

    Jitter(probability, burst, alpha, seed)
    disturbed(jitter, seconds) -> [[seconds of each compute] for each rank]
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from csc.errors import InputError

MEMORY = 0.9  # share of the running mean that the next compute leaves in place


@dataclass(frozen=True)
class Jitter:
    """How often and how long computes are held up. `burst` is in seconds. The same seed gives the same delays."""

    probability: float
    burst: float
    alpha: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise InputError(f"the probability is {self.probability}", "jitter", "It lies between 0 and 1")
        for name, value in (("burst", self.burst), ("alpha", self.alpha)):
            if not 0 <= value < float("inf"):
                raise InputError(f"{name} is {value}", "jitter", "It is a finite number of at least 0")


J3 = Jitter(probability=0.3, burst=0.015, alpha=1.5)


def disturbed(jitter: Jitter, seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """The modelled `seconds` of each rank's computes, in its order, with the delays added.

    Each rank draws from a stream of its own: what one rank is held up by does not depend on the others.
    """
    return [_rank(jitter, rank, modelled) for rank, modelled in enumerate(seconds)]


def _rank(jitter: Jitter, rank: int, modelled: Sequence[float]) -> list[float]:
    draw = random.Random(f"{jitter.seed} {rank}").random
    mean = modelled[0] if modelled else 0.0
    longer = []
    for cost in modelled:
        mean = MEMORY * mean + (1 - MEMORY) * cost
        hit, length = draw(), draw()
        longer.append(
            cost + (jitter.alpha * max(jitter.burst, mean) * (0.5 + length) if hit < jitter.probability else 0.0)
        )
    return longer
