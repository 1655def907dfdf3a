"""What no rule on names can tell of a config: entries that are None by default and have to be something, sizes that
follow from others, a kind of layer that two layers would leave out. By the config's model_type, parts of configs too.
"""

from __future__ import annotations

from typing import Any

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]}
IMAGE_TOKEN = 99
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": IMAGE_TOKEN},
    "chameleon": {"vocabulary_map": {"<image>": IMAGE_TOKEN, "IMGIMGBSA": 60, "IMGIMGBSB": 61}},
    "cohere_asr": {"decoder_start_token_id": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "emu3": {"vocabulary_map": {"<image>": IMAGE_TOKEN, "<|extra_200|>": 60, "<|visual token 000000|>": 61}},
    "ernie4_5_vl_moe_text": {"rope_parameters": MROPE},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm4v_moe_text": {"rope_parameters": MROPE},
    "glm5_next_text": {"index_topk": 16},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": MROPE | {"mrope_section": [1, 1, 1, 1]}},
    "instructblip": {"image_token_index": IMAGE_TOKEN},
    "instructblipvideo": {"video_token_index": IMAGE_TOKEN},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16},
    "moonshine": {"pad_token_id": 0, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90},
    "qwen2_5_omni_vision_encoder": {"window_size": 32},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_vision": {"window_size": 32},
    "qwen3_omni_moe_text": {"rope_parameters": MROPE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "step3p5": {"sliding_window": 8},
    "udop": {"decoder_start_token_id": 0},
    "xlstm": {"embedding_dim": 64, "hidden_size": 64, "mode": "train", "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64, "attention_head_dim": 16,
    },
    "zamba2": {
        "n_mamba_heads": 8, "mamba_headdim": 8, "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1], "attention_hidden_size": 64, "attention_head_dim": 16,
    },
}  # fmt: skip
