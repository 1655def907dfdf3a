"""A config made small: rules on the names of its numbers, the same for all models.

tiny(config_class) -> config      every width, depth, vocabulary and picture small, no dropout, special tokens apart
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.coverage.zoo.particular import PARTICULAR

WIDTH, HEADS, HEAD, LAYERS, VOCABULARY, IMAGE = 32, 4, 8, 2, 128, 32

# The first rule whose pattern matches a whole name gives the value; lists of numbers get it entry by entry.
RULES: tuple[tuple[str, Any], ...] = (
    (r"(classifier|summary).*|initializer.*|.*_init.*|num_feat_extract_layers", None),
    (r".*(drop|dropout).*|.*_pdrop|mask_(time|feature)_prob|router_jitter_noise", 0.0),
    (r"(moe_)?n(um)?_(local_|routed_)?experts|num_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|top_k_experts|moe_k|num_selected_experts|expert_capacity", 2),
    (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|num_expert_groups", 1),
    (r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers|num_kv_shared_layers", 0),
    (r"(\w+_)?vocab_size(_per_layer_input)?|codebook_size", VOCABULARY),
    (r"((moe|shared_expert|shared_experts|moe_shared_expert)_)?(intermediate_size)(_mlp)?", 2 * WIDTH),
    (r".*intermediate_size|.*ffn_(dim|hidden_size)|d_ff|mlp_dim|n_inner|.*_inner_dim|prompt_mid_dim", 2 * WIDTH),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim|index_head_dim|d_kv|kv_channels|attention_head_size", HEAD),
    (r"qk_head_dim", 2 * HEAD),
    (r".*lora_rank|laurel_rank|hc_lowrank", 2 * HEAD),
    (r".*(linear|swa|global|mamba|ssm)?_?head_dim|mamba_d_head|dim_head|linear_(key|value)_head_dim|d_head", HEAD),
    (r"linear_num_(key|value)_heads|linear_num_heads|index_n_heads", HEADS),
    (r".*num_key_value_heads|n_head_kv|num_kv_heads|kv_n_heads|.*key_value_heads", 2),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r".*(attention_heads|num_heads|n_heads?|heads)", HEADS),
    (r"rotary_dim", HEAD),
    (r".*layer_ids|.*_layers_block_type|layer_types|.*_layer_types", None),
    (r"num_hidden_layers|n_layers?|num_layers|.*_layers|depth|resampler_depth|num_blocks|.*_depth|.*_blocks", LAYERS),
    (r"(mamba_d_|ssm_|mamba_)?(state_size|d_state)", HEAD),
    (r"(mamba_)?chunk_size", 4),
    (r"(mamba_)?(dt_rank|time_step_rank)", 4),
    (r"conv_kernel.*|.*_conv|conv_L_cache|linear_conv_kernel_dim", None),
    (r"mamba_expand|expand", 2),
    (r"(encoder_)?hidden_size_per_layer_input", HEAD),
    (r"(sliding_window|sliding_window_size|attention_window|attention_chunk_size|window_size|local_attention)", 8),
    (r"original_max_position_embeddings", 64),
    (r"max_(source|target)_positions|n_positions|(\w+_)?max_position_embeddings|max_seq_len|n_ctx", 128),
    (r"(num_mel_bins|num_mel_channels|feature_size|input_feat_per_channel)", 16),
    (r"(image_size|input_size|img_size|force_image_size|pretrain_image_size)", IMAGE),
    (r"(?!spatial|temporal).*patch_size", 8),
    (r"num_position_embeddings", 16),
    (r"index_topk|num_query_tokens|resampler_n_latents|mm_tokens_per_image|num_learnable_queries", 4),
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|model_dim|projection_dim|_width)(_global)?", WIDTH),
    (r".*embedding_size|word_embed_proj_dim", WIDTH),
    (r"(hidden_sizes|embed_dims|dim|width|dim_model|output_dim|out_dim|input_dim|query_pre_attn_scalar)", WIDTH),
    (r"adapter_(in_dim|out_dim|input_size)", WIDTH),
    (r"(output_hidden_size|out_hidden_size|text_hidden_size|output_channels|downsample_hidden_size)", WIDTH),
)  # fmt: skip
# lists of layers' numbers, and lists with an entry for each layer
PLACES = (
    r".*(block_indexes|visual_indexes|out_indices|attn_idxs|attn_indexes|vision_feature_layers?|insert_layer_id)|"
    r"cross_attention_layers|moe_layers|mlp_only_layers"
)
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
KINDS = (
    r"(\w+_)?layer_types|layers_block_type|mtp_layers_block_type|.*_layers|indexer_types|layer_rope_theta|"
    r"activation_sparsity_pattern|.*layers_pattern"
)


def tiny(config_class: Any, overrides: dict[str, Any] | None = None) -> Any:
    """The class' default config with small numbers."""
    default = config_class().to_dict()
    for name in ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "id2label", "label2id"):
        default.pop(name, None)
    tokens = Tokens()
    return config_class.from_dict(shrunk(default, tokens) | (overrides or {}))


class Tokens:
    """Special tokens by their names, each its own; the same name is the same token in every part of a config."""

    def __init__(self) -> None:
        self._known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

    def of(self, name: str) -> int:
        """The token's number."""
        plain = name.replace("_index", "_id")
        return self._known.setdefault(plain, VOCABULARY - 1 - len(self._known))


def shrunk(config: dict[str, Any], tokens: Tokens) -> dict[str, Any]:
    """The same with small numbers."""
    every = max((n for name, n in config.items() if name in DEPTHS and isinstance(n, int)), default=0)
    cut = {name: old[:LAYERS] if _by_layer(name, old, every) else old for name, old in config.items()}
    found = {name: value(name, old, tokens) for name, old in cut.items() if name != "per_layer_config"}
    kinds = next((entry for name, entry in found.items() if name in ("layer_types", "layers_block_type")), None)
    if isinstance(kinds, list) and len(kinds) > LAYERS and "num_hidden_layers" in found:
        found["num_hidden_layers"] = len(kinds)
    found |= PARTICULAR.get(str(config.get("model_type")), {})
    heads, keys = found.get("num_attention_heads"), config.get("num_key_value_heads")
    if keys is not None and keys == config.get("num_attention_heads"):
        found["num_key_value_heads"] = heads
    return found


def _by_layer(name: str, old: Any, layers: int) -> bool:
    """Whether an entry is a list of numbers, one for each layer."""
    numbers = isinstance(old, (list, tuple)) and all(isinstance(entry, (int, float)) for entry in old)
    return numbers and layers > LAYERS and len(old) == layers


def value(name: str, old: Any, tokens: Tokens) -> Any:
    """One entry's small value."""
    if isinstance(old, dict):
        if not all(isinstance(key, str) for key in old):
            return old
        return rope(old) if "rope" in name else shrunk(old, tokens)
    if isinstance(old, bool) or old is None or isinstance(old, str):
        return old
    if re.fullmatch(r".*token(_id|_index|_ids)", name):
        if name.startswith("forced"):
            return None
        return tokens.of(name) if isinstance(old, int) else [tokens.of(name)] if isinstance(old, list) else old
    if isinstance(old, list):
        return listed(name, old, tokens)
    if re.fullmatch(PLACES, name) and isinstance(old, int) and old > 0:
        return LAYERS - 1
    for pattern, small in RULES:
        if re.fullmatch(pattern, name):
            return old if small is None or _kept(name, old, small) else small
    return old


def _kept(name: str, old: Any, small: Any) -> bool:
    """Whether a value stays: what switches something off, and what is small enough."""
    return isinstance(old, int) and (old <= 0 or (old < small and not name.endswith("layers")))


def listed(name: str, old: list[Any], tokens: Tokens) -> list[Any]:
    """A list's: one entry a layer, the places of layers, or numbers."""
    if not old:
        return old
    if re.fullmatch(PLACES, name):
        return sorted({min(place, LAYERS - 1) for place in old[-1:]})
    if re.fullmatch(KINDS, name) or all(isinstance(entry, str) for entry in old):
        distinct = list(dict.fromkeys(str(entry) for entry in old))
        first = [next(entry for entry in old if str(entry) == text) for text in distinct]
        return (first * LAYERS)[: max(LAYERS, len(distinct))]
    if re.fullmatch(r"mrope_section", name):
        return [1, 1, 2]
    return [value(name, entry, tokens) if isinstance(entry, (int, float)) else entry for entry in old]


def rope(old: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: sections and factors as long as half a small head."""
    found = dict(old)
    for name, entry in old.items():
        if isinstance(entry, dict):
            found[name] = rope(entry)
        elif name == "mrope_section":
            found[name] = [1, 1, 2]
        elif name in ("long_factor", "short_factor"):
            found[name] = [1.0] * (HEAD // 2)
        elif name == "original_max_position_embeddings":
            found[name] = 64
    return found
