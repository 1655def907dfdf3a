"""Images in slots, of which a batch fills some, as SmolVLM and Idefics have them: pixels tell which are empty."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from benchmarks.coverage.models import smolvlm
from csc.errors import InputError
from csc.reports.verification import verify

WORDS, WIDTH, IMAGE, PATCHES = 40, 8, 39, 2
Features = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def listed(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sample by sample, and together again."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in rows.split(counts.tolist())])


def positioned(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """With a tensor as long as there are images, and rows looked up by their own number."""
    same = torch.full((rows.shape[0], 1, 1), 0.5).expand(rows.shape[0], PATCHES, -1)
    return rows[torch.arange(rows.shape[0])] + same


def numbered(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return rows + torch.arange(rows.shape[0])[:, None, None]


def turned(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1).cumsum(1).transpose(0, 1)


def counted(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return rows * sum(counts.tolist())


def measured(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The size of each piece decides."""
    return torch.cat([part * part.shape[0] for part in rows.split(counts.tolist())])


def compared(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part * (1 + (part.shape != (1, PATCHES, WIDTH))) for part in rows.split(counts.tolist())])


def lengthened(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    one = (1,)
    return torch.cat([part.view(part.shape + one)[..., 0] for part in rows.split(counts.tolist())])


def of_others(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows looked up by the numbers of rows that another mask selects."""
    others = counts[counts > 1]
    return rows + rows[torch.arange(others.shape[0])].sum(0)


def of_pairs(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows looked up by their number, but not one by one: the dimension in front is another."""
    return rows[torch.arange(rows.shape[0]), torch.arange(PATCHES)[:, None]].transpose(0, 1)


class Slots(nn.Module):
    """[samples, slots, PATCHES, 3] pixels; a word a patch of each image that is there."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.features = features
        self.patch, self.embed, self.head = nn.Linear(3, WIDTH), nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        images = pixels.flatten(0, 1)
        there = (images == 0).sum((1, 2)) != images.shape[1:].numel()
        rows = self.patch(images[there].contiguous())
        found = self.features(rows, there.view(pixels.shape[:2]).sum(1))
        hidden = self.embed(ids).masked_scatter((ids == IMAGE)[..., None], found)
        return F.cross_entropy(self.head(torch.tanh(hidden)).flatten(0, 1), labels.flatten())


def batch(filled: tuple[int, int], length: int = 9, slots: int = 3) -> dict[str, torch.Tensor]:
    ids = 1 + (torch.arange(2)[:, None] * 5 + torch.arange(length)) % 30
    pixels = torch.sin(torch.arange(2 * slots * PATCHES * 3.0)).view(2, slots, PATCHES, 3)
    for sample, count in enumerate(filled):
        ids[sample, 1 : 1 + count * PATCHES] = IMAGE
        pixels[sample, count:] = 0
    return {"ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixels": pixels}


def compiled(features: Features) -> csc.CompiledModel:
    torch.manual_seed(0)
    return csc.compile(Slots(features), mesh="pp=2", example=batch((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("features", [listed, positioned])
def test_one_program_serves_any_number_of_images(features: Features) -> None:
    model = compiled(features)
    for filled in ((1, 2), (3, 0), (2, 2)):
        result = verify(model, batch(filled))
        assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ()), filled
    assert len(model.compiler.captures) == 1


@pytest.mark.slow
def test_rows_that_are_counted_one_by_one_are_a_decision_of_the_batch() -> None:
    """Each answer has a program of its own."""
    model = compiled(counted)
    for filled in ((1, 2), (3, 0), (2, 1)):
        result = verify(model, batch(filled))
        assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ()), filled


def test_placeholders_of_the_images_that_are_there_are_counted() -> None:
    wrong = batch((1, 2))
    wrong["pixels"][0, 1] = 1.0
    with pytest.raises(InputError, match="6 placeholders for 8 rows of features"):
        compiled(listed).train_step(wrong)


@pytest.mark.long
def test_smolvlm_trains() -> None:
    """A size of what a mask selects that torch finds to be made of others afterwards has no number on the way."""
    model, given = smolvlm()
    result = verify(csc.compile(model, example=given, mesh={"pp": 2}, check=False, cache=False), given)
    assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "what"),
    [
        (numbered, "computes with the numbers of rows"),
        (turned, "turns the rows that a mask has selected"),
        (measured, "how many is known only when the batch is there"),
        (compared, "how many is known only when the batch is there"),
        (lengthened, "how many is known only when the batch is there"),
        (of_others, "computes with the numbers of rows"),
        (of_pairs, "computes with the numbers of rows"),
    ],
)
def test_what_depends_on_their_number_is_refused(features: Features, what: str) -> None:
    with pytest.raises(InputError, match=what):
        compiled(features)
