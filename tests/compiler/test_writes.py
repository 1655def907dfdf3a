"""Models that write into tensors which they have just made, and tensors that lie in memory as no trace says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.reports.verification import verify
from tests.compiler.eager import assert_as_eager

WIDTH = 8


def rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    for row in range(1, 3):
        x[:, row] = y[:, row] + x[:, row - 1]
    return x


def broadcast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 1:] = y[:, :1]
    return x


def cast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., :3] = y[..., :3].to(torch.bfloat16)
    return x


def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(y) * x


def diagonal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Fill_diagonal_ is a write through as_strided, of which torch's own derivative is wrong."""
    square = x[0].t() @ y[0]
    square.fill_diagonal_(2.0)
    return x @ square


def strided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.as_strided((2, 3), (WIDTH, 2), 1).copy_(y[0, :2, :3])
    return x


def number(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x * y
    x[:, 0] = 3.0
    return x


def beside_operations_made_of_others(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Those that are taken apart where torch makes the graph functional: none may be asked to take itself apart."""
    x = x.clone()
    x[:, 0] = F.logsigmoid(y[:, 0])
    return torch.hstack([x.tile(1, 2, 1), torch.tensordot(x, y[0, :2].t() @ y[0, :2], 1)]).nanmean(1)


class Writing(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.write = write
        self.first, self.second, self.head = nn.Linear(3, WIDTH), nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.head(self.write(self.first(signal), self.second(signal))).pow(2).mean()


class Mixing(nn.Module):
    """Its backward meets a transposed gradient and a saved value that is not: real and fake strides differ."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.out(F.softplus(self.gate(hidden)).transpose(1, 2).contiguous())
        return hidden + mixed.transpose(1, 2)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Mixing() for _ in range(2))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        hidden = self.first(signal)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).pow(2).mean()


def test_strides_that_are_not_those_of_the_trace() -> None:
    torch.manual_seed(0)
    signal = torch.arange(2 * 4 * 3).view(2, 4, 3) / 10.0
    result = verify(csc.compile(Layers(), mesh="pp=2", example={"signal": signal}))
    assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ())


@pytest.mark.parametrize(
    "write", [rows, broadcast, cast, whole, number, diagonal, strided, beside_operations_made_of_others]
)
def test_gradients_are_those_of_eager(write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    signal = torch.arange(2 * 4 * 3).view(2, 4, 3) / 10.0
    result = verify(csc.compile(Writing(write), mesh="pp=2", example={"signal": signal}))
    assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ())


def transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.transpose(1, 2).clone()
    x.as_strided((2, 3), (WIDTH, 2), 1).copy_(y[0, :2, :3])
    return x.transpose(1, 2)


def test_a_write_through_strides_of_another_order_is_refused() -> None:
    signal = torch.ones(2, 4, 3)
    with pytest.raises(csc.CscError, match="does not lie in memory row by row"):
        csc.compile(Writing(transposed), mesh="pp=2", example={"signal": signal})


class Latents(nn.Module):
    """A loss of a transposed prediction, in a region of its own: torch lays its gradient out otherwise than its fake
    tensors say.
    """

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
        self.encoder = nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False)
        self.loss = loss

    def forward(self, picture: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            latents = self.encoder(picture).chunk(2, 1)[0]
        predicted = self.head((latents + noise).flatten(2).transpose(1, 2))
        return self.loss(predicted.transpose(1, 2).reshape(latents.shape), noise - latents)


def of_powers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A view that only what `2 ** x` really gives allows."""
    return F.mse_loss((2**x).view(len(x), -1), y.flatten(1))


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "smooth l1": F.smooth_l1_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "powers": of_powers,
    "logarithms": lambda x, y: -F.logsigmoid(x * y).view(len(x), -1).mean(),
}


@pytest.mark.parametrize("loss", ["mse", *(pytest.param(one, marks=pytest.mark.long) for one in [*LOSSES][1:])])
def test_a_gradient_of_other_strides_from_another_region(loss: str) -> None:
    torch.manual_seed(0)
    batch = {"picture": torch.randn(2, 3, 4, 4), "noise": torch.randn(2, 4, 4, 4)}
    assert_as_eager(Latents(LOSSES[loss]), batch, meshes=("pp=1", "pp=2"))
