"""What a model computes in Python with the number of samples is a literal of its trace: refused where microbatches
would each do so with their own number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from tests.compiler import eager

FACTORS: dict[str, Callable[[int], Any]] = {
    "root": math.sqrt,
    "table": lambda n: [0.1, 0.2, 0.3, 0.4, 0.5][n],
    "branch": lambda n: 2.0 if n > 3 else 1.0,
    "whole part": lambda n: int(n * 0.5),
    "list of numbers": lambda n: torch.tensor([float(n)]).sum(),
}


class Scaled(nn.Module):
    """Logits and a sum, scaled by what a function makes of the number of samples."""

    def __init__(self, function: Callable[[int], Any], counted: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.head = nn.Linear(3, 8), nn.Linear(8, eager.CLASSES)
        self.function, self.counted = function, counted

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.mix(x).tanh()) * self.function(self.counted(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("factor", FACTORS)
def test_refused_in_microbatches(factor: str) -> None:
    given = eager.batch(samples=4)
    model = Scaled(FACTORS[factor], lambda x: x.shape[0])
    with pytest.raises(InputError, match=r"number of samples in Python|csc cannot prove"):
        csc.compile(model, mesh="pp=1", example=given, microbatches=2, cache=False, check=False).train_step(given)
    eager.assert_as_eager(model, given, meshes=["pp=1"], check=False)


def test_a_tensor_of_the_number_is_that_of_the_whole_batch() -> None:
    """The loss is then computed over the whole batch, once."""
    model = Scaled(torch.tensor, lambda x: x.shape[0])
    eager.assert_as_eager(model, eager.batch(samples=8), meshes=["pp=1", "dp=2"], check=False, microbatches=2)


def test_a_branch_that_no_microbatch_takes_and_the_batch_does() -> None:
    """The trace of a microbatch holds for any few samples, and not for as many as there are."""
    given = eager.batch(samples=32)
    model = Scaled(lambda n: 2.0 if n > 20 else 1.0, lambda x: x.shape[0])
    with pytest.raises(InputError, match="number of samples in Python"):
        csc.compile(model, mesh="dp=2", example=given, microbatches=8, cache=False, check=False).train_step(given)


@pytest.mark.parametrize("function", [lambda n: n / n, lambda n: 1.0 if n > 0 else 0.5], ids=["one", "never"])
def test_numbers_that_are_the_same_for_all(function: Callable[[int], float]) -> None:
    model = Scaled(function, len)
    eager.assert_as_eager(model, eager.batch(samples=4), meshes=["pp=1", "dp=2"], check=False, microbatches=2)
