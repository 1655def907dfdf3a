"""Queries that a mask hides completely, as left padding does: their values are eager's, and feed real labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from csc.kernels.mask import Mask
from torch import nn
from torch.nn import functional as F

import csc
from tests.compiler.eager import CLASSES, WIDTH, assert_as_eager

LENGTH = 6
LOWEST = torch.finfo(torch.float32).min

MaskOf = Callable[[torch.Tensor], torch.Tensor]


class Attending(nn.Module):
    def __init__(self, mask_of: MaskOf) -> None:
        super().__init__()
        self.mask_of, self.qkv = mask_of, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, self.mask_of(real))
        return hidden + mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Labels at all places, those of padding too."""

    def __init__(self, mask_of: MaskOf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Attending(mask_of) for _ in range(2)])

    def forward(self, x: torch.Tensor, real: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, real)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def padded() -> dict[str, torch.Tensor]:
    """Of the second sample the first three places are padding."""
    x = 3 * torch.sin(torch.arange(2 * LENGTH * 3.0)).view(2, LENGTH, 3)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, :3] = False
    return {"x": x, "real": real, "labels": torch.arange(2 * LENGTH).view(2, LENGTH) % CLASSES}


def seen(real: torch.Tensor) -> torch.Tensor:
    place = torch.arange(real.shape[1])
    return (place[None, :] <= place[:, None])[None, None] & real[:, None, None, :]


def causal(real: torch.Tensor) -> torch.Tensor:
    place = torch.arange(real.shape[1])
    return torch.where(place[None, :] <= place[:, None], 0.0, LOWEST)


CASES: dict[str, MaskOf] = {
    "bool": seen,
    "lowest": lambda real: torch.where(seen(real), 0.0, LOWEST),
    "-1e4": lambda real: torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~seen(real), -1e4),
    "lowest, of padding alone": lambda real: torch.where(real[:, None, None, :], 0.0, LOWEST),
    "lowest, added": lambda real: causal(real) + torch.where(real[:, None, None, :], 0.0, LOWEST / 2),
    "product": lambda real: (1.0 - seen(real).float()) * LOWEST,
}


@pytest.mark.parametrize("name", CASES)
def test_hidden_rows(name: str) -> None:
    compiled = assert_as_eager(Model(CASES[name]), padded(), meshes=["pp=2"])
    assert bool(compiled.program.notes) == (name != "bool")


def test_a_finite_mask_that_hides_no_row_is_read() -> None:
    compiled = assert_as_eager(Model(causal), padded(), meshes=["pp=2"])
    assert compiled.program.notes == ()


class Reading(Model):
    """The same of tokens."""

    def __init__(self) -> None:
        super().__init__(lambda real: torch.where(seen(real), 0.0, LOWEST))
        self.words = nn.Embedding(9, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words(input_ids), attention_mask.bool(), labels)


def test_a_finite_mask_under_cp_is_for_batches_in_which_every_query_sees_a_key() -> None:
    left = padded()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 9
    batch = {"input_ids": ids, "attention_mask": left["real"].flip(1).long(), "labels": left["labels"]}
    compiled = assert_as_eager(Reading(), batch, meshes=["cp=2"])
    with pytest.raises(csc.InputError, match=r"token 0 of sample 1 sees no key(.|\n)*pad on the right"):
        compiled.train_step(batch | {"attention_mask": left["real"].long()})


def test_hidden_queries_are_told_by_counting() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ranges = torch.randint(0, 9, (2, 3, 7, 2), generator=generator, dtype=torch.int32)
        admits, kinds = (torch.randint(0, 4, shape, generator=generator) for shape in ((2, 3, 7), (2, 8)))
        for mask in (Mask(ranges.clamp(max=8), admits, kinds, 8), Mask(ranges.clamp(max=8), None, None, 8)):
            assert torch.equal(mask.hidden(), ~mask.dense().any(2))
