"""A batch for any of the models: what its forward takes, by name, in sizes that its config gives.

batch(model, config) -> entries      two samples, the first padded, labels on the text
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.models import signal, words

LENGTH = 40
SIDE = 32
BINS = ("num_mel_bins", "feature_size", "feature_projection_input_dim")

# what some models take beside pictures: a question to their Q-former, which tokens see which picture
BESIDE_PICTURES: dict[str, Callable[[], torch.Tensor]] = {
    "bbox": lambda: torch.tensor([0.1, 0.2, 0.5, 0.6]).expand(2, LENGTH, 4).clone(),
    "qformer_input_ids": lambda: 3 + torch.arange(12).view(2, 6),
    "image_attention_mask": lambda: torch.ones(2, LENGTH, 1, dtype=torch.long),
    "image_embeds_position_mask": lambda: (torch.arange(LENGTH) // 4 == 1).long().repeat(2, 1),
}


def candidates(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Batches to try, the fullest first."""
    takes = set(inspect.signature(model.forward).parameters)
    text, ids = _text(config, takes), words([[], []], length=LENGTH, unused=3)["input_ids"]
    if "input_ids" in takes and getattr(config, "num_codebooks", 1) > 1 and not hasattr(config, "text_config"):
        yield _codes(ids, config.num_codebooks)
    extras = [*_pictures(model, config, takes), *_sounds(model, config, takes)]
    for extra in extras:
        extra |= {name: make() for name, make in BESIDE_PICTURES.items() if name in takes and "pixel_values" in extra}
    for extra in extras:
        yield _placed(model, config, text, extra)
    if not extras or not getattr(config, "is_encoder_decoder", False):
        yield text
        if "mm_token_type_ids" in takes:
            yield text | {"mm_token_type_ids": torch.zeros_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        yield text | {"decoder_input_ids": ids}
        for extra in extras:
            yield extra | {"labels": text["labels"]}
            yield extra | {"labels": text["labels"], "decoder_input_ids": ids}


def _text(config: Any, takes: set[str]) -> dict[str, torch.Tensor]:
    """What goes with tokens is left out where there are none: a decoder alone reads text, by its labels."""
    found = words([[], []], length=LENGTH, unused=3)
    known = takes if "input_ids" in takes else set()
    return {name: tensor for name, tensor in found.items() if name in known or name == "labels"}


def _codes(ids: torch.Tensor, books: int) -> dict[str, torch.Tensor]:
    """Of every sample a row for each codebook, and labels [samples, tokens, codebooks]."""
    return {"input_ids": ids.repeat_interleave(books, 0), "labels": ids[:, :, None].repeat(1, 1, books)}


def inner(config: Any, *names: str) -> Any:
    """The first of a config's parts that is there; the config itself if none is."""
    for name in names:
        part = getattr(config, name, None)
        if part is not None:
            return part
    return config


def number(config: Any, name: str, default: int) -> int:
    """A config's number; the first of a list."""
    found = getattr(config, name, default)
    return int(found[0] if isinstance(found, (list, tuple)) else found or default)


def _pictures(model: nn.Module, config: Any, takes: set[str]) -> Iterator[dict[str, Any]]:
    vision = inner(config, "vision_config", "vision_tower_config")
    side, patch = number(vision, "image_size", SIDE), number(vision, "patch_size", 8)
    channels = number(vision, "num_channels", 0) or number(vision, "in_channels", 3)
    if "image_grid_thw" in takes:
        merge = number(vision, "spatial_merge_size", 2)
        time = number(vision, "temporal_patch_size", 1)
        grid = torch.tensor([[1, 2 * merge, 2 * merge]] * 2)
        for frames in dict.fromkeys((time, 1, 2)):
            rows = signal(int(grid.prod(1).sum()), channels * frames * patch * patch)
            yield {"pixel_values": rows, "image_grid_thw": grid}
    if "pixel_values" in takes:
        plain = signal(2, channels, side, side)
        yield {"pixel_values": plain}
        if "image_sizes" in takes:
            yield {"pixel_values": plain, "image_sizes": torch.tensor([[side, side]] * 2)}
            yield {
                "pixel_values": plain[:, None].repeat(1, 2, 1, 1, 1),
                "image_sizes": torch.tensor([[side, side]] * 2),
            }
        yield {"pixel_values": plain[:, None]}
        mask = torch.ones(2, 1, side, side, dtype=torch.long)
        yield {"pixel_values": plain[:, None], "pixel_attention_mask": mask}
        yield {
            "pixel_values": plain.unfold(2, patch, patch)
            .unfold(3, patch, patch)
            .permute(0, 2, 3, 4, 5, 1)
            .reshape(2, -1, channels * patch * patch)
        }
    if "flattened_patches" in takes:
        rows = signal(2, 16, 2 + channels * patch * patch)
        rows[..., :2] = 1.0 + torch.arange(32).view(16, 2) % 4  # a patch's row and column
        yield {"flattened_patches": rows}


def _sounds(model: nn.Module, config: Any, takes: set[str]) -> Iterator[dict[str, Any]]:
    audio = inner(config, "audio_config", "encoder_config", "audio_encoder_config", "speech_config")
    bins = next((found for name in BINS if (found := number(audio, name, 0))), 0) or number(audio, "input_dim", 16)
    frames = 2 * number(audio, "max_source_positions", 64)
    for name in ("input_features", "input_values", "input_audio_embeds"):
        if name not in takes:
            continue
        for shape in ((2, bins, frames), (2, frames, bins), (2, 640), (2, 4096)):
            found: dict[str, Any] = {name: signal(*shape)}
            yield found
            for mask in ("feature_attention_mask", "input_features_mask"):
                if mask in takes:
                    yield found | {mask: torch.ones(2, frames, dtype=torch.long)}


def _placed(model: nn.Module, config: Any, text: dict[str, torch.Tensor], extra: dict[str, Any]) -> dict[str, Any]:
    """Text with as many placeholders as the encoder gives rows of features, the same number in each sample."""
    kinds = ("image", "video") if any("pixel" in name for name in extra) else ("audio",)
    token = next((found for kind in kinds if (found := placeholder(config, kind)) is not None), None)
    count = rows_of(model, extra)
    if token is None or not count or "input_ids" not in text:
        return text | extra
    found = {name: tensor.clone() for name, tensor in text.items()}
    each = count // len(found["input_ids"])
    if each > LENGTH - 8:
        found = {name: tensor for name, tensor in words([[], []], length=each + 16, unused=3).items() if name in text}
    found["input_ids"][:, 2 : 2 + each] = token
    found["labels"][:, 2 : 2 + each] = -100
    takes = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes:
            prefix = "paligemma" in getattr(config, "model_type", "")  # its types are prefix and answer, not picture
            types = (torch.arange(len(found["input_ids"][0])) > 2 + each).expand_as(found["input_ids"])
            extra = extra | {name: (types if prefix else found["input_ids"] == token).long()}
    return found | extra


def placeholder(config: Any, what: str) -> int | None:
    """The token that stands for a row of features."""
    for name in (
        f"{what}_token_id",
        f"{what}_token_index",
        f"{what}_token",
        f"{what}_placeholder_token_id",
        "media_placeholder_token_id",
    ):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None


def rows_of(model: nn.Module, extra: dict[str, Any]) -> int:
    """How many rows of features the model makes of pictures or sound; 0 if it does not say."""
    for name in ("get_image_features", "get_video_features", "get_audio_features", "get_placeholder_features"):
        for owner in (model, getattr(model, "model", None)):
            function = getattr(owner, name, None)
            if function is None:
                continue
            takes = inspect.signature(function).parameters
            given = {key: tensor for key, tensor in extra.items() if key in takes}
            if not given:
                continue
            try:
                with torch.no_grad():
                    return _rows(function(**given))
            except Exception:
                continue
    return 0


def _rows(found: Any) -> int:
    if hasattr(found, "pooler_output") and found.pooler_output is not None:
        return _rows(found.pooler_output)
    if hasattr(found, "last_hidden_state"):
        return _rows(found.last_hidden_state)
    if isinstance(found, (list, tuple)):
        return sum(_rows(entry) for entry in found) if found and not isinstance(found[0], int) else 0
    if isinstance(found, torch.Tensor) and found.dim() > 1:
        return found.shape[:-1].numel()
    return 0


def encoder(model: nn.Module) -> str | None:
    """The glob over the parameters of what reads pictures or sound; of a seq2seq model, its encoder."""
    known = "vision_tower|vision_model|visual|vision_encoder|vision|audio_tower|speech_encoder|audio_encoder|encoder"
    pattern = rf"(.*\.)?({known}|image_encoder)"
    found = [
        name for name, module in model.named_modules() if re.fullmatch(pattern, name) and list(module.parameters())
    ]
    return min(found, key=len) + ".*" if found else None
