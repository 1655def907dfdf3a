"""Tiny random-weight multimodal models from Hugging Face classes, and batches with structure for them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

VOCABULARY = 100
IMAGE_TOKEN = 99
IGNORED = -100


def llama_config(layers: int = 4, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def llava(vision_layers: int = 3, text_layers: int = 4, tied: bool = False) -> LlavaForConditionalGeneration:
    """CLIP + projector + Llama. The last vision layer is not used (vision_feature_layer = -2), as in LLaVA."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=vision_layers,
        num_attention_heads=4,
        image_size=24,
        patch_size=8,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama_config(text_layers, tied),
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=tied,
    )
    return LlavaForConditionalGeneration(config)


def _text(samples: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Counting sequences: structure that a wrong shift or mask would show in."""
    start = torch.randint(0, VOCABULARY - 10, (samples, 1), generator=generator)
    return 1 + (start + torch.arange(length)) % (VOCABULARY - 5)


def _labels(ids: torch.Tensor, first: int, unequal: bool) -> torch.Tensor:
    """Labels from position `first` on; with `unequal`, sample i ignores i more of them."""
    labels = ids.clone()
    labels[:, :first] = IGNORED
    if unequal:
        for sample in range(len(ids)):
            labels[sample, first : first + sample] = IGNORED
    return labels


def llava_batch(samples: int = 2, length: int = 20, padded: bool = True) -> dict[str, torch.Tensor]:
    """Nine image tokens after the first; labels on the text behind them, an unequal number of them in each sample."""
    generator = torch.Generator().manual_seed(1)
    ids = _text(samples, length, generator)
    ids[:, 1:10] = IMAGE_TOKEN
    mask = torch.ones_like(ids)
    labels = _labels(ids, 12, unequal=True)
    if padded:
        mask[0, -3:] = 0
        labels[0, -3:] = IGNORED
    grid = torch.linspace(-1, 1, 24)
    image = torch.sin(3 * grid[:, None] * torch.arange(1, samples + 1).view(-1, 1, 1, 1)) * grid[None, :]
    pixels = image.expand(samples, 3, 24, 24) + 0.1 * torch.randn(samples, 3, 24, 24, generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels.contiguous(), "labels": labels}


class Valm(nn.Module):
    """Vision, audio and text: CLIP and a Whisper encoder beside each other, their features before Llama's text."""

    def __init__(self, vision_layers: int = 3, audio_layers: int = 3, text_layers: int = 4) -> None:
        super().__init__()
        self.vision_tower = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=vision_layers,
                num_attention_heads=4,
                image_size=24,
                patch_size=8,
            )
        )
        self.vision_projector = nn.Linear(32, 48)
        self.audio_tower = WhisperEncoder(whisper_config(audio_layers))
        self.audio_projector = nn.Linear(32, 48)
        self.language_model = LlamaForCausalLM(llama_config(text_layers))

    def forward(
        self,
        pixel_values: torch.Tensor,
        input_features: torch.Tensor,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        image = self.vision_projector(self.vision_tower(pixel_values).last_hidden_state)
        speech = self.audio_projector(self.audio_tower(input_features).last_hidden_state)
        text = self.language_model.get_input_embeddings()(input_ids)
        ignored = labels.new_full((len(labels), image.shape[1] + speech.shape[1]), IGNORED)
        return self.language_model(
            inputs_embeds=torch.cat([image, speech, text], dim=1), labels=torch.cat([ignored, labels], dim=1)
        ).loss


def valm() -> Valm:
    torch.manual_seed(0)
    return Valm()


def valm_batch(samples: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    return {"pixel_values": llava_batch(samples)["pixel_values"], **whisper_batch(samples, length)}


def whisper_config(layers: int) -> WhisperConfig:
    return WhisperConfig(
        d_model=32,
        encoder_layers=layers,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=16,
        dropout=0.0,
    )


class WhisperLlama(nn.Module):
    """Whisper encoder, a linear projector, Llama: speech features stand in front of the text."""

    def __init__(self, audio_layers: int = 2, text_layers: int = 2) -> None:
        super().__init__()
        self.audio_tower = WhisperEncoder(whisper_config(audio_layers))
        self.audio_projector = nn.Linear(32, 48)
        self.language_model = LlamaForCausalLM(llama_config(text_layers))

    def forward(
        self,
        input_features: torch.Tensor,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        speech = self.audio_projector(self.audio_tower(input_features).last_hidden_state)
        text = self.language_model.get_input_embeddings()(input_ids)
        ignored = labels.new_full(speech.shape[:2], IGNORED)
        return self.language_model(
            inputs_embeds=torch.cat([speech, text], dim=1), labels=torch.cat([ignored, labels], dim=1)
        ).loss


def whisper_llama() -> WhisperLlama:
    torch.manual_seed(0)
    return WhisperLlama()


def whisper_batch(samples: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = _text(samples, length, generator)
    waves = torch.sin(torch.arange(32) * torch.arange(1, 9)[:, None] / 5.0)
    features = waves.expand(samples, 8, 32) + 0.1 * torch.randn(samples, 8, 32, generator=generator)
    return {
        "input_features": features.contiguous(),
        "input_ids": ids,
        "labels": _labels(ids, 2, unequal=True),
    }
