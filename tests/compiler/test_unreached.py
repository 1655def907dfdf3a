"""What no reader differentiates has no gradient, as in eager PyTorch: a tied parameter that no stage differentiates,
which zeros would decay; a value of which its last reader reads what it is, but none of its numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from tests.compiler.eager import assert_as_eager

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


class Three(nn.Module):
    """Three linear maps in regions of their own."""

    def __init__(self, function: Callable[[Three, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.function(self, x)).pow(2).mean()


def its_type(model: Three, x: torch.Tensor) -> torch.Tensor:
    hidden = model.a(x)
    return model.b(hidden).type_as(hidden)


def its_shape(model: Three, x: torch.Tensor) -> torch.Tensor:
    hidden = model.a(x)
    return model.b(hidden) * torch.ones_like(hidden)


def its_type_alone(model: Three, x: torch.Tensor) -> torch.Tensor:
    return model.b(x).type_as(model.a(x))  # `a` gets no gradient at all


@pytest.mark.parametrize("function", [its_type, its_shape, its_type_alone])
@pytest.mark.parametrize("frozen", [(), ("a",)])
def test_a_last_reader_without_a_gradient(function: Callable[..., torch.Tensor], frozen: tuple[str, ...]) -> None:
    batch = {"x": torch.sin(torch.arange(4.0 * WIDTH)).view(4, WIDTH)}
    assert_as_eager(Three(function), batch, frozen, meshes=("pp=2",))
