"""The data of the digits demo: real handwritten scans, 3 x 3 grids of them, and questions about a row.

The scans are the 1,797 images of 8 x 8 pixels that scikit-learn ships (``load_digits``). Every image is made
of nine scans; a question names a row and the answer is that row's three digits in order. The scans are split
before any image is made, so no held-out scan is ever part of a training image.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

GRID = 3
CELLS = GRID * GRID
SCAN_SIZE = 8
# One pixel of border on each side: a scan can move by a pixel without losing ink or touching its neighbour.
CELL_SIZE = SCAN_SIZE + 2
IMAGE_SIZE = GRID * CELL_SIZE
PIXEL_MEAN, PIXEL_STD = 0.2, 0.35

ROWS = ("top", "middle", "bottom")
# Text and the first phase ask for these two only, so that there is something left for the LLM to learn from
# images: what "middle" means. LLaVA's own phases differ likewise, captions first and instructions second.
KNOWN_ROWS = (0, 2)
ALL_ROWS = (0, 1, 2)
WORDS = ("<pad>", "<bos>", "<eos>", "<image>", *"0123456789", *ROWS, "read", "the", "row", ":")
VOCABULARY: dict[str, int] = {word: index for index, word in enumerate(WORDS)}
ANSWER_LENGTH = GRID + 1  # three digits and <eos>
PROMPT_LENGTH = 1 + CELLS + 5
SEQUENCE_LENGTH = PROMPT_LENGTH + ANSWER_LENGTH
IGNORED = -100  # the label that Hugging Face losses leave out

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Scans:
    """Single handwritten digits: ``pixels`` float32 [N, 8, 8] in 0..1 and ``digits`` int64 [N]."""

    pixels: Tensor
    digits: Tensor

    def __len__(self) -> int:
        return len(self.digits)


def split_scans(held_out_fraction: float = 0.2, seed: int = 0) -> tuple[Scans, Scans]:
    """Return the training scans and the held-out scans, each digit split in the same proportion."""
    source = load_digits()
    pixels = torch.tensor(source.images, dtype=torch.float32) / 16
    digits = torch.tensor(source.target, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    training, held_out = [], []
    for digit in range(10):
        members = (digits == digit).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        count = round(len(members) * held_out_fraction)
        held_out.append(members[:count])
        training.append(members[count:])
    first, second = torch.cat(training), torch.cat(held_out)
    return Scans(pixels[first], digits[first]), Scans(pixels[second], digits[second])


def vary(cells: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, stretch, slant and move every cell a little: [N, 10, 10] to [N, 10, 10]."""

    def uniform(limit: float) -> Tensor:
        return (torch.rand(len(cells), generator=generator) * 2 - 1) * limit

    angle, slant = uniform(math.radians(10)), uniform(0.1)
    width, height = 1 + uniform(0.1), 1 + uniform(0.1)
    pixel = 2 / CELL_SIZE  # affine_grid counts from -1 to 1
    across, down = uniform(pixel), uniform(pixel)
    cosine, sine = angle.cos(), angle.sin()
    first = torch.stack((width * cosine, slant - sine, across), dim=-1)
    second = torch.stack((sine, height * cosine, down), dim=-1)
    affine = torch.stack((first, second), dim=1)
    grid = functional.affine_grid(affine, [len(cells), 1, CELL_SIZE, CELL_SIZE], align_corners=False)
    return functional.grid_sample(cells.unsqueeze(1), grid, align_corners=False).squeeze(1)


def draw_images(scans: Scans, chosen: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Lay the ``chosen`` scans [B, 9] out in grids: pixel values [B, 3, 30, 30].

    With a ``generator`` every scan is varied at random, as in training; without one it stays as it was read.
    """
    count = len(chosen)
    cells = functional.pad(scans.pixels[chosen.flatten()], (1, 1, 1, 1))
    if generator is not None:
        cells = vary(cells, generator)
    cells = (cells - PIXEL_MEAN) / PIXEL_STD
    rows = cells.view(count, GRID, GRID, CELL_SIZE, CELL_SIZE).transpose(2, 3)
    return rows.reshape(count, 1, IMAGE_SIZE, IMAGE_SIZE).repeat(1, 3, 1, 1)


def ask(symbols: Tensor, digits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Write questions with their answers as tokens.

    ``symbols`` [B, N] are the tokens that are read (placeholders of an image or digits as text), ``digits``
    [B, 9] what they show, ``rows`` [B] the row each question names. Returns input_ids and labels [B, S], the
    labels ignored everywhere but on the answer.
    """
    count = len(symbols)

    def word(text: str) -> Tensor:
        return torch.full((count, 1), VOCABULARY[text])

    row = (rows + VOCABULARY[ROWS[0]]).unsqueeze(1)
    prompt = torch.cat((word("<bos>"), symbols, word("read"), word("the"), row, word("row"), word(":")), dim=1)
    asked = digits.view(count, GRID, GRID)[torch.arange(count), rows]
    answer = torch.cat((asked + VOCABULARY["0"], word("<eos>")), dim=1)
    labels = torch.cat((torch.full_like(prompt, IGNORED), answer), dim=1)
    return torch.cat((prompt, answer), dim=1), labels


def ask_about_images(digits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``ask`` with the nine placeholders that the image features replace."""
    return ask(torch.full_like(digits, VOCABULARY["<image>"]), digits, rows)


def image_batches(scans: Scans, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, without end, pixel values [B, 3, 30, 30] and the digit in each cell [B, 9]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(scans), (batch_size, CELLS), generator=generator)
        yield draw_images(scans, chosen, generator), scans.digits[chosen]


def draw_rows(rows_asked: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    """Choose a row for each of ``count`` questions: int64 [count]."""
    return torch.tensor(rows_asked)[torch.randint(len(rows_asked), (count,), generator=generator)]


def text_batches(batch_size: int, seed: int) -> Iterator[Batch]:
    """Yield, without end, the task as text alone: nine random digits, a question, the answer; all [B, S]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        digits = torch.randint(10, (batch_size, CELLS), generator=generator)
        rows = draw_rows(KNOWN_ROWS, batch_size, generator)
        input_ids, labels = ask(digits + VOCABULARY["0"], digits, rows)
        yield {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


def instruction_batches(
    scans: Scans, batch_size: int, seed: int, rows_asked: tuple[int, ...] = ALL_ROWS
) -> Iterator[Batch]:
    """Yield, without end, visual instructions of one fixed shape, each about one of ``rows_asked``.

    input_ids, attention_mask and labels are int64 [B, S], pixel_values float32 [B, 3, 30, 30].
    """
    generator = torch.Generator().manual_seed(seed)
    for pixel_values, digits in image_batches(scans, batch_size, seed + 1):
        rows = draw_rows(rows_asked, batch_size, generator)
        input_ids, labels = ask_about_images(digits, rows)
        yield {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "pixel_values": pixel_values,
            "labels": labels,
        }


def held_out_images(scans: Scans, rounds: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images [I, 3, 30, 30] and digits [I, 9] in which each scan appears about ``rounds`` times.

    Each round shuffles the scans and cuts them into images; scans that fill no image sit the round out.
    """
    generator = torch.Generator().manual_seed(seed)
    images = len(scans) // CELLS
    chosen = torch.cat(
        [torch.randperm(len(scans), generator=generator)[: images * CELLS].view(images, CELLS) for _ in range(rounds)]
    )
    return draw_images(scans, chosen), scans.digits[chosen]
