"""How much a step is.

Counts(tokens, samples, flops)      of one replica's microbatches, or of all replicas'
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCounts:
    """flops: what the ranks spend on them, in all."""

    tokens: float = 0.0
    samples: float = 0.0
    flops: float = 0.0
