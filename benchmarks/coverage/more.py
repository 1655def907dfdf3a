"""Further models of Hugging Face, compiled by no test: `python -m benchmarks.coverage --more`.

MORE = {name: build}      as CASES of benchmarks.coverage.models
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from benchmarks.coverage.models import (
    AUDIO,
    CASES,
    IMAGE,
    TEXT,
    VIDEO,
    VISION,
    WHISPER,
    Batch,
    Build,
    signal,
    words,
)  # fmt: skip
from benchmarks.coverage.omni import OMNI

PLAIN = {key: value for key, value in TEXT.items() if key != "head_dim"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIGLIP = {**VISION, "image_size": 32, "vision_use_head": False}
SEQ2SEQ = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "dropout": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
QFORMER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "encoder_hidden_size": 32, "vocab_size": 100, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip


def text(model: type[nn.Module], config: type[Any], **options: Any) -> Build:
    """A text model: its class, its config's, and what that takes beside sizes."""
    return lambda: (model(config(**{**PLAIN, **options})), words([[], []]))


def gpt2() -> tuple[nn.Module, Batch]:
    config = hf.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=100, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), words([[], []])


def mamba() -> tuple[nn.Module, Batch]:
    config = hf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100, state_size=4, pad_token_id=0)
    batch = words([[], []])
    del batch["attention_mask"]
    return hf.MambaForCausalLM(config), batch


def bert() -> tuple[nn.Module, Batch]:
    config = hf.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return hf.BertForMaskedLM(config), words([[], []])


def whisper() -> tuple[nn.Module, Batch]:
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "max_target_positions": 64}
    tokens = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER, **decoder, **tokens))
    return model, {"input_features": signal(2, 8, 32), "labels": words([[], []])["labels"]}


def aya_vision() -> tuple[nn.Module, Batch]:
    config = hf.AyaVisionConfig(
        vision_config=hf.SiglipVisionConfig(**SIGLIP), text_config=hf.Cohere2Config(**PLAIN, sliding_window=8),
        image_token_index=IMAGE, downsample_factor=2,
    )  # fmt: skip
    return hf.AyaVisionForConditionalGeneration(config), words([[4], [4, 4]]) | {"pixel_values": signal(3, 3, 32, 32)}


def mistral3() -> tuple[nn.Module, Batch]:
    """Images of two sizes, padded to one."""
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**{**VISION, "image_size": 32}, head_dim=8),
        text_config=hf.MistralConfig(**TEXT), image_token_index=IMAGE, spatial_merge_size=2,
    )  # fmt: skip
    return hf.Mistral3ForConditionalGeneration(config), words([[4], [2]]) | {
        "pixel_values": signal(2, 3, 32, 32), "image_sizes": torch.tensor([[32, 32], [16, 32]]),
    }  # fmt: skip


def slots() -> Batch:
    """One image in the first sample, two in the second, and an empty slot."""
    pixels, mask = signal(2, 2, 3, 32, 32), torch.ones(2, 2, 32, 32, dtype=torch.long)
    pixels[0, 1], mask[0, 1] = 0, 0
    return words([[4], [4, 4]]) | {"pixel_values": pixels, "pixel_attention_mask": mask}


def idefics2() -> tuple[nn.Module, Batch]:
    perceiver = {
        "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8,
        "num_key_value_heads": 2, "hidden_size": 32,
    }  # fmt: skip
    config = hf.Idefics2Config(
        vision_config={**VISION, "image_size": 32}, perceiver_config=perceiver,
        text_config={**TEXT, "model_type": "mistral"}, image_token_id=IMAGE,
    )  # fmt: skip
    return hf.Idefics2ForConditionalGeneration(config), slots()


def idefics3() -> tuple[nn.Module, Batch]:
    config = hf.Idefics3Config(
        vision_config={**VISION, "image_size": 32}, text_config={**TEXT, "model_type": "llama"}, scale_factor=2,
        image_token_id=IMAGE,
    )  # fmt: skip
    return hf.Idefics3ForConditionalGeneration(config), slots()


def blip2() -> tuple[nn.Module, Batch]:
    """Query tokens that are not all zero, as a trained model has them."""
    opt = {
        "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 3, "ffn_dim": 64,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64, "dropout": 0, "pad_token_id": 0,
    }  # fmt: skip
    config = hf.Blip2Config(
        vision_config=VISION, qformer_config=QFORMER, text_config=opt, num_query_tokens=4, image_token_index=IMAGE
    )
    model = hf.Blip2ForConditionalGeneration(config)
    nn.init.normal_(model.query_tokens)
    return model, words([[4], [4]]) | {"pixel_values": signal(2, 3, 24, 24)}


def florence2() -> tuple[nn.Module, Batch]:
    """Attention over windows, and over channels."""
    vision = {
        "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "num_heads": [4, 4],
        "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_groups": [4, 4], "window_size": 4,
        "projection_dim": 32, "max_temporal_embeddings": 4, "max_position_embeddings": 8, "drop_path_rate": 0.0,
    }  # fmt: skip
    config = hf.Florence2Config(
        vision_config=vision, text_config={**SEQ2SEQ, "model_type": "bart"}, image_token_id=IMAGE
    )
    return hf.Florence2ForConditionalGeneration(config), words([[17], [17]]) | {"pixel_values": signal(2, 3, 32, 32)}


def as_qwen(base: str, model: type[nn.Module], config: type[Any], **options: Any) -> Build:
    """A sibling of a Qwen-VL of the table, with its sizes and its batch. options: of the text model."""

    def build() -> tuple[nn.Module, Batch]:
        sibling, batch = CASES[base]()
        known = sibling.config.to_dict()  # type: ignore[operator, union-attr]
        parts = {key: {k: v for k, v in known[key].items() if k != "model_type"} for key in PARTS}
        parts["text_config"].update(options)
        return model(config(**parts, **{key: known[key] for key in TOKENS})), batch

    return build


PARTS = ("text_config", "vision_config")
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip


def video_llama3() -> tuple[nn.Module, Batch]:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.VideoLlama3Config(
        vision_config={**vision, "patch_size": 4}, text_config={**TEXT, "model_type": "qwen2"}, image_token_id=IMAGE,
        video_token_id=VIDEO,
    )  # fmt: skip
    return hf.VideoLlama3ForConditionalGeneration(config), words([[4], [8]]) | {
        "pixel_values": signal(16 + 32, 48), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
        "image_merge_sizes": torch.tensor([2, 2]),
    }  # fmt: skip


def lfm2_vl() -> tuple[nn.Module, Batch]:
    """Short convolutions between attentions."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    language = {**vision, "num_key_value_heads": 2, "vocab_size": 100, "num_hidden_layers": 3}
    config = hf.Lfm2VlConfig(
        vision_config={**vision, "num_patches": 16, "patch_size": 4, "vision_use_head": False},
        text_config={**language, "layer_types": ["conv", "full_attention", "conv"]}, image_token_id=IMAGE,
        downsample_factor=2,
    )  # fmt: skip
    return hf.Lfm2VlForConditionalGeneration(config), words([[4], [4]]) | {
        "pixel_values": signal(2, 16, 48), "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }  # fmt: skip


def granite_speech() -> tuple[nn.Module, Batch]:
    """Batch norms in its encoder."""
    encoder = {
        "input_dim": 8, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 4, "dim_head": 8,
        "output_dim": 10, "context_size": 8, "max_pos_emb": 16, "dropout": 0, "conv_kernel_size": 3,
        "conv_expansion_factor": 2,
    }  # fmt: skip
    config = hf.GraniteSpeechConfig(
        text_config={**TEXT, "model_type": "granite"}, encoder_config=encoder, audio_token_index=AUDIO, window_size=8,
        projector_config={**QFORMER, "model_type": "blip_2_qformer"}, downsample_rate=4, has_lora_adapter=False,
    )  # fmt: skip
    batch = words([[4], [4]], token=AUDIO)
    return hf.GraniteSpeechForConditionalGeneration(config), batch | {"input_features": signal(2, 16, 8)}


MORE: dict[str, Build] = {
    "GPT-2": gpt2,
    "Phi-3": text(hf.Phi3ForCausalLM, hf.Phi3Config),
    "Gemma 2": text(hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=8, sliding_window=8),
    "gpt-oss": text(
        hf.GptOssForCausalLM, hf.GptOssConfig, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "Qwen3-MoE": text(hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, head_dim=8, **EXPERTS),
    "OLMo 2": text(hf.Olmo2ForCausalLM, hf.Olmo2Config),
    "SmolLM3": text(hf.SmolLM3ForCausalLM, hf.SmolLM3Config),
    "Cohere 2": text(hf.Cohere2ForCausalLM, hf.Cohere2Config, sliding_window=8),
    "BART": lambda: (hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)), words([[], []])),
    "BERT": bert,
    "Mamba": mamba,
    "Whisper": whisper,
    "Aya Vision": aya_vision,
    "Mistral 3": mistral3,
    "Idefics 2": idefics2,
    "Idefics 3": idefics3,
    "BLIP-2": blip2,
    "Florence-2": florence2,
    "Qwen3-VL-MoE": as_qwen("Qwen3-VL", hf.Qwen3VLMoeForConditionalGeneration, hf.Qwen3VLMoeConfig, **EXPERTS),
    "Qwen3.5": as_qwen("Qwen3-VL", hf.Qwen3_5ForConditionalGeneration, hf.Qwen3_5Config, **LINEAR),
    "Video-LLaMA 3": video_llama3,
    "LFM2-VL": lfm2_vl,
    "Granite Speech": granite_speech,
    **OMNI,
}  # fmt: skip
