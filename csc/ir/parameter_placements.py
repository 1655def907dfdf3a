"""How a parameter of a Program lies on the ranks of a position, and its gradient before REDUCE adds it up.

Terms: see csc.ir.groups.

    weight_placement(parameter) -> Placement        gradient_placement(parameter) -> Placement
"""

from __future__ import annotations

from csc.ir.groups import (
    ALL_SUMMED,
    SHARD,
    SHARD_SUMMED,
    SUMMED,
    WHOLE,
    Placement,
    copies_summed,
    held,
    held_equal,
    held_summed,
)
from csc.ir.program import Parameter


def weight_placement(parameter: Parameter) -> Placement:
    """Whole, or in boxes."""
    if not parameter.boxes:
        return WHOLE
    size = _division(parameter)
    return held(size) if size else SHARD


def gradient_placement(parameter: Parameter) -> Placement:
    """Its parts are over the group that REDUCE adds over."""
    size = _division(parameter)
    if size:
        return held_summed(size) if parameter.copied else held_equal(size)
    if parameter.boxes:
        return SHARD_SUMMED
    if parameter.parts:
        return ALL_SUMMED
    return copies_summed(parameter.copied) if parameter.copied else SUMMED


def _division(parameter: Parameter) -> int:
    """How many boxes several tensor-parallel ranks have; 0: none is held twice."""
    different = len(set(parameter.boxes))
    return different if different < len(parameter.boxes) else 0
