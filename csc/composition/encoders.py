"""Hugging Face encoders: what each takes, which of its outputs are features, and how many tokens they are.

Terms
  item      one picture or one clip of sound: what the encoder sees at once
  features  (items, tokens, width): the hidden states that stand for the item
  prefix    tokens before the patches that stand for no place in the picture: the class token of CLIP, ViT and DINOv2
  layer     None: the encoder's own last hidden state. A number: `hidden_states[number]`, -2 as LLaVA has it

    kind_of(modality, encoder) -> EncoderFamily                        InputError for a class that is not listed
    features(encoder, kind, items, layer, keep_prefix)        (items, tokens, width)
    grid(encoder, kind, item_shape)                           patches of one item, or frames
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csc.errors import InputError


def _no_arguments(encoder: Any) -> dict[str, Any]:
    return {}


def _vit_arguments(encoder: Any) -> dict[str, Any]:
    masks = encoder.embeddings.mask_token is not None
    return {"add_pooling_layer": encoder.pooler is not None, "use_mask_token": masks}


@dataclass(frozen=True)
class EncoderFamily:
    """A family of encoders. name: the HF class; module: where transformers has it; input: the keyword it is fed under;
    item_dims: dimensions of one item; width, layers: config fields; prefix: tokens before the patches; arguments: what
    its constructor takes besides the config, read off an instance.
    """

    name: str
    module: str
    input: str
    item_dims: int
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    prefix: int = 0
    arguments: Callable[[Any], dict[str, Any]] = _no_arguments


_MODELS = "transformers.models"
KINDS: Mapping[str, EncoderFamily] = {
    kind.name: kind
    for kind in (
        EncoderFamily("CLIPVisionModel", f"{_MODELS}.clip.modeling_clip", "pixel_values", 3, prefix=1),
        EncoderFamily("SiglipVisionModel", f"{_MODELS}.siglip.modeling_siglip", "pixel_values", 3),
        EncoderFamily("Dinov2Model", f"{_MODELS}.dinov2.modeling_dinov2", "pixel_values", 3, prefix=1),
        EncoderFamily("ViTModel", f"{_MODELS}.vit.modeling_vit", "pixel_values", 3, prefix=1, arguments=_vit_arguments),
        EncoderFamily(
            "WhisperEncoder", f"{_MODELS}.whisper.modeling_whisper", "input_features", 2, "d_model", "encoder_layers"
        ),
    )
}


def kind_of(modality: str, encoder: nn.Module) -> EncoderFamily:
    """The kind of an encoder, by its class or a class it derives from. InputError if none is listed."""
    for base in type(encoder).__mro__:
        if base.__name__ in KINDS:
            return KINDS[base.__name__]
    raise InputError(
        f"csc knows no output of a {type(encoder).__name__} that could stand for tokens",
        f"compose, encoder {modality!r}",
        f"pass one of {', '.join(KINDS)}; of a larger model its encoder alone, for example whisper.model.encoder",
    )


def width(encoder: Any, kind: EncoderFamily) -> int:
    """Size of one feature."""
    return getattr(encoder.config, kind.width)


def check_layer(modality: str, encoder: Any, kind: EncoderFamily, layer: int | None) -> None:
    """InputError unless the encoder has the hidden state `layer`; there are as many as layers, and the embeddings."""
    count = getattr(encoder.config, kind.layers)
    if layer is not None and (
        isinstance(layer, bool) or not isinstance(layer, int) or not -count - 1 <= layer <= count
    ):
        raise InputError(
            f"feature_layer is {layer!r}, and the encoder has hidden states {-count - 1} to {count}",
            f"compose, encoder {modality!r}",
            "give None for the encoder's own last hidden state, or -2 as LLaVA does",
        )


def features(
    encoder: nn.Module, kind: EncoderFamily, items: torch.Tensor, layer: int | None, keep_prefix: bool
) -> torch.Tensor:
    """(items, tokens, width) of items (items, *item shape), in the encoder's dtype."""
    items = items.to(next(encoder.parameters()).dtype)
    if layer is None:
        states = encoder(items).last_hidden_state
    else:
        states = encoder(items, output_hidden_states=True).hidden_states[layer]
    return states if keep_prefix else states[:, kind.prefix :]


def grid(encoder: Any, kind: EncoderFamily, shape: Sequence[int]) -> tuple[int, ...]:
    """(rows, columns) of patches of a picture of this shape (3, height, width), or (frames,) of (mel bins, frames)."""
    if kind.input == "input_features":
        return ((shape[-1] - 1) // 2 + 1,)  # the second convolution has stride 2
    patch = encoder.config.patch_size
    height, across = patch if isinstance(patch, (tuple, list)) else (patch, patch)
    return (shape[-2] // height, shape[-1] // across)


def item_shape(encoder: Any, kind: EncoderFamily) -> tuple[int, ...] | None:
    """The shape of items that the encoder takes; None if it takes several sizes (DINOv2 stretches its positions)."""
    config = encoder.config
    if kind.input == "input_features":
        return (config.num_mel_bins, 2 * config.max_source_positions)
    if kind.name == "Dinov2Model":
        return None
    size = config.image_size
    return (config.num_channels, *(size if isinstance(size, (tuple, list)) else (size, size)))
