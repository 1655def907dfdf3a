"""Features kept by image: packed patches in any order and grouping, and encoders in which images are not alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from benchmarks.coverage import models as coverage
from csc.driver.features import Cut, are_apart, equal_cuts
from tests.compiler.test_features import Batch, Stepped, close, counts, same, step
from tests.models.hf import llava, llava_batch

pytestmark = pytest.mark.usefixtures("traces")

SIZES = [[1, 4, 4], [1, 4, 6], [1, 6, 4], [1, 4, 4], [1, 2, 8], [1, 4, 6]]
WIDTH = 3 * 2 * 4 * 4


def image(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(math.prod(SIZES[number % len(SIZES)]), WIDTH, generator=generator)


def with_images(numbers: Sequence[int]) -> Batch:
    """A sample for each of these images, whatever else is in the batch."""
    sizes = [SIZES[number % len(SIZES)] for number in numbers]
    batch = coverage.grids(coverage.words([[t * h * w // 4] for t, h, w in sizes], unused=0), sizes, WIDTH)
    return batch | {"pixel_values": torch.cat([image(number) for number in numbers])}


def qwen(name: str, example: Any, folder: Path | None, microbatches: int = 2) -> csc.CompiledModel:
    torch.manual_seed(0)
    model, _ = getattr(coverage, name)()
    return csc.compile(
        model, mesh="pp=2", example=example, freeze=["visual"], microbatches=microbatches, cache_features=folder
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_packed_images_serve_in_any_order_and_grouping(name: str, tmp_path: Path) -> None:
    """A step encodes the microbatches that have a new image, and no others."""
    first = [with_images([0, 1]), with_images([2, 3])]
    whole, kept = qwen(name, first, None), qwen(name, first, tmp_path)
    same(step(kept, first), step(whole, first))
    assert counts(kept)[0] == 4
    for batch, made in (
        (first, 0),
        ([with_images([1, 0]), with_images([3, 2])], 0),
        ([with_images([2, 0]), with_images([1, 4])], 2),
        ([with_images([4, 1]), with_images([4, 2])], 0),
        ([with_images([3, 1, 2]), with_images([0])], 0),
    ):
        close(step(kept, batch), step(whole, batch))
        assert counts(kept)[0] == made
    again = qwen(name, first, tmp_path)
    same(step(again, first), step(whole, first))
    assert counts(again)[0] == 0, "another process, or another day"


class Scaled(nn.Module):
    """What images are, by a number that the batch as a whole has."""

    def __init__(self, by: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.by = by

    def forward(self, hidden: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return hidden * self.by(hidden, grid)


class Packed(nn.Module):
    """Patches of images one behind the other."""

    def __init__(self, by: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.scaled, self.out = nn.Linear(6, 8), Scaled(by), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.out(self.scaled(self.patches(pixel_values), image_grid_thw)).relu()
        return nn.functional.cross_entropy(self.head(hidden), labels)


def patches(grid: Sequence[Sequence[int]], seeds: Sequence[int]) -> Batch:
    rows = [torch.randn(t * h * w, 6, generator=torch.Generator().manual_seed(s)) for (t, h, w), s in zip(grid, seeds)]
    pixels = torch.cat(rows)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grid), "labels": torch.arange(len(pixels)) % 4}


def eager(model: nn.Module, batch: Batch) -> Stepped:
    trained = {name: one for name, one in model.named_parameters() if name.startswith("head.")}
    loss = model(**batch)
    return loss.item(), dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


TWO, FOUR = [1, 2, 2], [1, 2, 4]


@pytest.mark.parametrize(
    ("by", "alone"),
    [
        (lambda hidden, grid: 2.0, True),
        (lambda hidden, grid: 1.0 / hidden.shape[0], False),
        (lambda hidden, grid: 1.0 / grid.amax(), False),
        (lambda hidden, grid: 1.0 / len(grid), False),
        (lambda hidden, grid: torch.linspace(0.5, 2.0, hidden.shape[0])[:, None], False),
        (lambda hidden, grid: 1.0 + hidden.mean(), False),
    ],
    ids=["alone", "by rows", "by the largest", "by images", "by place", "by all"],
)
@pytest.mark.long_cases("by place", "by the largest", "by images", "alone")
def test_what_images_have_of_others_is_seen(by: Any, alone: bool, tmp_path: Path, caplog: Any) -> None:
    """Whatever else is packed with an image, loss and gradients are eager's."""
    caplog.set_level(logging.INFO, "csc")
    example = patches([TWO, TWO], [1, 2])
    model = Packed(by)
    kept = csc.compile(model, example=example, freeze=["patches", "out"], cache_features=tmp_path, check=False)
    for grid, seeds, made in (
        ([TWO, TWO], [1, 2], 2), ([TWO, TWO], [2, 1], 0), ([TWO, TWO, TWO], [1, 2, 3], 3), ([TWO, FOUR], [3, 4], 2),
        ([FOUR, TWO], [4, 1], 0), ([TWO], [2], 0), ([FOUR, TWO, FOUR], [4, 2, 5], 3), ([TWO, TWO], [1, 2], 0),
    ):  # fmt: skip
        for again in (False, True):
            close(step(kept, patches(grid, seeds)), eager(model, patches(grid, seeds)))
            assert counts(kept)[0] == (0 if again else made) or (not alone and not again)
    assert ("is one unit" in caplog.text) is not alone


def test_odd_images_and_files_that_are_cut_short(tmp_path: Path) -> None:
    """Equal images, one of a single patch, another shape of as many rows, a video; then every file is damaged."""
    model = Packed(lambda hidden, grid: 2.0)
    options: Any = {"example": patches([TWO, TWO], [1, 2]), "freeze": ["patches", "out"], "check": False}
    kept = csc.compile(model, **options, cache_features=tmp_path)
    odd = [
        ([TWO, TWO], [1, 1], 2), ([TWO, TWO, TWO], [1, 1, 1], 0), ([[1, 1, 1], TWO], [5, 1], 2), ([[1, 1, 1]], [5], 0),
        ([[1, 1, 4], TWO], [1, 1], 2), ([[1, 4, 1], TWO], [1, 1], 2), ([[3, 2, 2], TWO], [6, 1], 2),
        ([TWO, [3, 2, 2]], [1, 6], 0),
    ]  # fmt: skip
    for grid, seeds, made in odd:
        close(step(kept, patches(grid, seeds)), eager(model, patches(grid, seeds)))
        assert counts(kept)[0] == made
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:20])
    again = csc.compile(model, **options, cache_features=tmp_path)
    for made in (2, 0):
        close(step(again, patches([TWO, [1, 1, 1]], [1, 5])), eager(model, patches([TWO, [1, 1, 1]], [1, 5])))
        assert counts(again)[0] == made


class Shared(nn.Module):
    """What rows have of something that all rows share."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.shape[0]


class Counted(nn.Module):
    """Images as rows, each divided by how many there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), Shared(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.encoder(images)), labels)


def test_rows_that_depend_on_their_number_are_kept_for_it(tmp_path: Path) -> None:
    def batch(numbers: Sequence[int]) -> Batch:
        rows = [torch.randn(1, 6, generator=torch.Generator().manual_seed(number)) for number in numbers]
        return {"images": torch.cat(rows), "labels": torch.arange(len(rows)) % 4}

    example = batch(range(4))
    model = Counted()
    kept = csc.compile(model, example=example, freeze=["encoder"], cache_features=tmp_path, check=False)
    for numbers in (
        [0, 1, 2, 3],
        [3, 2, 1, 0],
        [0, 1, 2, 3, 4, 5],
        [0, 1],
        [2, 3, 0, 1, 5, 6],
        [1, 0],
        [3],
        [3, 2, 1, 0],
    ):
        close(step(kept, batch(numbers)), eager(model, batch(numbers)))


def test_parts_that_meet_are_told_from_those_that_do_not() -> None:
    rows = {"x": torch.randn(12, 5)}
    weight = torch.randn(5, 3)

    def alone(entries: Any) -> dict[str, torch.Tensor]:
        return {"y": (entries["x"] @ weight).unflatten(0, (-1, 4)).mean(1)}

    def together(entries: Any) -> dict[str, torch.Tensor]:
        made = alone(entries)["y"]
        return {"y": made + 1e-6 * made.sum(0)}

    def counts_of(*shapes: tuple[int, ...]) -> list[int]:
        return [one.count for one in equal_cuts({str(n): shape for n, shape in enumerate(shapes)}, {"y": (24, 3)})]

    assert [one.count for one in equal_cuts({"x": (12, 5)}, {"y": (3, 3)})] == [3, 1]
    assert counts_of((12, 5), (8,)) == [4, 2, 1]
    assert counts_of((12, 5), ()) == []
    cut = Cut({"x": (4, 4, 4)}, {"y": (1, 1, 1)})
    assert are_apart(alone, rows, cut)
    assert are_apart(alone, rows, Cut({"x": (8, 4)}, {"y": (2, 1)}))
    assert not are_apart(alone, rows, Cut({"x": (6, 6)}, {"y": (1, 2)}))
    assert not are_apart(together, rows, cut)
    assert not are_apart(lambda _: {"y": torch.ones(3, 3)}, rows, cut), "what shows nothing proves nothing"


def test_new_images_of_several_microbatches_share_a_run_of_the_encoder(tmp_path: Path) -> None:
    """Three microbatches of four images, one new in each: one run of the encoder, with the bits of three."""
    samples = llava_batch(24, padded=False)

    def batch(*groups: Sequence[int]) -> list[Batch]:
        return [{name: one[list(group)] for name, one in samples.items()} for group in groups]

    def compiled(folder: Path | None) -> csc.CompiledModel:
        example = batch(range(4), range(4, 8), range(8, 12))
        return csc.compile(
            llava(), mesh="pp=2", example=example, freeze=["vision_tower"], microbatches=3, cache_features=folder
        )

    kept, whole = compiled(tmp_path), compiled(None)
    step(kept, batch(range(4), range(4, 8), range(8, 12)))
    for groups, made in (
        ([range(4), range(4, 8), range(8, 12)], (0, 12)),
        ([range(4), range(4, 8), [8, 9, 10, 12]], (4, 8)),  # three that are kept are compared
        ([range(4), range(4, 8), [8, 9, 10, 13]], (4, 8)),
        ([[0, 1, 2, 14], [15, 3, 4, 5], [6, 16, 7, 8]], (4, 9)),  # three new ones, and one that is kept
        ([[0, 1, 17, 14], [18, 19, 17, 5], [6, 20, 21, 8]], (8, 4)),  # one of them twice, one alone
        ([[0, 1, 17, 14], [18, 19, 17, 5], [6, 20, 21, 8]], (0, 12)),
    ):
        same(step(kept, batch(*groups)), step(whole, batch(*groups)))
        assert counts(kept) == made


def test_new_images_of_another_size_have_their_own_run(tmp_path: Path) -> None:
    """Packed images go where one with the same grid was."""
    model = Packed(lambda hidden, grid: 2.0)
    example = [patches([TWO, TWO, FOUR], [1, 2, 3]), patches([TWO, TWO, FOUR], [4, 5, 6])]
    kept = csc.compile(model, example=example, freeze=["patches", "out"], microbatches=2, cache_features=tmp_path)
    step(kept, example)
    for seeds, made in (
        ([[1, 2, 3], [4, 5, 6]], (0, 6)),
        ([[1, 2, 13], [4, 5, 16]], (6, 0)),  # each is encoded whole until four are compared
        ([[1, 12, 13], [4, 15, 16]], (3, 4)),  # both new ones in the first
        ([[21, 22, 13], [24, 5, 16]], (6, 0)),  # no other place of that size: each in its own
    ):
        ready = [patches([TWO, TWO, FOUR], own) for own in seeds]
        found = step(kept, ready)
        merged = {name: torch.cat([one[name] for one in ready]) for name in ready[0]}
        close(found, eager(model, merged))
        assert counts(kept) == made, seeds
