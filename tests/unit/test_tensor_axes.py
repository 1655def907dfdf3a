"""Axes of Hugging Face's layers, and what of each parameter a shard is, found from the graph alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from csc.passes.attention import AttentionPass
from csc.passes.shapes import ShapesPass
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from csc.analysis.tensor_axes import (
    Dim,
    Division,
    Trees,
    block,
    dimensions,
    factors,
    leaf,
    product,
    ranges,
    sharded,
    stretches,
    unify,
)
from csc.capture.capture import capture
from csc.ir.program import Options

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 6, "vocab_size": 100,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        self.clip = CLIPVisionModel(CLIPVisionConfig(**sizes, num_attention_heads=6, image_size=16, patch_size=8))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.clip(pixel_values).last_hidden_state.square().mean()  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    sizes = {"n_embd": 48, "n_inner": 80, "n_layer": 1, "n_head": 6, "vocab_size": 100, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def trees_of(model: nn.Module) -> Trees:
    ids = torch.arange(2, 26).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    given = {"pixel_values": torch.rand(2, 3, 16, 16)} if isinstance(model, Patches) else batch
    program = ShapesPass()(capture(model.train(), given), Options())
    return dimensions(AttentionPass()(program, Options()).graph)


LAYER = "model.layers.0."
CASES: dict[str, tuple[Callable[[], nn.Module], dict[tuple[str, int], str], str]] = {
    "Llama": (
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
        {
            (LAYER + "self_attn.q_proj.weight", 0): "heads * 3 * (4 + 4)",
            (LAYER + "self_attn.k_proj.weight", 0): "heads * (4 + 4)",
            (LAYER + "self_attn.v_proj.weight", 0): "heads * 8",
            (LAYER + "self_attn.o_proj.weight", 1): "heads * 3 * 8",
        },
        LAYER + "mlp.down_proj.weight",
    ),
    "Phi-3": (
        lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
        {
            (LAYER + "self_attn.qkv_proj.weight", 0): "heads * 3 * (4 + 4) + heads * (4 + 4) + heads * 8",
            (LAYER + "mlp.gate_up_proj.weight", 0): "80 + 80",
        },
        LAYER + "mlp.down_proj.weight",
    ),
    "Qwen3": (
        lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
        {
            (LAYER + "self_attn.q_proj.weight", 0): "heads * 3 * (4 + 4)",
            (LAYER + "self_attn.q_norm.weight", 0): "4 + 4",  # the same for all heads: its gradient is parts of a sum
        },
        LAYER + "mlp.down_proj.weight",
    ),
    "OLMo 2": (
        lambda: Olmo2ForCausalLM(Olmo2Config(**SMALL)),
        {
            (LAYER + "self_attn.q_norm.weight", 0): "heads * 3 * (4 + 4)",
            (LAYER + "self_attn.k_norm.weight", 0): "heads * (4 + 4)",
        },
        LAYER + "mlp.down_proj.weight",
    ),
    "GPT-2": (
        gpt2,
        {
            ("transformer.h.0.attn.c_attn.weight", 1): "heads * 8 + heads * 8 + heads * 8",
            ("transformer.h.0.attn.c_attn.bias", 0): "heads * 8 + heads * 8 + heads * 8",
            ("transformer.wte.weight", 0): "vocabulary",
            ("transformer.wpe.weight", 0): "positions",
        },
        "transformer.h.0.mlp.c_fc.weight",
    ),
    "CLIP": (
        Patches,
        {("clip.encoder.layers.0.self_attn.q_proj.bias", 0): "heads * 8"},
        "clip.encoder.layers.0.mlp.fc1.weight",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long_cases("Llama")
def test_heads_and_hidden_features_are_found(name: str) -> None:
    build, texts, within = CASES[name]
    torch.manual_seed(0)
    trees = trees_of(build())
    assert {key: trees.text(*key) for key in texts} == texts
    axes = trees.axes()
    assert not axes["heads"].blocked
    (hidden,) = (axis for axis in axes.values() if axis.size == 80)
    assert not hidden.blocked and within in sharded(trees, hidden)
    assert set(sharded(trees, hidden)).isdisjoint(sharded(trees, axes["heads"]))
    if name == "Phi-3":
        boxes = trees.boxes(LAYER + "self_attn.qkv_proj.weight", Division(axes["heads"], 2), 1)
        assert boxes == (((24, 48), (56, 64), (72, 80)), ((0, 48),))
        assert trees.boxes(LAYER + "mlp.gate_up_proj.weight", Division(hidden, 2), 0) == (
            ((0, 40), (80, 120)),
            ((0, 48),),
        )
        with pytest.raises(ValueError, match="2 entries cannot be divided by 4"):
            trees.boxes(LAYER + "self_attn.qkv_proj.weight", Division(axes["heads"], 4), 0)
    if name == "GPT-2":
        (width,) = {one for key, one in axes.items() if key == "transformer.wte.weight.1"}
        with pytest.raises(ValueError, match=r"aten::layer_norm at transformer.h.0.ln_1, modeling_gpt2.py"):
            trees.boxes("transformer.wte.weight", Division(width, 2), 0)


def test_a_leaf_is_refined_wherever_it_stands() -> None:
    one, other = leaf(24), leaf(24)
    unify(one, other)
    heads, width = factors(one, [4, 6])
    low, high = stretches(width, [3, 3])
    assert factors(other, [4, 6]) == [heads, width]
    assert ranges(other, heads, 1, 2) == [(12, 24)]
    assert ranges(other, high, 0, 3) == [(0, 4), (6, 10), (12, 16), (18, 22)]  # of the other stretch all
    assert ranges(other, low, 1, 3) == [(1, 2), (3, 6), (7, 8), (9, 12), (13, 14), (15, 18), (19, 20), (21, 24)]
    assert factors(other, [2, 12])[0].size == 2 and ranges(other, heads.parts[0], 0, 2) == [(0, 12)]


def test_products_of_other_factors_meet_in_common_ones() -> None:
    one, other = leaf(24), leaf(24)
    (a, _), (_, d) = factors(one, [4, 6]), factors(other, [2, 12])
    unify(one, other)
    assert ranges(one, a.parts[0], 0, 2) == [(0, 12)] == ranges(other, a.parts[0], 0, 2)
    assert not d.blocked


@pytest.mark.parametrize(("one", "other"), [([4, 6], [6, 4]), ([3, 8], [2, 12])])
def test_what_does_not_fit_is_blocked(one: list[int], other: list[int]) -> None:
    left, right = leaf(24), leaf(24)
    parts: list[Dim] = [*factors(left, one), *factors(right, other)]
    unify(left, right)
    assert all(part.blocked for part in parts)


def test_a_blocked_dimension_blocks_what_it_is_made_of() -> None:
    whole = product([leaf(4), leaf(6)])
    block(whole, "softmax")
    assert all(part.blocked == "softmax" for part in whole.parts)
    assert all(part.blocked == "softmax" for part in factors(whole.parts[1], [2, 3]))
