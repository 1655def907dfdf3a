"""Tiny random encoders and language models of the families that csc.compose takes, and batches for what they make."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import csc
from csc.composition import ComposedModel
from tests.models.hf import IGNORED, VOCABULARY, whisper_config

PLACEHOLDERS = {"vision": 99, "audio": 98, "ocr": 97}
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 2,
    "bos_token_id": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip

ENCODERS = {
    "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION)),
    "siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION, vision_use_head=False)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION)),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**VISION), add_pooling_layer=False),
    "whisper": lambda: WhisperEncoder(whisper_config(2)),
}
LANGUAGE_MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**TEXT, sliding_window=8)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**TEXT)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**TEXT, sliding_window=8)),
}


def composed(
    encoders: dict[str, str], projectors: dict[str, Any], language_model: str = "llama", **options: Any
) -> ComposedModel:
    """composed({"vision": "clip"}, {"vision": "mlp"}): a model of the families named, of fixed random weights."""
    torch.manual_seed(0)
    return csc.compose(
        encoders={name: ENCODERS[kind]() for name, kind in encoders.items()},
        projectors=projectors,
        language_model=LANGUAGE_MODELS[language_model](),
        placeholders={name: PLACEHOLDERS[name] for name in encoders},
        **options,
    )


def valm(**options: Any) -> ComposedModel:
    """CLIP, a Whisper encoder, Llama."""
    projectors = {"vision": "pixel-shuffle-mlp", "audio": "stack-mlp"}
    return composed({"vision": "clip", "audio": "whisper"}, projectors, **options)


def towers(layers: int = 2) -> ComposedModel:
    """CLIP and a Whisper encoder of four heads each, beside a Llama of eight."""
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(**VISION | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers})
    text = hf.LlamaConfig(**TEXT | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 4,
    })  # fmt: skip
    return csc.compose(
        encoders={"vision": hf.CLIPVisionModel(vision), "audio": WhisperEncoder(whisper_config(layers))},
        projectors={"vision": "mlp", "audio": "stack-mlp"},
        language_model=hf.LlamaForCausalLM(text),
        placeholders={name: PLACEHOLDERS[name] for name in ("vision", "audio")},
    )


def items(model: ComposedModel, modality: str, samples: int, slots: int | None = None) -> torch.Tensor:
    """Random items; slots None: one a sample, without a dimension for slots."""
    shape = (8, 32) if model.modalities[modality].kind.input == "input_features" else (3, 32, 32)
    lead = (samples,) if slots is None else (samples, slots)
    return torch.randn(*lead, *shape, generator=torch.Generator().manual_seed(len(modality)))


def batch(model: ComposedModel, samples: int = 2, slots: int | None = None, text: int = 8) -> dict[str, torch.Tensor]:
    """Per sample: a word, the placeholders of each modality, words that count; the first sample is padded by two."""
    found: dict[str, torch.Tensor] = {}
    columns = [torch.full((samples, 1), 5)]
    for name, modality in model.modalities.items():
        found[modality.keyword] = given = items(model, name, samples, slots)
        tokens = model.tokens(name, given.shape[-modality.kind.item_dims :]) * (slots or 1)
        columns.append(torch.full((samples, tokens), modality.placeholder))
    columns.append(1 + (3 * torch.arange(samples)[:, None] + torch.arange(text)) % 90)
    ids = torch.cat(columns, 1)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, : ids.shape[1] - text + 1] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **found}


class Resampler(nn.Module):
    """A projector of the user's own, which halves the number of tokens."""

    def __init__(self, width: int = 24, hidden: int = 32) -> None:
        super().__init__()
        self.project = nn.Linear(width, hidden)

    def tokens(self, count: int) -> int:
        return count // 2

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        items, tokens, width = features.shape
        return self.project(features.view(items, tokens // 2, 2, width).mean(2))
