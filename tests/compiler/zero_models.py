"""Models and batches for test_zero.py: small ones whose parameters do not divide evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.compiler import tensor_models
from tests.models import captions
from tests.models.hf import llava, llava_batch


class Odd(nn.Module):
    """Sizes that no number of ranks divides: a parameter of one entry, of none, of three, without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 7)
        self.wide = nn.Linear(7, 5)
        self.head = nn.Linear(5, 13)
        self.one = nn.Parameter(torch.randn(1))
        self.few = nn.Parameter(torch.randn(1, 3, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.randn(4, 3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.wide(self.embed(input_ids))) * self.scale + self.one
        h = h + (self.few.sum(1) * h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def odd_batch(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 13, (samples, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


MODELS: dict[str, Callable[[], nn.Module]] = {
    **tensor_models.MODELS,
    "odd": Odd,
    "llava_tied": lambda: llava(tied=True),
    "captions": captions.Captions,
}
BATCHES: dict[str, Callable[[int], Any]] = {
    **tensor_models.BATCHES,
    "odd": odd_batch,
    "llava_tied": llava_batch,
    "captions": lambda samples: captions.batch([[1, 2], [3], *[[]] * (samples - 2)], [0, 0, 1, *[0] * (samples - 3)]),
}
