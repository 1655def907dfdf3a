"""Layouts of tensors in memory, as plain shapes and strides (in elements)."""

from __future__ import annotations

from collections.abc import Sequence


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether the elements fill a block of memory, each once, in some order of the dimensions, as those of
    dense((2, 3), (1, 2)) do.
    """
    if len(shape) != len(stride):
        return False
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether two elements may share memory, as those of overlaps((2, 3), (0, 1)) do, or shape and stride do
    not belong together.
    """
    if len(shape) != len(stride):
        return True
    reach = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step < reach:
            return True
        reach = step * size
    return False
