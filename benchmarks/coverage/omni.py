"""Models of Hugging Face that take text, pictures and sound, and decide by tokens what of it they use.

OMNI = {name: build}        as CASES of benchmarks.coverage.models
phi4_batch(images, sounds)  for each sample, how many tiles a picture has (0: no picture), and its tokens of sound
omni_batch(images, sounds)  the same, of tokens of a picture
"""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn

from benchmarks.coverage.models import AUDIO, END, IMAGE, START, TEXT, VIDEO, Batch, Build, signal, words

SOUND_START, SOUND_END = 94, 93
OMNI_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
FRAMES = 16  # of a sound; both encoders make 4 tokens of them


def placed(ids: torch.Tensor, sample: int, at: int, tokens: list[int]) -> int:
    """Write tokens into a sample; where the next ones may stand."""
    ids[sample, at : at + len(tokens)] = torch.tensor(tokens)
    return at + len(tokens) + 1


def labelled(batch: Batch) -> Batch:
    """With labels for the tokens below the special ones."""
    ids = batch["input_ids"]
    hidden = (batch["attention_mask"] == 0) | (ids > 90)
    return batch | {"labels": ids.masked_fill(hidden, -100)}


def phi4() -> tuple[nn.Module, Batch]:
    config = hf.Phi4MultimodalConfig(
        **{**{k: v for k, v in TEXT.items() if k != "head_dim"}, "num_hidden_layers": 4},
        max_position_embeddings=64, original_max_position_embeddings=64,
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 32, "crop_size": 32, "patch_size": 8, "image_token_id": IMAGE,
        },
        audio_config={
            "hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 4, "input_size": 16,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
            "time_reduction": 4, "audio_token_id": AUDIO, "bias_max_distance": 8,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"  # sdpa takes the encoder for causal where no tile is padded, and csc does not
    return hf.Phi4MultimodalForCausalLM(config), phi4_batch()


def phi4_batch(
    images: tuple[bool, ...] = (True, True), sounds: tuple[int, ...] = (4, 3), length: int = 40, first: int = 0
) -> Batch:
    """images: whether a sample's text speaks of its picture; sounds: the tokens of its sound. Their pixels and waves
    are there anyway, as a data loader pads them.
    """
    batch = words([[] for _ in images], length=length)
    ids = batch["input_ids"]
    ids[batch["attention_mask"] == 1] = 3 + (ids[batch["attention_mask"] == 1] + first) % 80
    for sample, (image, sound) in enumerate(zip(images, sounds)):
        at = 1 + first % 3
        if image:
            at = placed(ids, sample, at, [IMAGE] * PHI4_TOKENS)
        if sound:
            placed(ids, sample, at, [AUDIO] * sound)
    samples = len(images)
    return labelled(batch) | {
        "image_pixel_values": signal(samples, 2, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 32]] * samples),
        "image_attention_mask": torch.ones(samples, 2, 4, 4, dtype=torch.long),
        "audio_input_features": signal(samples, FRAMES, 16),
        "audio_embed_sizes": torch.tensor([sound or 4 for sound in sounds]),
    }  # fmt: skip


PHI4_TOKENS = 13  # a picture of one tile: two rows of three, twice, and one between


def omni() -> tuple[nn.Module, Batch]:
    config = hf.Qwen2_5OmniThinkerConfig(
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [1], "out_hidden_size": 32,
        },
        audio_config={
            "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 8,
            "max_source_positions": 16, "n_window": 4, "output_dim": 32,
        },
        text_config={**{k: v for k, v in TEXT.items() if k != "head_dim"}, "rope_parameters": OMNI_ROPE},
        audio_token_index=AUDIO, image_token_index=IMAGE, video_token_index=VIDEO, audio_start_token_id=SOUND_START,
        audio_end_token_id=SOUND_END, vision_start_token_id=START, vision_end_token_id=END, user_token_id=3,
    )  # fmt: skip
    config.vision_start_token_id = START
    return hf.Qwen2_5OmniThinkerForConditionalGeneration(config), omni_batch()


def omni_batch(
    images: tuple[int, ...] = (4, 6), sounds: tuple[int, ...] = (4, 3), length: int = 40, first: int = 0
) -> Batch:
    """images: tokens of each sample's picture, 0: none; sounds: of its sound."""
    batch = words([[] for _ in images], length=length)
    ids = batch["input_ids"]
    ids[batch["attention_mask"] == 1] = 3 + (ids[batch["attention_mask"] == 1] + first) % 80
    for sample, (image, sound) in enumerate(zip(images, sounds)):
        at = 1 + first % 3
        if image:
            at = placed(ids, sample, at, [START, *[IMAGE] * image, END])
        if sound:
            placed(ids, sample, at, [SOUND_START, *[AUDIO] * sound, SOUND_END])
    grids = [[1, 4, image] for image in images if image]
    frames = [4 * sound for sound in sounds if sound]
    batch = labelled(batch)
    if grids:
        rows = sum(height * width for _, height, width in grids)
        batch |= {"pixel_values": signal(rows, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor(grids)}
    if frames:
        mask = (torch.arange(FRAMES) < torch.tensor(frames)[:, None]).long()
        batch |= {"input_features": signal(len(frames), 8, FRAMES), "feature_attention_mask": mask}
    return batch


OMNI: dict[str, Build] = {"Phi-4 multimodal": phi4, "Qwen2.5-Omni": omni}
