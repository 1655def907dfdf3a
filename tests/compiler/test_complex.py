"""Complex values: rotary embeddings by torch.polar, complex parameters, spectra that go from stage to stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compiler.eager import CLASSES, WIDTH, Applying, assert_as_eager, batch, stack

HALF = WIDTH // 2


def turned(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """Rotary embeddings as in the first Llama's code."""
    angles = torch.outer(torch.arange(x.shape[1]), torch.linspace(1.0, 0.1, HALF))
    pairs = torch.view_as_complex(x.float().unflatten(-1, (HALF, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2) * layer.scale


def by_a_parameter(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """Angles that train."""
    angles = torch.arange(x.shape[1])[:, None] * layer.scale[:HALF]
    pairs = torch.complex(x[..., :HALF], x[..., HALF:]) * torch.polar(layer.scale[HALF:].abs() + angles * 0, angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def spectrum(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * layer.scale[: HALF + 1], n=WIDTH)


@pytest.mark.parametrize("function", [turned, by_a_parameter, spectrum])
def test_inside_layers(function: object) -> None:
    assert_as_eager(stack(function), batch())  # type: ignore[arg-type]


class Turning(nn.Module):
    """A complex linear layer, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HALF, HALF, dtype=torch.complex64) / 4)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z + z @ self.weight


class Complex(nn.Module):
    """Complex values between all layers, some of them read twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Turning() for _ in range(3)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = z = torch.view_as_complex(self.embed(x).unflatten(-1, (HALF, 2)))
        for layer in self.layers:
            z = layer(z) * (1 + 0.1j)
        real = torch.view_as_real(z + first.conj()).flatten(-2)
        return nn.functional.cross_entropy(self.head(real).flatten(0, 1), labels.flatten())


def test_between_layers() -> None:
    assert_as_eager(Complex(), batch())


def test_frozen_and_in_microbatches() -> None:
    assert_as_eager(Complex(), batch(), frozen=["layers.1."], meshes=["pp=3"], microbatches=2)
    assert_as_eager(Complex(), batch(), frozen=["layers."], meshes=["pp=2"])


def test_with_data_parallel_ranks() -> None:
    assert_as_eager(Complex(), batch(4), meshes=["dp=2,pp=2"])
