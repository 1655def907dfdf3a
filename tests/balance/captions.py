"""A dataset for tests.models.captions: texts of other lengths, with other numbers of images; and its collate."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.models.captions import IMAGE

Sample = dict[str, torch.Tensor]
SEED = 3


class Captions:
    """most: images of a sample, from 0 on if `lacking`."""

    def __init__(self, count: int, most: int = 3, lacking: bool = False) -> None:
        generator = np.random.default_rng(SEED)
        self.tokens = generator.integers(12, 40, count)
        self.images = generator.integers(0 if lacking else 1, most + 1, count)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(int(index))
        ids = torch.randint(1, 25, (int(self.tokens[index]),), generator=generator)
        images = int(self.images[index])
        ids[1 : 1 + images] = IMAGE
        return {"input_ids": ids, "pixels": torch.randn(4 * images, 5, generator=generator).double()}

    @property
    def lengths(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "images": self.images}


def collate(samples: list[Sample], width: int) -> Sample:
    """A row each, padded to the width; each image makes one token."""
    ids = torch.stack(
        [torch.nn.functional.pad(one["input_ids"], (0, width - len(one["input_ids"]))) for one in samples]
    )
    known = torch.arange(width) < torch.tensor([len(one["input_ids"]) for one in samples])[:, None]
    found = {"input_ids": ids, "labels": ids.masked_fill(~known | (ids == IMAGE), -100)}
    pixels = torch.cat([one["pixels"] for one in samples])
    if len(pixels):
        found["pixel_values"] = pixels
        found["image_grid_thw"] = torch.tensor(
            [[1, 2, len(one["pixels"]) // 2] for one in samples if len(one["pixels"])]
        )
    return found
