"""The models of the digits demo: a CLIP vision encoder, a Llama, and the LLaVA that takes over both."""

from pathlib import Path

import torch
from data import CELL_SIZE, CELLS, IMAGE_SIZE, SEQUENCE_LENGTH, VOCABULARY
from safetensors.torch import save_file
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)


def vision_config() -> CLIPVisionConfig:
    """One patch is one cell of the grid: nine image tokens, and CLS, which LLaVA drops."""
    return CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=CELL_SIZE,
        attention_dropout=0.0,
    )


def text_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * SEQUENCE_LENGTH,
        pad_token_id=VOCABULARY["<pad>"],
        bos_token_id=VOCABULARY["<bos>"],
        eos_token_id=VOCABULARY["<eos>"],
        attention_dropout=0.0,
        # About 1 / sqrt(hidden_size). The default, 0.02, suits wider models and starts slowly at this width.
        initializer_range=0.08,
        tie_word_embeddings=False,
        use_cache=False,
    )


def llava_config() -> LlavaConfig:
    return LlavaConfig(
        vision_config=vision_config(),
        text_config=text_config(),
        image_token_index=VOCABULARY["<image>"],
        image_seq_length=CELLS,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )


def build_encoder(seed: int) -> CLIPVisionModel:
    torch.manual_seed(seed)
    return CLIPVisionModel(vision_config())


def build_llm(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(text_config())


def build_llava(seed: int) -> LlavaForConditionalGeneration:
    """A LLaVA with random weights in all of its parts."""
    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(llava_config())


def join(encoder: CLIPVisionModel, llm: LlamaForCausalLM, seed: int) -> LlavaForConditionalGeneration:
    """A LLaVA with the weights of both models and a projector that has learnt nothing."""
    llava = build_llava(seed)
    llava.model.vision_tower.load_state_dict(encoder.state_dict())
    llava.model.language_model.load_state_dict(llm.model.state_dict())
    llava.lm_head.load_state_dict(llm.lm_head.state_dict())
    return llava


def save_weights(model: nn.Module, path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}, path)
