"""The models, their batch and the meshes of the benchmark."""

from __future__ import annotations

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import csc

LENGTH, IMAGE_TOKEN = 8192, 128256
WHOLE = 80  # layers of the 70B
MICROBATCHES = 32
MESHES = {  # by ranks
    1: csc.Mesh(),
    16: csc.Mesh(pp=16),
    128: csc.Mesh(pp=16, cp=8),
    1024: csc.Mesh(pp=16, cp=8, dp=8),
}
VISION = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip


def model(layers: int) -> nn.Module:
    """LLaVA without weights, in bfloat16 and training mode."""
    text = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128320, max_position_embeddings=LENGTH,
    )  # fmt: skip
    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_id=IMAGE_TOKEN)
    with csc.meta_init():
        return LlavaForConditionalGeneration(config).to(torch.bfloat16).train()


def batch() -> dict[str, torch.Tensor]:
    """One sample: an image of 576 tokens, then words."""
    ids = torch.arange(LENGTH).remainder(100_000)[None]
    ids[:, 1:577] = IMAGE_TOKEN
    pixels = torch.zeros(1, 3, 336, 336, dtype=torch.bfloat16)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100), "pixel_values": pixels}
