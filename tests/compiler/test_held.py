"""Parameters that modules hold in lists and dicts beside the ones they have registered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import csc
from tests.compiler.eager import WIDTH, Stack, assert_as_eager, batch
from tests.tiers import BEFORE_2_13, long


class Listed(nn.Module):
    """Reads its parameters from a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.weights = [self.linear.weight, self.linear.bias]
        self.named = {"scale": self.scale, "factor": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(x, *self.weights) * self.named["scale"] * self.named["factor"]


class Recurrent(nn.Module):
    """A recurrent module of torch, which computes with a list of its parameters."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool = True, both: bool = False) -> None:
        super().__init__()
        width = WIDTH // 2 if both else WIDTH
        self.recurrent = kind(WIDTH, width, num_layers=2, batch_first=batch_first, bidirectional=both)
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, last = self.recurrent(x if self.batch_first else x.transpose(0, 1))
        last = last[0] if isinstance(last, tuple) else last
        return x + (y if self.batch_first else y.transpose(0, 1)) + last[-1:].sum(-1).transpose(0, 1)[..., None]


def stack(*layers: nn.Module) -> Stack:
    torch.manual_seed(0)
    return Stack(layers)


def test_registered_parameters_in_lists_train() -> None:
    torch.manual_seed(0)
    assert_as_eager(stack(Listed(), Listed()), batch(), copied=False)


@pytest.mark.parametrize(
    ("kind", "batch_first"), [long(nn.GRU, True), long(nn.LSTM, True), (nn.LSTM, False), long(nn.RNN, False)]
)
def test_recurrent_modules_train_in_microbatches(kind: type[nn.RNNBase], batch_first: bool) -> None:
    if BEFORE_2_13 and not batch_first:
        pytest.skip("torch itself takes the number of samples for 1")
    torch.manual_seed(0)
    model = stack(Recurrent(kind, batch_first, both=batch_first))
    assert_as_eager(model, batch(samples=4), meshes=["pp=1"], microbatches=2)


def test_dropout_between_recurrent_layers_is_refused() -> None:
    torch.manual_seed(0)
    recurrent = Recurrent(nn.GRU)
    recurrent.recurrent.dropout = 0.5
    with pytest.raises(csc.InputError, match=r"test_held.py:\d+: gru drops out between its layers.*put nn.Dropout"):
        csc.compile(stack(recurrent), example=batch(), cache=False).train_step(batch())
