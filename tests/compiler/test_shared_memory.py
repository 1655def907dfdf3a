"""Tensors of a model and of a batch whose memory is not their own, or does not lie row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import csc
from csc.reports.verification import verify

WIDTH = 8


class Reading(nn.Module):
    """Reads a tensor that is no parameter: a buffer, or an attribute."""

    def __init__(self, buffer: bool, own: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        table = self.first.weight.detach()
        table = table.clone() if own else table
        if buffer:
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(signal)) @ self.table).pow(2).mean()


@pytest.mark.parametrize("buffer", [True, False])
def test_a_tensor_that_shares_memory_with_a_parameter_is_refused(buffer: bool) -> None:
    with pytest.raises(csc.CscError, match=r"'table' shares its memory with the parameter 'first.weight'"):
        csc.compile(Reading(buffer, own=False), mesh="pp=2", example={"signal": torch.ones(2, WIDTH)}, cache=False)


def test_it_may_share_with_one_that_does_not_train() -> None:
    model = Reading(buffer=True, own=False)
    model.first.requires_grad_(False)
    result = verify(csc.compile(model, mesh="pp=2", example={"signal": torch.ones(2, WIDTH)}, cache=False))
    assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ())


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(signal.flatten(0, 1)))).pow(2).mean()


@pytest.mark.parametrize(
    ("example", "batch"),
    [
        (torch.rand(4, 3, WIDTH), torch.rand(3, 4, WIDTH).transpose(0, 1)),
        (torch.rand(3, 4, WIDTH).transpose(0, 1), torch.rand(4, 3, WIDTH)),
        (torch.rand(1, 3, WIDTH).expand(4, -1, -1), torch.rand(4, 6, WIDTH)[:, ::2]),
    ],
    ids=["contiguous first", "transposed first", "expanded first"],
)
def test_batches_may_lie_in_memory_in_any_way(example: torch.Tensor, batch: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = Flat()
    compiled = csc.compile(model, mesh="pp=2", example={"signal": example}, microbatches=2, cache=False)
    for signal in (example, batch):
        model.zero_grad()
        model(signal).backward()
        eager = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
        model.zero_grad()
        compiled.train_step({"signal": signal})
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, eager[name], msg=name)
