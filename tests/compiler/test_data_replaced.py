"""`tensor.data = other` after compiling: the tensor stays, and has another shape, other strides or another meaning of
its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from tests.compiler import eager, small


class Held(nn.Module):
    """Reads matrices that are a buffer, an attribute, and in a list."""

    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.register_buffer("turned", torch.randn(16, 16))
        self.plain, self.several = torch.randn(16, 16), [torch.randn(16, 16)]
        self.array, self.halves = np.linspace(0, 1, 16, dtype=np.float32).reshape(16, 1), torch.tensor([1 + 1j])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.embed(tokens)) @ self.turned @ self.plain @ self.several[0] / 64
        hidden = hidden * float(1 + self.array.sum(axis=1)[0]) * self.halves.imag
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def _data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other


CHANGES: dict[str, Callable[[Held], None]] = {
    "rows added to a parameter": lambda m: _data(m.embed.weight, torch.cat([m.embed.weight.data] * 2)),
    "a bias of one entry": lambda m: _data(m.mix.bias, m.mix.bias.data[:1]),
    "a buffer turned": lambda m: _data(m.turned, m.turned.data.t()),
    "an attribute turned": lambda m: _data(m.plain, m.plain.data.t()),
    "a tensor in a list turned": lambda m: _data(m.several[0], m.several[0].data.t()),
    "a buffer of one row": lambda m: _data(m.turned, m.turned.data[:1].expand(16, 16)),
    "an array of another shape": lambda m: setattr(m.array, "shape", (1, 16)),
}


def test_the_next_step_reads_what_is_there() -> None:
    model, batch = Held(), small.text_batch(2)
    compiled = csc.compile(model, mesh="tp=2", example=batch, cache=False, check=False)
    for change, make in CHANGES.items():
        make(model)
        loss, gradients = eager.step(model, batch)
        model.zero_grad()
        assert float(compiled.train_step(batch)) == pytest.approx(loss, rel=1e-5), change
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == gradients.keys(), change
        for name, right in gradients.items():
            torch.testing.assert_close(found[name], right, rtol=1e-4, atol=1e-6, msg=f"{change}: {name}")


def test_a_conjugate_of_the_same_memory_is_seen() -> None:
    model = Held()
    compiled = csc.compile(model, mesh="pp=1", example=small.text_batch(2), cache=False, check=False)
    model.halves.data = model.halves.data.conj()
    with pytest.raises(InputError, match="conjugate"):
        compiled.train_step(small.text_batch(2))
