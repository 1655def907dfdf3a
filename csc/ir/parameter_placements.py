"""How a parameter of a Program lies on the ranks of a position, and its gradient before REDUCE adds it up.

Terms: see csc.ir.groups.

    weight_placement(parameter) -> Placement        gradient_placement(parameter) -> Placement
"""

from __future__ import annotations

from csc.ir.groups import (
    ALL_SUMMED,
    COPIES_SUMMED,
    HELD,
    HELD_EQUAL,
    HELD_SUMMED,
    SHARD,
    SHARD_SUMMED,
    SUMMED,
    WHOLE,
    Placement,
)
from csc.ir.program import Parameter


def weight_placement(parameter: Parameter) -> Placement:
    """Whole, or in boxes."""
    if not parameter.boxes:
        return WHOLE
    return HELD if _held_twice(parameter) else SHARD


def gradient_placement(parameter: Parameter) -> Placement:
    """Its parts are over the group that REDUCE adds over."""
    if _held_twice(parameter):
        return HELD_SUMMED if parameter.copied else HELD_EQUAL
    if parameter.boxes:
        return SHARD_SUMMED
    if parameter.parts:
        return ALL_SUMMED
    return COPIES_SUMMED if parameter.copied else SUMMED


def _held_twice(parameter: Parameter) -> bool:
    """Whether several tensor-parallel ranks have a box."""
    return len(set(parameter.boxes)) < len(parameter.boxes)
