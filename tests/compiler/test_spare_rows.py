"""Models that keep one image where a batch has none: `keep[0] |= ~keep.any()`, as SmolVLM does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError

IMAGE, CLASSES, WIDTH, SLOTS = 7, 9, 6, 2
Keep = Callable[[torch.Tensor], torch.Tensor]
Batch = dict[str, torch.Tensor]


class Slotted(nn.Module):
    """Each sample has places for images; `keep` says of a mask of those that are there which are computed with."""

    def __init__(self, keep: Keep, beside: Callable[[torch.Tensor], torch.Tensor | float] = lambda rows: 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.see, self.project = nn.Linear(3, 4), nn.Linear(4, WIDTH)
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.keep, self.beside = keep, beside

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        slots = pixels.view(-1, 3)
        kept = slots[self.keep((slots == 0).sum(-1) != 3)]
        rows = self.project(torch.tanh(self.see(kept)))
        hidden = self.embed(ids).masked_scatter((ids == IMAGE)[..., None], rows)
        return F.cross_entropy(self.head(torch.tanh(hidden)).flatten(0, 1), labels.flatten()) + self.beside(rows)


def batch(*images: int) -> Batch:
    """A sample for each number of images, which fill its first places."""
    generator = torch.Generator().manual_seed(len(images))
    ids = torch.randint(0, IMAGE, (len(images), 5), generator=generator)
    pixels = torch.zeros(len(images), SLOTS, 3)
    for sample, number in enumerate(images):
        ids[sample, 1 : 1 + number] = IMAGE
        pixels[sample, :number] = torch.randn(number, 3, generator=generator)
    labels = torch.randint(0, CLASSES, ids.shape, generator=generator)
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels, "pixels": pixels}


def first_if_none(keep: torch.Tensor) -> torch.Tensor:
    keep[0] |= ~keep.any()
    return keep


def written_out(keep: torch.Tensor) -> torch.Tensor:
    keep[1] = torch.logical_or(keep.any().logical_not(), keep[1])
    return keep


def step(model: nn.Module, given: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**given)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


@pytest.mark.parametrize("keep", [first_if_none, written_out])
@pytest.mark.parametrize(("mesh", "microbatches"), [("pp=1", 2), ("pp=2", 4), ("dp=2", 1)])
def test_a_microbatch_without_images(keep: Keep, mesh: str, microbatches: int) -> None:
    """Its spare row is in no place. So it is where the first microbatch, or the last, is the one without."""
    model = Slotted(keep)
    compiled = csc.compile(model, example=batch(2, 1, 0, 1), mesh=mesh, microbatches=microbatches, cache=False)
    for images in ((2, 1, 0, 1), (1, 2, 0, 0), (0, 0, 2, 1), (1, 1, 1, 1)):
        loss, expected = step(model, batch(*images))
        found = compiled.train_step(batch(*images))
        assert float(found) == pytest.approx(loss, rel=1e-6)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).norm()) <= 2e-6 * float(gradient.norm()), name
        model.zero_grad()


def set_always(keep: torch.Tensor) -> torch.Tensor:
    keep[0] = True
    return keep


def if_any(keep: torch.Tensor) -> torch.Tensor:
    keep[0] |= keep.any()
    return keep


def another(keep: torch.Tensor) -> torch.Tensor:
    keep[0] = keep[1] | ~keep.any()
    return keep


def if_few(keep: torch.Tensor) -> torch.Tensor:
    keep[0] |= ~keep[2:].any()
    return keep


def cleared(keep: torch.Tensor) -> torch.Tensor:
    keep[0] &= ~keep.any()
    return keep


@pytest.mark.parametrize("keep", [set_always, if_any, another, if_few, cleared])
def test_what_is_kept_by_other_samples_is_refused(keep: Keep) -> None:
    with pytest.raises(InputError, match="csc cannot prove"):
        csc.compile(Slotted(keep), example=batch(2, 1, 1, 1), microbatches=2, cache=False, check=False)


ADDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum": lambda rows: rows.square().sum(),
    "a mean": lambda rows: rows.square().mean(),
    "a number of rows": lambda rows: rows[:, 0].tanh().sum() / 8,
}


@pytest.mark.parametrize("what", ADDED)
@pytest.mark.long_cases("a sum", "a number of rows")
def test_rows_that_are_added_up_are_refused(what: str) -> None:
    """A microbatch without images would add its spare row to them; alone it is what eager PyTorch does."""
    model = Slotted(first_if_none, ADDED[what])
    with pytest.raises(InputError, match="csc cannot prove"):
        csc.compile(model, example=batch(2, 1, 1, 1), microbatches=2, cache=False, check=False)
    compiled = csc.compile(model, example=batch(2, 1, 1, 1), cache=False)
    loss, expected = step(model, batch(2, 0, 1, 1))
    assert float(compiled.train_step(batch(2, 0, 1, 1))) == pytest.approx(loss, rel=1e-6)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == expected.keys()


class Marked(nn.Module):
    """Every slot has a place; `mark` makes features of them with the mask of those that are kept."""

    def __init__(self, mark: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.embed, self.head = (
            nn.Linear(3, WIDTH),
            nn.Embedding(CLASSES, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.mark = mark

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        slots = pixels.view(-1, 3)
        there = slots[:, 0] > 0
        rows = self.mark(self.project(slots), first_if_none(there.clone()), slots[:, 1] > -9)
        hidden = self.embed(ids).masked_scatter((ids == IMAGE)[..., None], rows)
        return F.cross_entropy(self.head(torch.tanh(hidden)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("mark", "over_batch"),
    [
        (lambda rows, keep, every: rows * keep[:, None], False),
        (lambda rows, keep, every: (rows * keep[:, None])[every], True),
        (lambda rows, keep, every: (rows * keep[:, None])[first_if_none(every.clone())], True),
    ],
    ids=["all rows", "rows that another mask selects", "that another one selects which has a spare row"],
)
@pytest.mark.long_cases("that another one selects which has a spare row", "rows that another mask selects")
def test_spare_rows_that_have_a_place(
    mark: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], over_batch: bool
) -> None:
    """The first slot of a microbatch without any is kept there, and not in the whole batch: refused, or computed over
    the whole batch.
    """
    given = batch(2, 2, 2, 2)
    given["pixels"][:2, :, 0] = given["pixels"][:2, :, 0].abs()
    given["pixels"][2:, :, 0] = -given["pixels"][2:, :, 0].abs()
    loss, expected = step(Marked(mark), given)
    for microbatches in (1, 2):
        model = Marked(mark)
        if microbatches == 2 and not over_batch:
            with pytest.raises(InputError, match="csc cannot prove"):
                csc.compile(model, example=given, microbatches=2, cache=False, check=False)
            continue
        compiled = csc.compile(model, example=given, microbatches=microbatches, cache=False, check=False)
        assert float(compiled.train_step(given)) == pytest.approx(loss, rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)
