"""Entries of a batch that are called as what csc tells a rank: all of them reach the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError

NAMES = ("tp", "cp", "tp_copies", "random", "context")


class Scaled(nn.Module):
    """A layer with attention and an MLP; what it reads is multiplied by every entry of these names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList([Scaled.Layer(), Scaled.Layer()])

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            q, k, v = (one(hidden).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = hidden + self.o(seen.transpose(1, 2).flatten(2))
            return hidden + self.down(F.relu(self.up(hidden)))

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, tp: torch.Tensor, cp: torch.Tensor, tp_copies: torch.Tensor,
        random: torch.Tensor, context: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        hidden = self.embed(tokens) * tp * cp * tp_copies * random * context
        for layer in self.layers:
            hidden = F.dropout(layer(hidden), 1e-9, self.training)  # which asks for a seed, and drops nothing
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2", "cp=2,tp=2,pp=2"])
@pytest.mark.long_cases("cp=2", "tp=2")
def test_they_are_the_models(mesh: str) -> None:
    torch.manual_seed(1)
    batch: dict[str, Any] = {name: torch.randint(16, (2, 16)) for name in ("tokens", "labels")}
    batch |= {name: 0.5 + torch.rand(2, 16, 8) for name in NAMES}
    model, plain = Scaled(), Scaled()
    loss = csc.compile(model, mesh=mesh, example=batch, check=False).train_step(batch)
    expected = plain(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_names_of_csc_are_refused() -> None:
    batch = {"tokens": torch.zeros(2, 4, dtype=torch.int64), "csc.tp": torch.zeros(2)}
    with pytest.raises(InputError, match=r"the batch has an entry .csc\.tp."):
        csc.compile(nn.Linear(2, 2), example=batch).trainer()
