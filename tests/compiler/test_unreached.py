"""A tied parameter that no stage differentiates has no gradient, as in eager PyTorch: zeros would decay it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc

WIDTH, WORDS = 8, 12


class Unreached(nn.Module):
    """Embeds with one table at both ends of layers that let no gradient through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.again = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.again.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        with torch.no_grad():
            hidden = hidden + self.again(tokens)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_without_a_gradient_there_are_no_zeros(mesh: str) -> None:
    tokens = torch.arange(24).reshape(4, 6) % WORDS
    batch = {"tokens": tokens, "labels": tokens.roll(1, dims=1)}
    eager, model = Unreached(), Unreached()
    eager(**batch).backward()
    compiled = csc.compile(model, mesh=mesh, example=batch, microbatches=2, cuts=["layers.1"], cache=False)
    compiled.train_step(batch)
    missing = {name for name, parameter in eager.named_parameters() if parameter.grad is None}
    assert "embed.weight" in missing
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == missing
    holders = {p.name: p.ranks for p in compiled.trainer().program.manifest.parameters}
    assert len(holders["embed.weight"]) > 1  # else nothing is summed
