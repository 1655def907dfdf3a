"""Models of 7 and 70 billion parameters, compiled, planned and simulated on a laptop: no weights, no ranks.

csc compile examples/scale.py:llava_70b --fake --timings -o build/70b             all files of 1,024 ranks
csc simulate examples/scale.py:llava_70b --fake                                   how its step runs on A100s
csc explain examples/scale.py:valm_70b --fake                                     two encoders beside a 70B LLM
csc compile examples/scale.py:llava_7b --fake --mesh pp=4,dp=2 -o build/7b        another mesh

--fake makes the model without weights (`csc.meta_init`): names, shapes and dtypes of parameters. What to look at: the
seconds of each step of the compilation, and rank_617.py. The example is one microbatch; a mesh of any size has as many.
"""

from __future__ import annotations

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import csc

LENGTH, IMAGE_TOKEN, AUDIO_TOKEN, WORDS = 8192, 128256, 128257, 128320
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
CLIP_L = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
SIGLIP_SO = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 16,
}  # fmt: skip
WHISPER_L = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
}  # fmt: skip
SCALE = {"hardware": "a100", "microbatches": 32, "schedule": "1f1b"}


def text(length: int, **placeholders: int) -> dict[str, torch.Tensor]:
    """A sample of counting words, with as many image and audio tokens as asked for at its start."""
    ids = torch.arange(length).remainder(100_000)[None]
    start = 1
    for token, count in ((IMAGE_TOKEN, placeholders.get("image", 0)), (AUDIO_TOKEN, placeholders.get("audio", 0))):
        ids[:, start : start + count] = token
        start += count
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids >= IMAGE_TOKEN, -100),
    }


def image_and_text() -> list[dict[str, torch.Tensor]]:
    """One microbatch: an image of 576 tokens in 8,192."""
    return [{**text(LENGTH, image=576), "pixel_values": torch.zeros(1, 3, 336, 336, dtype=torch.bfloat16)}]


def image_sound_and_text() -> list[dict[str, torch.Tensor]]:
    """One microbatch: an image of 144 tokens and half a minute of sound of 375 in 8,192."""
    pictures = {"pixel_values": torch.zeros(1, 3, 384, 384, dtype=torch.bfloat16)}
    sounds = {"input_features": torch.zeros(1, 128, 3000, dtype=torch.bfloat16)}
    return [{**text(LENGTH, image=144, audio=375), **pictures, **sounds}]


def llava(language: dict[str, int]) -> LlavaForConditionalGeneration:
    """CLIP-L and a Llama of these sizes, in bfloat16."""
    llama = LlamaConfig(**language, vocab_size=WORDS, max_position_embeddings=LENGTH)
    config = LlavaConfig(vision_config=CLIPVisionConfig(**CLIP_L), text_config=llama, image_token_id=IMAGE_TOKEN)
    return LlavaForConditionalGeneration(config).to(torch.bfloat16)


@csc.compile(mesh=csc.Mesh(pp=8, dp=4), example=image_and_text, freeze=["vision_tower"], recompute="full", **SCALE)
def llava_7b() -> LlavaForConditionalGeneration:
    return llava(LLAMA_7B)


@csc.compile(mesh=csc.Mesh(pp=16, dp=8, cp=8), example=image_and_text, freeze=["vision_tower"], **SCALE)
def llava_70b() -> LlavaForConditionalGeneration:
    return llava(LLAMA_70B)


@csc.compile(
    mesh=csc.Mesh(pp=16, dp=8, cp=8), example=image_sound_and_text, freeze=["vision_encoder", "audio_encoder"], **SCALE
)
def valm_70b() -> torch.nn.Module:
    model = csc.compose(
        encoders={
            "vision": SiglipVisionModel(SiglipVisionConfig(**SIGLIP_SO, vision_use_head=False)),
            "audio": WhisperEncoder(WhisperConfig(**WHISPER_L)),
        },
        projectors={"vision": "pixel-shuffle-mlp", "audio": {"kind": "stack-mlp", "factor": 4}},
        language_model=LlamaForCausalLM(LlamaConfig(**LLAMA_70B, vocab_size=WORDS, max_position_embeddings=LENGTH)),
        placeholders={"vision": IMAGE_TOKEN, "audio": AUDIO_TOKEN},
    )
    return model.to(torch.bfloat16)
