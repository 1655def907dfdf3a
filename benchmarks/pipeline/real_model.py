"""The model of the real part: a LLaVA large enough that a step takes seconds on one core, and its profile.

build() -> model        batch() -> one global batch        compiled(**options) -> csc.CompiledModel

python -m benchmarks.pipeline.real_model PROFILE.toml SECONDS        measures it here, on one thread
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import csc
from csc.reports.profiling import profile

MICROBATCHES, SAMPLES, TEXT = 8, 2, 32  # SAMPLES in each microbatch, of TEXT tokens after the image
IMAGE, PATCH, IMAGE_TOKEN = 64, 8, 999


def build() -> LlavaForConditionalGeneration:
    """CLIP of 8 layers, Llama of 8, float32, random weights: 60 million parameters."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=6,
        image_size=IMAGE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=8,
        num_attention_heads=10,
        num_key_value_heads=5,
        vocab_size=1000,
        pad_token_id=0,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    )


def batch() -> dict[str, torch.Tensor]:
    """A global batch: in each sample the image's tokens, then text."""
    generator = torch.Generator().manual_seed(1)
    count, tokens = MICROBATCHES * SAMPLES, (IMAGE // PATCH) ** 2
    text = torch.randint(1, IMAGE_TOKEN, (count, TEXT), generator=generator)
    ids = torch.cat([torch.full((count, tokens), IMAGE_TOKEN), text], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(count, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.cat([torch.full((count, tokens), -100), text], dim=1),
    }


def compiled(meta: bool = False, **options: Any) -> Any:
    """The model with its vision tower frozen, for two pipeline ranks. meta: without weights, which are loaded."""
    with csc.meta_init() if meta else nullcontext():
        model = build()
    return csc.compile(
        model,
        mesh=csc.Mesh(pp=2),
        example=batch(),
        freeze=["vision_tower"],
        microbatches=MICROBATCHES,
        **options,
    )


def main() -> None:
    torch.set_num_threads(1)
    profile(compiled(), "cpu", float(sys.argv[2]), Path(sys.argv[1]), wires=False)  # two of these run at once


if __name__ == "__main__":
    main()
