"""Batches of the models in benchmarks.coverage as loaders make them: any number of images in each sample, each of its
own size where the model takes that. A sample is a list of sizes: (height, width) in patches, tiles or pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.coverage import models, more
from benchmarks.coverage.models import AUDIO, Batch, Build, grids, signal, words
from tests.models.images import tiles_batch

Samples = Sequence[Sequence[Any]]


def plain(tokens: int, side: int) -> Callable[[nn.Module, Samples], Batch]:
    """Images of one size, each with as many tokens."""

    def make(model: nn.Module, samples: Samples) -> Batch:
        batch = words([[tokens] * len(own) for own in samples], length=4 + max(map(len, samples)) * (tokens + 1))
        count = sum(map(len, samples))
        return batch | ({"pixel_values": signal(count, 3, side, side)} if count else {})

    return make


def gemma3(model: nn.Module, samples: Samples) -> Batch:
    batch = plain(4, 32)(model, samples)
    return batch | {"token_type_ids": (batch["input_ids"] == models.IMAGE).long()}


def qwen(model: nn.Module, samples: Samples) -> Batch:
    """Sizes in patches; two by two of them are a token."""
    counts = [[h * w // 4 for h, w in own] for own in samples]
    batch = words(counts, length=6 + max(sum(own) + len(own) for own in counts))
    sizes = [[1, h, w] for own in samples for h, w in own]
    if sizes:
        return grids(batch, sizes, 96)
    return batch | {"mm_token_type_ids": torch.zeros_like(batch["input_ids"]).int()}


def tiles(model: nn.Module, samples: Samples) -> Batch:
    """Sizes in pixels, cut into tiles as a processor cuts them; a text between two images."""
    sizes = [list(size) for own in samples for size in own]
    made = tiles_batch(model, sizes)
    counts = (made["input_ids"] == models.IMAGE).sum(1).tolist()
    own = [[counts.pop(0) for _ in sample] for sample in samples]
    text = words(own, length=6 + max(sum(sample) + len(sample) for sample in own))
    return text | {name: made[name] for name in ("pixel_values", "image_sizes")}


def slots(model: nn.Module, samples: Samples) -> Batch:
    """As many slots in each sample, of which a mask leaves the empty ones out."""
    most = max(1, *map(len, samples))
    pixels = signal(len(samples), most, 3, 32, 32)
    mask = torch.ones(len(samples), most, 32, 32, dtype=torch.long)
    for sample, own in enumerate(samples):
        pixels[sample, len(own) :], mask[sample, len(own) :] = 0, 0
    batch = words([[4] * len(own) for own in samples], length=6 + 5 * most)
    return batch | {"pixel_values": pixels, "pixel_attention_mask": mask}


def sounds(model: nn.Module, samples: Samples) -> Batch:
    """Sizes are frames, of at most 32."""
    frames = [length for own in samples for length in own]
    tokens = [[((length - 1) // 2 + 1 - 2) // 2 + 1 for length in own] for own in samples]
    batch = words(tokens, length=6 + max(sum(own) + len(own) for own in tokens), token=AUDIO)
    mask = (torch.arange(32) < torch.tensor(frames)[:, None]).long()
    return batch | {"input_features": signal(len(frames), 8, 32), "feature_attention_mask": mask}


@dataclass(frozen=True)
class Case:
    """sizes: of three images, different ones where the model takes them."""

    build: Build
    make: Callable[[nn.Module, Samples], Batch]
    sizes: tuple[Any, Any, Any]


SQUARE, WIDE, HIGH = (4, 4), (4, 6), (8, 4)
CASES: dict[str, Case] = {
    "LLaVA": Case(models.llava, plain(9, 24), (24, 24, 24)),
    "LLaVA-NeXT": Case(models.llava_next, tiles, ((24, 48), (48, 24), (20, 48))),
    "LLaVA-OneVision": Case(models.llava_onevision, tiles, ((24, 48), (48, 24), (20, 48))),
    "InternVL": Case(models.internvl, plain(4, 24), (24, 24, 24)),
    "Gemma 3": Case(models.gemma3, gemma3, (32, 32, 32)),
    "Qwen2-VL": Case(models.qwen2_vl, qwen, (SQUARE, WIDE, HIGH)),
    "Qwen2.5-VL": Case(models.qwen2_5_vl, qwen, (SQUARE, WIDE, HIGH)),
    "Qwen3-VL": Case(models.qwen3_vl, qwen, (SQUARE, WIDE, HIGH)),
    "Idefics 3": Case(more.idefics3, slots, (32, 32, 32)),
    "SmolVLM": Case(models.smolvlm, slots, (32, 32, 32)),
    "Qwen2-Audio": Case(models.qwen2_audio, sounds, (32, 20, 26)),
}


def samples(case: Case, counts: Sequence[int]) -> list[list[Any]]:
    """So many images in each sample, their sizes in turn."""
    sizes = iter(case.sizes * (1 + sum(counts)))
    return [[next(sizes) for _ in range(count)] for count in counts]


def built(name: str, counts: Sequence[int]) -> tuple[nn.Module, Batch]:
    """A model of the table, in training mode, and a batch with so many images in each sample."""
    torch.manual_seed(0)
    case = CASES[name]
    model, _ = case.build()
    return model.train(), case.make(model, samples(case, counts))
