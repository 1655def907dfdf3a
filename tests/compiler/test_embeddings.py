"""Tables that are looked up: sparse gradients, gradients by how often an index comes, rows that get none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from tests.compiler.eager import WIDTH, assert_as_eager, step

WORDS = 11

Look = Callable[[nn.Embedding, torch.Tensor], torch.Tensor]


class Words(nn.Module):
    def __init__(self, look: Look, tied: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.look = nn.Embedding(WORDS, WIDTH, **options), look
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.look(self.table, ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def looked(table: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return table(ids)


def words() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 2, 2, 0, 3, 2], [0, 4, 4, 4, 1, 10]])
    return {"ids": ids, "labels": ids.roll(1, 1)}


def function(**options: Any) -> Look:
    return lambda table, ids: F.embedding(ids, table.weight, **options)


def bags(**options: Any) -> Look:
    return lambda table, ids: F.embedding_bag(ids, table.weight, mode="sum", **options)[:, None] + table(ids)


CASES: dict[str, Callable[[], Words]] = {
    "sparse": lambda: Words(looked, sparse=True),
    "sparse and tied": lambda: Words(looked, tied=True, sparse=True),
    "sparse, by the function": lambda: Words(function(sparse=True)),
    "sparse bags": lambda: Words(bags(sparse=True)),
    "padding": lambda: Words(looked, padding_idx=2),
    "padding from the end": lambda: Words(function(padding_idx=-1)),
    "by frequency": lambda: Words(looked, scale_grad_by_freq=True),
    "by frequency and tied": lambda: Words(function(scale_grad_by_freq=True, padding_idx=4), tied=True),
    "bags by frequency": lambda: Words(bags(scale_grad_by_freq=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_eager_s(name: str) -> None:
    assert_as_eager(CASES[name](), words())


def test_sparse_ones_are_given_whole() -> None:
    """Eager's is a sparse tensor of the same numbers; csc's takes the optimizers of dense ones."""
    model = Words(looked, sparse=True)
    assert step(model, words())[1]["table.weight"].is_sparse
    assert_as_eager(model, words(), meshes=["pp=2"], microbatches=2)
    assert model.table.weight.grad is not None and not model.table.weight.grad.is_sparse


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"mesh": "dp=2"}])
def test_frequencies_are_of_the_whole_batch(options: dict[str, Any]) -> None:
    with pytest.raises(csc.InputError, match="counts indices in the whole batch") as caught:
        csc.compile(CASES["by frequency"](), example=words(), cache=False, **options)
    assert caught.value.where
    assert_as_eager(CASES["by frequency"](), words(), frozen=["table."], meshes=["pp=2"], microbatches=2)


@pytest.mark.parametrize("look", [looked, lambda table, ids: F.embedding(ids, 2 * table.weight, max_norm=0.5)])
def test_a_table_that_is_changed(look: Look) -> None:
    with pytest.raises(csc.InputError, match="an embedding has max_norm") as caught:
        csc.compile(Words(look, max_norm=0.5), example=words(), cache=False)
    assert "test_embeddings.py" in caught.value.where
