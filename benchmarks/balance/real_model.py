"""The model and samples of the real part: a LLaVA whose samples have as many tiles and tokens as real ones, a quarter.

Terms
  tile     64 x 64 pixels, of which the language model sees 64 positions (of the sets: 448 x 448 and 256)
  sample   some tiles, then text; a microbatch is one row of samples, each seeing itself

    Samples(name)                  a data set of the lengths of a set       collate(samples, width) -> microbatch
    compiled(samples, **options) -> csc.CompiledModel

python -m benchmarks.balance.real_model SET PROFILE.toml SECONDS        measures it here, on one thread
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import csc
from benchmarks.balance.lengths import SETS
from benchmarks.balance.models import TILE
from csc.balance.sample_costs import probes
from csc.planning.assign.step import BatchLayout
from csc.reports.profiling import profile

STEP, MICROBATCHES, MULTIPLE = 32, 8, 16
IMAGE, PATCH, IMAGE_TOKEN = 64, 8, 999
POSITIONS = (IMAGE // PATCH) ** 2
LEAST_TEXT = 4
Sample = dict[str, torch.Tensor]


class Samples:
    """With the lengths of one of SETS: all tiles, and a quarter of the text as of the positions of a tile."""

    def __init__(self, name: str) -> None:
        tiles, tokens = SETS[name]().T
        text = np.maximum(LEAST_TEXT, np.rint((tokens - tiles * TILE) * POSITIONS / TILE))
        self.tiles, self.text = tiles.astype(np.int64), text.astype(np.int64)

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(int(index))
        tiles, text = int(self.tiles[index]), int(self.text[index])
        words = torch.randint(1, IMAGE_TOKEN, (text,), generator=generator)
        ids = torch.cat([torch.full((tiles * POSITIONS,), IMAGE_TOKEN), words])
        return {"input_ids": ids, "pixel_values": torch.randn(tiles, 3, IMAGE, IMAGE, generator=generator)}

    @property
    def lengths(self) -> dict[str, np.ndarray]:
        return {"tokens": self.tiles * POSITIONS + self.text, "tiles": self.tiles}


def collate(samples: Sequence[Sample], width: int) -> Sample:
    """All in one row, as wide as that; positions begin anew in each sample."""
    lengths = [len(one["input_ids"]) for one in samples]
    rest = width - sum(lengths)
    positions = torch.cat([torch.arange(length) for length in (*lengths, rest)])
    ids = F.pad(torch.cat([one["input_ids"] for one in samples]), (0, rest))
    labels = ids.masked_fill((positions == 0) | (ids == IMAGE_TOKEN) | (ids == 0), -100)
    pixels = torch.cat([one["pixel_values"] for one in samples])
    return {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None], "pixel_values": pixels}


def together(samples: Samples, indices: Sequence[int]) -> Sample:
    """The microbatch of these samples."""
    width = int(samples.lengths["tokens"][list(indices)].sum())
    return collate([samples[index] for index in indices], -(-width // MULTIPLE) * MULTIPLE)


def build() -> LlavaForConditionalGeneration:
    """CLIP and Llama of 4 layers each, float32, random weights."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=3, image_size=IMAGE,
        patch_size=PATCH,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3,
        vocab_size=1000, pad_token_id=0, max_position_embeddings=8192,
    )  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    )


def compiled(samples: Samples, **options: Any) -> csc.CompiledModel:
    """With its vision tower frozen, for two pipeline ranks; planned for microbatches that are alike."""
    typical = probes(layout(samples), STEP // MICROBATCHES)[-1]
    return csc.compile(
        build(), mesh="pp=2", example=[together(samples, typical)] * MICROBATCHES, freeze=["vision_tower"],
        microbatches=MICROBATCHES, schedule="1f1b", check=False, **options,
    )  # fmt: skip


def layout(samples: Samples) -> BatchLayout:
    """Of all samples."""
    lengths = samples.lengths
    return BatchLayout(lengths["tokens"].astype(float), lengths["tiles"][:, None].astype(float), True, MULTIPLE)


def main() -> None:
    torch.set_num_threads(1)
    samples = Samples(sys.argv[1])
    sizes = [together(samples, group) for group in probes(layout(samples), STEP // MICROBATCHES)]
    profile(compiled(samples), "cpu", float(sys.argv[3]), Path(sys.argv[2]), wires=False, microbatches=sizes)


if __name__ == "__main__":
    main()
