"""Targets of microbatches that rise at the front of a step.

ramps(count, ranks) -> by position, in times what the others have
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from csc.planning.assign.layout import Floats

PARTS = (0.05, 0.2, 0.5)  # of the others' size, for the first microbatch
LENGTHS = (1, 2, 4, 6)  # of a ramp, in p - 1


def ramps(count: int, ranks: int) -> Iterator[Floats]:
    """count: of microbatches; ranks: of the pipeline."""
    for length in dict.fromkeys(min(many * (ranks - 1), count - 1) for many in LENGTHS):
        for part in PARTS if length > 0 else ():
            rising = np.ones(count)
            rising[:length] = np.linspace(part, 1.0, length, endpoint=False)
            yield rising
