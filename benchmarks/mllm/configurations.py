"""The nine configurations of Cornstarch's evaluation (arXiv 2503.11367): VLM, ALM and VALM at S, M and L.

Terms
  component   an encoder or a language model: a Hugging Face class and the sizes published for the model of that name
  depth       how many layers a stack is built with; `layers` of them is the whole model
  period      after how many layers a stack repeats itself (2 where two kinds of attention alternate)

    CONFIGURATIONS    name -> Configuration

One microbatch, bfloat16: 1,024 text tokens; one image of 1280 x 720; 3,000 frames of audio, which are 1,500 positions.
An encoder with a fixed table of positions sees the image as ceil(1280 / side) x ceil(720 / side) square tiles; of a
tile of 448 x 448 the language model sees 256 positions, four patches in each, as in InternVL. As in that evaluation,
70b and 72b have 40 layers, embeddings and heads are not tied, and EVA-CLIP's tiles are 448 wide.

What differs from a published model, where transformers has no class for it or one that cannot be traced, stands in
the component's `notes`. Tensor parallelism (2 there) is not modelled: a rank is one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma2Config,
    Gemma2Model,
    InternVLVisionConfig,
    InternVLVisionModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    MixtralConfig,
    MixtralModel,
    Phi3Config,
    Phi3Model,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen2AudioEncoderConfig,
    Qwen2Config,
    Qwen2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
    WhisperConfig,
)
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from benchmarks.mllm.experts import BALANCED

IMAGE_WIDTH, IMAGE_HEIGHT = 1280, 720
TEXT_TOKENS = 1024
AUDIO_POSITIONS = 1500
CLASS_TOKEN = 1


@dataclass(frozen=True)
class Component:
    """What to build. sizes: arguments of `config` besides the one called `depth`; input: shape of what an encoder is
    fed; dropped, merged: as in models.Encoder.
    """

    name: str
    model: Callable[[Any], nn.Module]
    config: Callable[..., Any]
    layers: int
    sizes: Mapping[str, Any]
    depth: str = "num_hidden_layers"
    period: int = 1
    input: tuple[int, ...] = ()
    dropped: int = 0
    merged: int = 1
    notes: str = ""

    @property
    def width(self) -> int:
        """Size of the vectors that it gives."""
        return self.merged * int(self.sizes.get("hidden_size") or self.sizes["d_model"])

    @property
    def shallow(self) -> int:
        """The least depth with a first layer, every kind of layer that repeats, and a last one."""
        return self.period + 2

    def build(self, depth: int) -> nn.Module:
        """The Hugging Face module with that many layers."""
        return self.model(self.config(**self.sizes, **{self.depth: depth}))


@dataclass(frozen=True, eq=False)
class Configuration:
    """One model of the benchmark. components: "vision", "audio" and "llm", those it has, in order of execution.
    Two are equal if they are the same object.
    """

    name: str
    components: Mapping[str, Component]

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from the published models."""
        return tuple(f"{part.name}: {part.notes}" for part in self.components.values() if part.notes)


def tiles_of(side: int) -> tuple[int, ...]:
    return (math.ceil(IMAGE_WIDTH / side) * math.ceil(IMAGE_HEIGHT / side), 3, side, side)


def _decoder(width: int, inner: int, heads: int, groups: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "pad_token_id": 0,
        "max_position_embeddings": 16384,
        **more,
    }


def vision_sizes(width: int, inner: int, heads: int, image: Any, patch: Any, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
        **more,
    }


def _audio(width: int, mels: int, **more: Any) -> dict[str, Any]:
    return {
        "d_model": width,
        "encoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "num_mel_bins": mels,
        "max_source_positions": AUDIO_POSITIONS,
        **more,
    }


def _vit(config: Any) -> nn.Module:
    return ViTModel(config, add_pooling_layer=False)


LLAMA_8B = Component("llama-8b", LlamaModel, LlamaConfig, 32, _decoder(4096, 14336, 32, 8, 128256))
LLAMA_70B = Component(
    "llama-70b", LlamaModel, LlamaConfig, 40, _decoder(8192, 28672, 64, 8, 128256), notes="40 of its 80 layers"
)
INTERNLM2_20B = Component(
    "internlm2-20b",
    LlamaModel,
    LlamaConfig,
    48,
    _decoder(6144, 16384, 48, 8, 92544),
    notes="the Llama class: the same block, with query, key and value in three products instead of one",
)
QWEN2_72B = Component(
    "qwen2-72b", Qwen2Model, Qwen2Config, 40, _decoder(8192, 29568, 64, 8, 152064), notes="40 of its 80 layers"
)
QWEN2_14B = Component(
    "qwen2-14b", Qwen2Model, Qwen2Config, 48, _decoder(5120, 13824, 40, 8, 152064), notes="the sizes of Qwen2.5-14B"
)
MISTRAL_7B = Component(
    "mistral-7b", MistralModel, MistralConfig, 32, _decoder(4096, 14336, 32, 8, 32768, sliding_window=None)
)
PHI3_SMALL = Component(
    "phi3-small",
    Phi3Model,
    Phi3Config,
    32,
    _decoder(4096, 14336, 32, 8, 100352),
    notes="the Phi3 class, with dense attention in all layers: transformers has no block-sparse attention",
)
GEMMA2_27B = Component(
    "gemma2-27b",
    Gemma2Model,
    Gemma2Config,
    46,
    _decoder(4608, 36864, 32, 16, 256000, head_dim=128, query_pre_attn_scalar=144, sliding_window=4096),
    period=2,
    notes="attention and output logits are not soft-capped",
)
MIXTRAL_8X7B = Component(
    "mixtral-8x7b",
    MixtralModel,
    MixtralConfig,
    32,
    _decoder(
        4096, 14336, 32, 8, 32000,
        num_local_experts=8, num_experts_per_tok=2, sliding_window=None, experts_implementation=BALANCED,
    ),
    notes="every expert gets an equal share of the tokens: FLOPs of two experts a token, state and reads of all eight",
)  # fmt: skip

PIXTRAL_400M = Component(
    "pixtral-400m",
    PixtralVisionModel,
    PixtralVisionConfig,
    24,
    vision_sizes(1024, 4096, 16, IMAGE_WIDTH, 16),
    input=(1, 3, IMAGE_HEIGHT, IMAGE_WIDTH),
)
INTERN_VIT_6B = Component(
    "intern_vit-6b",
    InternVLVisionModel,
    InternVLVisionConfig,
    45,
    vision_sizes(3200, 12800, 25, [448, 448], [14, 14], use_qk_norm=True, norm_type="rms_norm"),
    input=tiles_of(448),
    dropped=CLASS_TOKEN,
    merged=4,
    notes="the sizes of V1-5",
)
VIT_22B = Component(
    "vit-22b",
    _vit,
    ViTConfig,
    48,
    vision_sizes(6144, 24576, 48, 448, 14),
    input=tiles_of(448),
    dropped=CLASS_TOKEN,
    merged=4,
    notes="the ViT class: attention and MLP one after the other, not side by side; queries and keys not normalised",
)
SIGLIP_878M = Component(
    "siglip-878m",
    SiglipVisionModel,
    SiglipVisionConfig,
    27,
    vision_sizes(1152, 4304, 16, 384, 14),
    input=tiles_of(384),
    notes="the vision half of so400m; the name counts the text half too",
)
EVACLIP_18B = Component(
    "evaclip-18b",
    CLIPVisionModel,
    CLIPVisionConfig,
    48,
    vision_sizes(5120, 25600, 40, 448, 14),
    input=tiles_of(448),
    dropped=CLASS_TOKEN,
    merged=4,
    notes="the CLIP class: layer norms and biases where EVA-CLIP has RMS norms and none",
)
QWEN2_VISION_675M = Component(
    "qwen2_vision-675m",
    _vit,
    ViTConfig,
    32,
    vision_sizes(1280, 5120, 16, (728, 1288), 14),
    input=(1, 3, 728, 1288),
    dropped=CLASS_TOKEN,
    merged=4,
    notes="the ViT class: the same block, but a table of positions instead of rotary ones, whose sizes the published "
    "class reads from tensors; sides rounded to multiples of 28 and four patches in one position, as published",
)

WHISPER_242M = Component(
    "whisper-242m",
    WhisperEncoder,
    WhisperConfig,
    12,
    _audio(768, 80),
    depth="encoder_layers",
    input=(1, 80, 2 * AUDIO_POSITIONS),
    notes="the encoder of whisper-small; the name counts the decoder too",
)
WHISPER_307M = Component(
    "whisper-307m",
    WhisperEncoder,
    WhisperConfig,
    24,
    _audio(1024, 80),
    depth="encoder_layers",
    input=(1, 80, 2 * AUDIO_POSITIONS),
    notes="the encoder of whisper-medium",
)
WHISPER_1_5B = Component(
    "whisper-1.5b",
    WhisperEncoder,
    WhisperConfig,
    32,
    _audio(1280, 128),
    depth="encoder_layers",
    input=(1, 128, 2 * AUDIO_POSITIONS),
    notes="the encoder of whisper-large-v3; the name counts the decoder too",
)
QWEN2_AUDIO = Component(
    "qwen2_audio",
    Qwen2AudioEncoder,
    Qwen2AudioEncoderConfig,
    32,
    _audio(1280, 128),
    depth="encoder_layers",
    input=(1, 128, 2 * AUDIO_POSITIONS),
    notes="it halves the number of positions, to 750",
)

CONFIGURATIONS = {
    found.name: found
    for found in (
        Configuration("VLM-S", {"vision": PIXTRAL_400M, "llm": LLAMA_8B}),
        Configuration("VLM-M", {"vision": INTERN_VIT_6B, "llm": GEMMA2_27B}),
        Configuration("VLM-L", {"vision": VIT_22B, "llm": QWEN2_72B}),
        Configuration("ALM-S", {"audio": WHISPER_242M, "llm": PHI3_SMALL}),
        Configuration("ALM-M", {"audio": WHISPER_307M, "llm": INTERNLM2_20B}),
        Configuration("ALM-L", {"audio": QWEN2_AUDIO, "llm": MIXTRAL_8X7B}),
        Configuration("VALM-S", {"vision": SIGLIP_878M, "audio": WHISPER_242M, "llm": MISTRAL_7B}),
        Configuration("VALM-M", {"vision": QWEN2_VISION_675M, "audio": WHISPER_307M, "llm": QWEN2_14B}),
        Configuration("VALM-L", {"vision": EVACLIP_18B, "audio": WHISPER_1_5B, "llm": LLAMA_70B}),
    )
}
