"""Small language models whose layers can be divided, by what their layers are like, for test_tensor.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.models import composed, keys, mixed
from tests.models.hf import llava, llava_batch

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 100,
    "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

Batch = dict[str, torch.Tensor]


def text(samples: int = 4, length: int = 12) -> Batch:
    ids = torch.randint(3, 100, (samples, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 10, -100)}


FEW = {"num_key_value_heads": 2}


def _of(model: type[nn.Module], config: type[Any], **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return model(config(**SMALL | more))

    return make


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Fused queries, keys and values; biases; tied embeddings; a vocabulary that does not divide."""
    torch.manual_seed(0)
    sizes = {"n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 16}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=2))


COLUMNS_AND_ROWS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def lora(base: str = "llama", targets: Sequence[str] = COLUMNS_AND_ROWS) -> nn.Module:
    """Adapters at columns and at rows, of attention and of the MLP."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(MODELS[base](), LoraConfig(r=4, target_modules=list(targets)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: then every gradient of lora_A would be zero too
                parameter.normal_(std=0.1)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _of(hf.LlamaForCausalLM, hf.LlamaConfig),
    "tied": _of(hf.LlamaForCausalLM, hf.LlamaConfig, tie_word_embeddings=True),
    "biases": _of(hf.LlamaForCausalLM, hf.LlamaConfig, attention_bias=True, mlp_bias=True),
    "qwen3": _of(hf.Qwen3ForCausalLM, hf.Qwen3Config, head_dim=8),
    "olmo2": _of(hf.Olmo2ForCausalLM, hf.Olmo2Config),
    "phi3": _of(hf.Phi3ForCausalLM, hf.Phi3Config),
    "gpt2": gpt2,
    "dropped": lambda: gpt2(0.1),
    "mixtral": _of(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "qwen3moe": _of(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=8,
    ),
    "sharedexpert": _of(
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "lora": lora,
    "few": _of(hf.LlamaForCausalLM, hf.LlamaConfig, **FEW),
    "fewdropped": _of(hf.LlamaForCausalLM, hf.LlamaConfig, **FEW, attention_dropout=0.1),
    "one": _of(hf.LlamaForCausalLM, hf.LlamaConfig, num_key_value_heads=1),
    "odd": _of(hf.LlamaForCausalLM, hf.LlamaConfig, **FEW, num_attention_heads=6, intermediate_size=96, head_dim=6),
    "biasedfew": _of(hf.LlamaForCausalLM, hf.LlamaConfig, **FEW, attention_bias=True, mlp_bias=True),
    "qwen3few": _of(hf.Qwen3ForCausalLM, hf.Qwen3Config, **FEW, head_dim=8),
    "olmo2few": _of(hf.Olmo2ForCausalLM, hf.Olmo2Config, **FEW),
    "phi3few": _of(hf.Phi3ForCausalLM, hf.Phi3Config, **FEW),
    "gemma2few": _of(hf.Gemma2ForCausalLM, hf.Gemma2Config, **FEW, head_dim=8, sliding_window=8),
    **{kind: partial(keys.KeysRead, kind) for kind in keys.KINDS},
    "lorafew": lambda: lora("few"),
    "fusedlora": lambda: lora("phi3few", ["qkv_proj", "o_proj"]),
    "llava": llava,
    "towers": composed.towers,
    "patches": lambda: mixed.built("Qwen2.5-VL", [1])[0],
}
BATCHES: dict[str, Callable[[int], Batch]] = dict.fromkeys(MODELS, text) | {
    "llava": llava_batch,
    "towers": lambda samples: composed.batch(composed.towers(), samples),
    "patches": lambda samples: mixed.built("Qwen2.5-VL", [1 + i % 2 for i in range(samples)])[1],
}
