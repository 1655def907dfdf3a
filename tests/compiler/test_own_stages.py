"""Stages of its own for a component that others stand in front of: a head behind encoders that are frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import csc
from csc.errors import InputError
from tests.compiler.test_dividing import same
from tests.exactness import FLOAT32

WIDTH = 8


class Tower(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Generator(nn.Module):
    """Latents of an autoencoder and a caption meet in front of the head; the loss is over latents again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vae, self.text = nn.Linear(6, 2 * WIDTH), Tower(nn.Embedding(20, WIDTH))
        self.head, self.bias = Tower(nn.Linear(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.vae.requires_grad_(False)
        self.text.requires_grad_(False)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        latents = self.vae(pixels).chunk(2, -1)[0] * 0.5
        caption = self.text(ids).mean(1) + self.bias
        return (self.head(latents + caption) - latents).square().mean()


def batch() -> dict[str, Tensor]:
    return {"pixels": torch.randn(4, 6), "ids": torch.arange(20).view(4, 5)}


def reads(compiled: csc.CompiledModel, name: str) -> set[str]:
    """The regions that one reads, at first or second hand."""
    regions = {region.name: region for region in compiled.program.regions}
    maker = {value: region.name for region in regions.values() for value in region.outputs}
    found, waiting = set[str](), [name]
    while waiting:
        new = {maker[value] for value in regions[waiting.pop()].activations} - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        {"text": {"pp": 1, "dp": 1}, "head": {"pp": 2, "dp": 2}},
        "pp=3,head.pp=2",
    ],
    ids=str,
)
def test_a_head_has_stages_and_a_mesh_of_its_own(mesh: Any) -> None:
    compiled = same(Generator(), batch(), FLOAT32, mesh=mesh, microbatches=2)
    assert not any(name.startswith("vae") for name in reads(compiled, "text.layers.1"))
    stages = [{name.partition(".")[0] for name in stage.regions} for stage in compiled.program.stages]
    assert "text" in stages[0] and "head" not in stages[0] and all("head" in stage for stage in stages[1:])


def test_a_head_on_another_number_of_ranks_than_the_mesh_stands_in_front() -> None:
    with pytest.raises(
        InputError, match=r"gives head pipeline stages in front of others.* let the mesh's be those of head"
    ):
        csc.compile(Generator(), example=batch(), mesh="pp=2,dp=2,head.pp=1,head.dp=1", microbatches=2, cache=False)
