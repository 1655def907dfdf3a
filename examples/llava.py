"""A small LLaVA as per-rank programs.

csc explain examples/llava.py:llava                    what each part costs, what freezing prunes
csc verify examples/llava.py:llava                     every gradient against eager PyTorch
csc compile examples/llava.py:llava -o build/llava     the files: read build/llava/rank_1.py
python examples/llava.py                               ten steps, all ranks in this process
torchrun --nproc-per-node 3 examples/llava.py          the same steps, one rank a process
"""

from __future__ import annotations

import os

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import csc

IMAGE_TOKEN = 99


def example_batch(samples: int = 4, length: int = 24) -> dict[str, torch.Tensor]:
    """Nine image tokens, then text that counts; the labels are the text."""
    generator = torch.Generator().manual_seed(0)
    ids = 1 + (torch.randint(0, 60, (samples, 1), generator=generator) + torch.arange(length)) % 90
    ids[:, 1:10] = IMAGE_TOKEN
    labels = ids.clone()
    labels[:, :11] = -100
    pixels = torch.randn(samples, 3, 24, 24, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "labels": labels,
    }


@csc.compile(mesh=csc.Mesh(pp=3), example=example_batch, freeze=["vision_tower", "language_model"], microbatches=2)
def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=24,
        patch_size=8,
    )
    text = LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    return LlavaForConditionalGeneration(config)


def say(text: str) -> None:
    """Under torchrun the first rank alone prints."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


if __name__ == "__main__":
    optimizer = torch.optim.AdamW(llava.parameters(), lr=1e-2)
    for step in range(10):
        loss = llava.train_step(example_batch())
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {loss:.4f}")
