"""The models of the coverage table: Hugging Face classes with random weights in tiny configurations, each with a batch.

A batch is what the model's own processor would give, for two samples: images of different sizes and numbers, a sample
without an image where the model allows one, audio of different lengths, padding on the right, labels on the text.

    CASES = {name: build};  build() -> (model in training mode, batch)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Batch = dict[str, torch.Tensor]
Build = Callable[[], tuple[nn.Module, Batch]]

IMAGE, VIDEO, AUDIO, START, END = 99, 98, 97, 96, 95
IGNORED = -100
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 24,
    "patch_size": 8,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 8,
    "max_source_positions": 16, "dropout": 0.0,
}  # fmt: skip


def words(images: list[list[int]], length: int = 24, token: int = IMAGE, unused: int = 2) -> Batch:
    """Counting sequences, each with as many placeholders as its images have tokens; the first sample is padded."""
    samples = len(images)
    ids = 3 + (7 * torch.arange(samples)[:, None] + torch.arange(length)) % 80
    mask = torch.ones_like(ids)
    mask[0, length - unused :] = 0
    for sample, counts in enumerate(images):
        start = 1
        for count in counts:
            ids[sample, start : start + count] = token
            start += count + 1
    labels = ids.masked_fill((mask == 0) | (ids == token), IGNORED)
    labels[:, 0] = IGNORED
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def signal(*shape: int) -> torch.Tensor:
    """Waves with a little noise, the same ones in every run."""
    count = torch.Size(shape).numel()
    noise = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return (torch.sin(torch.arange(count) / 7.0) + 0.1 * noise).view(shape)


# text


def llama() -> tuple[nn.Module, Batch]:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)), words([[], []])


def qwen3() -> tuple[nn.Module, Batch]:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT)), words([[], []])


def gemma3_text() -> tuple[nn.Module, Batch]:
    """Two of three layers see a sliding window."""
    config = hf.Gemma3TextConfig(**TEXT, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    return hf.Gemma3ForCausalLM(config), words([[], []])


def mistral() -> tuple[nn.Module, Batch]:
    return hf.MistralForCausalLM(hf.MistralConfig(**TEXT, sliding_window=8)), words([[], []])


# vision and text


def llava() -> tuple[nn.Module, Batch]:
    """The second sample holds two images."""
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE
    )
    return hf.LlavaForConditionalGeneration(config), words([[9], [9, 9]]) | {"pixel_values": signal(3, 3, 24, 24)}


def llava_next() -> tuple[nn.Module, Batch]:
    """Images of two shapes, cut into tiles of the grid that fits, padding taken off."""
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        image_grid_pinpoints=[[24, 48], [48, 24]],
    )
    # 9 tokens of the base image; 3 rows of 6 + 1 or 6 rows of 3 + 1 of the tiles
    batch = words([[9 + 21], [9 + 24]], length=40)
    sizes = torch.tensor([[24, 48], [48, 24]])
    return hf.LlavaNextForConditionalGeneration(config), batch | {
        "pixel_values": signal(2, 3, 3, 24, 24), "image_sizes": sizes,
    }  # fmt: skip


def internvl() -> tuple[nn.Module, Batch]:
    """The first sample holds no image."""
    vision = hf.InternVLVisionConfig(**{**VISION, "image_size": [24, 24], "patch_size": [6, 6]})
    config = hf.InternVLConfig(
        vision_config=vision, text_config=hf.Qwen2Config(**TEXT), image_token_id=IMAGE, downsample_ratio=0.5
    )
    return hf.InternVLForConditionalGeneration(config), words([[], [4, 4]]) | {"pixel_values": signal(2, 3, 24, 24)}


def gemma3() -> tuple[nn.Module, Batch]:
    """Its mask lets an image's tokens see each other."""
    config = hf.Gemma3Config(
        vision_config={**VISION, "image_size": 32, "vision_use_head": False},
        text_config={**TEXT, "sliding_window": 8},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
    )
    batch = words([[], [4]])
    batch |= {"pixel_values": signal(1, 3, 32, 32), "token_type_ids": (batch["input_ids"] == IMAGE).long()}
    return hf.Gemma3ForConditionalGeneration(config), batch


def grids(batch: Batch, grids: list[list[int]], width: int) -> Batch:
    """What Qwen's processors give beside the text: patches of all images in one row, grids, token types."""
    patches = sum(t * h * w for t, h, w in grids)
    return batch | {
        "pixel_values": signal(patches, width),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).int(),
    }


QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def qwen2_vl() -> tuple[nn.Module, Batch]:
    """Two images of different size in the second sample, none in the first."""
    config = hf.Qwen2VLConfig(
        vision_config={"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
        text_config={**TEXT, "rope_parameters": MROPE},
        **QWEN_IDS,
    )
    batch = grids(words([[], [4, 6]]), [[1, 4, 4], [1, 4, 6]], 3 * 2 * 4 * 4)
    return hf.Qwen2VLForConditionalGeneration(config), batch


def qwen2_5_vl() -> tuple[nn.Module, Batch]:
    """Windowed attention in the encoder; images of different size, one in each sample."""
    config = hf.Qwen2_5_VLConfig(
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [1], "out_hidden_size": 32,
        },
        text_config={**TEXT, "rope_parameters": MROPE},
        **QWEN_IDS,
    )  # fmt: skip
    batch = grids(words([[4], [6]]), [[1, 4, 4], [1, 4, 6]], 3 * 2 * 4 * 4)
    return hf.Qwen2_5_VLForConditionalGeneration(config), batch


def qwen3_vl() -> tuple[nn.Module, Batch]:
    """DeepStack: features of two encoder layers are added to the first layers of the language model."""
    config = hf.Qwen3VLConfig(
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
            "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
        },
        text_config={**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        **QWEN_IDS,
    )  # fmt: skip
    batch = grids(words([[4], [6]]), [[1, 4, 4], [1, 4, 6]], 3 * 2 * 4 * 4)
    return hf.Qwen3VLForConditionalGeneration(config), batch


def paligemma() -> tuple[nn.Module, Batch]:
    """The prompt, images included, sees all of itself."""
    config = hf.PaliGemmaConfig(
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={**TEXT, "model_type": "gemma"},
        image_token_index=IMAGE,
        projection_dim=32,
    )
    batch = words([[9], [9]])
    types = (batch["labels"] != IGNORED).long()
    return hf.PaliGemmaForConditionalGeneration(config), batch | {
        "pixel_values": signal(2, 3, 24, 24), "token_type_ids": types,
    }  # fmt: skip


def llava_onevision() -> tuple[nn.Module, Batch]:
    """As LLaVA-NeXT, with SigLIP and Qwen2."""
    config = hf.LlavaOnevisionConfig(
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grid_pinpoints=[[24, 48], [48, 24]],
    )
    batch = words([[9 + 21], [9 + 24]], length=40)
    return hf.LlavaOnevisionForConditionalGeneration(config), batch | {
        "pixel_values": signal(2, 3, 3, 24, 24), "image_sizes": torch.tensor([[24, 48], [48, 24]]),
    }  # fmt: skip


def glm4v() -> tuple[nn.Module, Batch]:
    config = hf.Glm4vConfig(
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "image_size": 16,
            "out_hidden_size": 32,
        },
        text_config={**TEXT, "rope_parameters": MROPE},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=94,
        video_end_token_id=93,
    )  # fmt: skip
    batch = grids(words([[4], [6]]), [[1, 4, 4], [1, 4, 6]], 3 * 2 * 4 * 4)
    return hf.Glm4vForConditionalGeneration(config), batch


def mllama() -> tuple[nn.Module, Batch]:
    """Text attends to tiles of images in layers of cross-attention."""
    config = hf.MllamaConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 4, "image_size": 24, "patch_size": 8, "max_num_tiles": 2, "vision_output_dim": 96,
            "intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        text_config={
            **TEXT, "cross_attention_layers": [1, 3], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        image_token_index=IMAGE,
    )  # fmt: skip
    return hf.MllamaForConditionalGeneration(config), words([[1], [1]]) | {
        "pixel_values": signal(2, 1, 2, 3, 24, 24),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
        "cross_attention_mask": torch.ones(2, 24, 1, 2, dtype=torch.long),
    }


def smolvlm() -> tuple[nn.Module, Batch]:
    """One image in the first sample, two in the second; the empty slot is left out by a mask."""
    config = hf.SmolVLMConfig(
        vision_config={**VISION, "image_size": 32}, text_config={**TEXT, "model_type": "llama"}, scale_factor=2,
        image_token_id=IMAGE,
    )  # fmt: skip
    pixels, mask = signal(2, 2, 3, 32, 32), torch.ones(2, 2, 32, 32, dtype=torch.long)
    pixels[0, 1], mask[0, 1] = 0, 0
    return hf.SmolVLMForConditionalGeneration(config), words([[4], [4, 4]]) | {
        "pixel_values": pixels, "pixel_attention_mask": mask,
    }  # fmt: skip


# audio and text


def voxtral() -> tuple[nn.Module, Batch]:
    config = hf.VoxtralConfig(
        audio_config={
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_mel_bins": 8, "max_source_positions": 16,
        },
        text_config={**TEXT, "model_type": "llama"},
        audio_token_id=AUDIO,
    )  # fmt: skip
    batch = words([[4], [4]], token=AUDIO)
    return hf.VoxtralForConditionalGeneration(config), batch | {"input_features": signal(2, 8, 32)}


def qwen2_audio() -> tuple[nn.Module, Batch]:
    """Two recordings of different length: 8 and 5 tokens."""
    config = hf.Qwen2AudioConfig(
        audio_config={**WHISPER, "model_type": "qwen2_audio_encoder"},
        text_config={**TEXT, "model_type": "qwen2"},
        audio_token_id=AUDIO,
    )
    batch = words([[8], [5]], token=AUDIO)
    features = torch.ones(2, 32, dtype=torch.long)
    features[1, 20:] = 0
    return hf.Qwen2AudioForConditionalGeneration(config), batch | {
        "input_features": signal(2, 8, 32), "feature_attention_mask": features,
    }  # fmt: skip


class WhisperLlama(nn.Module):
    """A Whisper encoder, a linear projector and Llama, put together by hand: speech stands in front of the text."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        self.audio_tower = WhisperEncoder(hf.WhisperConfig(**WHISPER))
        self.projector = nn.Linear(32, 32)
        self.language_model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))

    def forward(self, input_features: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        speech = self.projector(self.audio_tower(input_features).last_hidden_state)
        text = self.language_model.get_input_embeddings()(input_ids)
        ignored = labels.new_full(speech.shape[:2], IGNORED)
        embeddings, targets = torch.cat([speech, text], dim=1), torch.cat([ignored, labels], dim=1)
        return self.language_model(inputs_embeds=embeddings, labels=targets).loss


def whisper_llama() -> tuple[nn.Module, Batch]:
    batch = words([[], []])
    del batch["attention_mask"]
    return WhisperLlama(), batch | {"input_features": signal(2, 8, 32)}


CASES: dict[str, Build] = {
    "LLaVA": llava,
    "LLaVA-NeXT": llava_next,
    "InternVL": internvl,
    "Qwen2-VL": qwen2_vl,
    "Qwen2.5-VL": qwen2_5_vl,
    "Qwen3-VL": qwen3_vl,
    "Gemma 3": gemma3,
    "Qwen2-Audio": qwen2_audio,
    "Whisper encoder + Llama": whisper_llama,
    "Llama": llama,
    "Qwen3": qwen3,
    "Gemma 3, text": gemma3_text,
    "Mistral": mistral,
    "PaliGemma": paligemma,
    "LLaVA-OneVision": llava_onevision,
    "GLM-4V": glm4v,
    "Mllama": mllama,
    "Voxtral": voxtral,
    "SmolVLM": smolvlm,
}
