"""Three encoders of different sizes and two decoders, so small that a pair trains in a second.

A sample is a picture of two or more patches, each bright or dark; the answer says the first patch: yes or no.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

PAD, IMAGE, ASK, NO, YES = range(5)
SIDES = {"narrow": (16, 4), "wide": (24, 4), "fine": (16, 2)}  # by encoder, width and patch size of pictures of 4 x 8


def encoder(name: str) -> ViTModel:
    width, patch = SIDES[name]
    torch.manual_seed(1)
    return ViTModel(
        ViTConfig(
            hidden_size=width, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=(4, 8),
            patch_size=(patch, patch), initializer_range=0.2,
        ),
        add_pooling_layer=False,
    )  # fmt: skip


def decoder(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(2)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=5, hidden_size=hidden, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            initializer_range=0.1, max_position_embeddings=32,
        )
    )  # fmt: skip


def encoders() -> dict[str, Any]:
    return {name: encoder(name) for name in SIDES}


def decoders() -> dict[str, Any]:
    return {"small": decoder(16), "large": decoder(24)}


DATA = list(range(96))


def batch(candidate: Any, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    chance = [torch.Generator().manual_seed(number) for number in numbers]
    bright = torch.stack([torch.randint(2, (1, 1, 2), generator=one) for one in chance])
    pictures = (2.0 * bright - 1).repeat_interleave(4, 2).repeat_interleave(4, 3).repeat(1, 3, 1, 1)
    tokens = candidate.model.tokens("vision", (3, 4, 8))
    answer = torch.where(bright[:, 0, 0, :1] == 1, YES, NO)
    ids = torch.cat([torch.full((len(numbers), tokens), IMAGE), torch.full((len(numbers), 1), ASK), answer], 1)
    labels = ids.clone()
    labels[:, :-1] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pictures}


def score(candidate: Any) -> torch.Tensor:
    """The probability of the right word, for 32 samples that are no training data."""
    given = batch(candidate, range(1000, 1032))
    right = given.pop("labels")[:, -1:]
    return candidate.model(**given).logits[:, -2].softmax(-1).gather(1, right).squeeze(1)


def arguments(**others: Any) -> dict[str, Any]:
    """Of csc.search."""
    return {
        "encoders": encoders(), "llms": decoders(), "data": DATA, "score": score, "batch": batch,
        "placeholders": IMAGE, "batch_size": 8, "options": {"check": False}, "budget": 0.5, **others,
    }  # fmt: skip
