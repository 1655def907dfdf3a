"""Adding up gradients: order, memory that is shared, buckets."""

from __future__ import annotations

import pytest
import torch

from csc.errors import ProgramError
from csc.runtime.gradients import GradientSums, buckets
from csc.runtime.specs import ParameterSpec


def spec(
    name: str,
    size: int = 4,
    stages: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> ParameterSpec:
    return ParameterSpec(name, (size,), dtype, trainable, stages)


def test_contributions_do_not_touch_what_they_came_from() -> None:
    sums = GradientSums([spec("a"), spec("b")])
    shared = torch.ones(4)
    sums.add("a", shared)
    sums.add("b", shared)
    assert sums.buffers["a"] is shared and not sums.own, "the first one is kept as it is"
    for _ in range(2):
        sums.add("a", torch.ones(1).expand(4))
    assert sums.own == {"a"}
    assert sums.buffers["a"].tolist() == [3] * 4 and sums.buffers["b"].tolist() == [1] * 4


def test_gradients_take_the_dtype_of_the_parameter() -> None:
    sums = GradientSums([spec("a", dtype=torch.bfloat16)])
    sums.add("a", torch.ones(4))
    assert sums.buffers["a"].dtype == torch.bfloat16


def test_gradients_that_cannot_be_right() -> None:
    sums = GradientSums([spec("a"), spec("frozen", trainable=False)])
    for name, size, part in (
        ("b", 4, "not on this stage"),
        ("frozen", 4, "is frozen"),
        ("a", 5, r"is \[5\]"),
    ):
        with pytest.raises(ProgramError, match=part):
            sums.add(name, torch.zeros(size))


def test_buckets_keep_dtypes_and_holders_apart() -> None:
    specs = [
        spec("a"),
        spec("tied", stages=(0, 2)),
        spec("b"),
        spec("half", dtype=torch.bfloat16),
        spec("big", 100),
        spec("c"),
        spec("unused"),
    ]
    sums = GradientSums(specs)
    for s in specs[:-1]:
        sums.add(s.name, torch.zeros(s.shape))
    groups = [[s.name for s in group] for group in buckets(sums, limit=32)]
    assert groups == [["a", "b"], ["big"], ["c"], ["tied"], ["half"]]
