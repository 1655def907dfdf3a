"""Hugging Face encoders: what each takes, which of its outputs are features, and projectors to the language model."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from csc.composition.towers import Outputs, Tower, outputs, tokens_of, tower_of
from csc.errors import InputError

# --- Projectors: from features of an encoder to embeddings of the language model -------------------------------------
#
# Terms
#   kind     linear: one matrix.  mlp: two with a GELU between them.  pixel-shuffle-mlp: r x r neighbouring patches
#            become one token r * r times as wide (space to depth), then mlp.  stack-mlp: the same with r neighbouring
#            frames
#   factor   r, of the last two


PROJECTORS = ("linear", "mlp", "pixel-shuffle-mlp", "stack-mlp")
REDUCING = ("pixel-shuffle-mlp", "stack-mlp")


@dataclass(frozen=True)
class ProjectorSpec:
    """What a projector is made from. factor: 1 where the kind leaves the number of tokens as it is."""

    kind: str
    factor: int = 1


def projector_spec(modality: str, given: Any) -> ProjectorSpec:
    """Of a kind's name, or a mapping with `kind` and `factor` (2 if it is not given)."""
    where = f"compose, projector {modality!r}"
    table = {"kind": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str) or set(table) - {"kind", "factor"}:
        raise InputError(
            f"{given!r} says no projector",
            where,
            f'give one of {", ".join(PROJECTORS)}, or {{"kind": "pixel-shuffle-mlp", "factor": 2}}, or an nn.Module',
        )
    kind = table["kind"]
    if kind not in PROJECTORS:
        close = difflib.get_close_matches(kind, PROJECTORS, 1, 0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"there is no projector {kind!r}", where, f"{hint}Give one of {', '.join(PROJECTORS)}")
    factor = table.get("factor", 2 if kind in REDUCING else 1)
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1 or (kind not in REDUCING and factor != 1):
        raise InputError(
            f"the factor of {kind} is {factor!r}",
            where,
            f"give a whole number from 1 on with {' or '.join(REDUCING)}, and none with the other kinds",
        )
    return ProjectorSpec(kind, factor)


def space_to_depth(features: torch.Tensor, factor: int) -> torch.Tensor:
    """(items, side * side, width) -> (items, (side / r)^2, r * r * width): r x r neighbouring patches side by side."""
    items, tokens, width = features.shape
    side = math.isqrt(tokens)
    squares = features.reshape(items, side // factor, factor, side // factor, factor, width)
    return squares.transpose(2, 3).reshape(items, tokens // factor**2, factor**2 * width)


def stacked(features: torch.Tensor, factor: int) -> torch.Tensor:
    """(items, frames, width) -> (items, frames / r, r * width): r frames side by side."""
    items, frames, width = features.shape
    return features.reshape(items, frames // factor, factor * width)


_REDUCE: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "pixel-shuffle-mlp": space_to_depth,
    "stack-mlp": stacked,
}


class MlpProjector(nn.Module):
    """Two matrices with a GELU between them, behind the reduction of its kind."""

    def __init__(self, spec: ProjectorSpec, width: int, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        self.linear_1 = nn.Linear(width, hidden)
        self.linear_2 = nn.Linear(hidden, hidden)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.spec.kind in _REDUCE:
            features = _REDUCE[self.spec.kind](features, self.spec.factor)
        return self.linear_2(F.gelu(self.linear_1(features)))


def build(spec: ProjectorSpec, width: int, hidden: int) -> nn.Module:
    """The module of a spec, for features of `width` and a language model of `hidden`."""
    if spec.kind == "linear":
        return nn.Linear(width, hidden)
    inputs = {"pixel-shuffle-mlp": spec.factor**2, "stack-mlp": spec.factor}.get(spec.kind, 1)
    return MlpProjector(spec, inputs * width, hidden)


def token_count(
    modality: str, projector: nn.Module, spec: ProjectorSpec | None, grid: tuple[int, ...], prefix: int
) -> int:
    """Tokens that the projector makes of an item's patches or frames and the `prefix` tokens before them. A projector
    of the user's own (spec is None) keeps their number, unless it has a method `tokens(count) -> int`.
    """
    count, where = math.prod(grid) + prefix, f"projector {modality!r}"
    if spec is None:
        declared: Any = getattr(projector, "tokens", None)
        return declared(count) if callable(declared) else count
    if spec.kind == "pixel-shuffle-mlp":
        if len(set(grid)) > 1 or grid[0] % spec.factor:
            raise InputError(
                f"{' x '.join(map(str, grid))} patches are no square whose side {spec.factor} divides",
                where,
                "use square pictures and a factor that divides their patches a side, or the projector 'mlp'",
            )
        return count // spec.factor**2
    if count % spec.factor:
        raise InputError(f"{spec.factor} does not divide the {count} frames of a clip", where, "choose another factor")
    return count // spec.factor


# --- Encoders, of Hugging Face and others (towers.py): what each takes, which of its outputs are features, ... -------
#
# tokens they are.
#
# Terms
#   item      one picture or one clip of sound: what the encoder sees at once
#   features  (items, tokens, width): the hidden states that stand for the item
#   prefix    tokens before the patches that stand for no place in the picture: the class token of CLIP, ViT and DINOv2
#   layer     None: the encoder's own last hidden state. A number: `hidden_states[number]`, -2 as LLaVA has it


def _vit_arguments(encoder: Any) -> dict[str, Any]:
    masks = encoder.embeddings.mask_token is not None
    return {"add_pooling_layer": encoder.pooler is not None, "use_mask_token": masks}


@dataclass(frozen=True)
class EncoderFamily:
    """A family of encoders. name: the HF class; module: where transformers has it; input: the keyword it is fed under;
    item_dims: dimensions of one item; width, layers: config fields; prefix: tokens before the patches; arguments: what
    its constructor takes besides the config, read off an instance. tower: of an encoder of another library, for which
    module, width, layers and arguments say nothing.
    """

    name: str
    module: str
    input: str
    item_dims: int
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    prefix: int = 0
    arguments: Callable[[Any], dict[str, Any]] = lambda encoder: {}
    tower: Outputs | None = None

    @property
    def is_of_sound(self) -> bool:
        """Whether an item is a clip and its tokens frames."""
        return self.item_dims < 3


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


def kind_of(modality: str, encoder: nn.Module | Tower) -> EncoderFamily:
    """The kind of an encoder, by its class or a class it derives from, or as a Tower. InputError if it is none."""
    for base in type(encoder).__mro__:
        if base.__name__ in KINDS:
            return KINDS[base.__name__]
    tower = encoder if isinstance(encoder, Tower) else tower_of(encoder)
    if tower is not None:
        known, name = outputs(modality, tower), type(tower.module).__name__
        return EncoderFamily(name, "", tower.entry, len(tower.item), prefix=tower.prefix, tower=known)
    raise InputError(
        f"csc knows no output of a {type(encoder).__name__} that could stand for tokens",
        f"compose, encoder {modality!r}",
        f"pass one of {', '.join(KINDS)}, or one of timm; of a larger model its encoder alone, for example "
        "whisper.model.encoder; of any other library csc.composition.Tower(module, item=(3, 224, 224), "
        "features='path.of.a.method')",
    )


def width(encoder: Any, kind: EncoderFamily) -> int:
    """Size of one feature."""
    if kind.tower is not None:
        return kind.tower.width
    return getattr(encoder.config, kind.width)


def check_layer(modality: str, encoder: Any, kind: EncoderFamily, layer: int | None) -> None:
    """InputError unless the encoder has the hidden state `layer`; there are as many as layers, and the embeddings."""
    if kind.tower is not None:
        if layer is None:
            return
        raise InputError(
            f"feature_layer is {layer!r}, and csc knows no hidden states of a {kind.name}",
            f"compose, encoder {modality!r}",
            "leave it out, and give Tower(features=...) that returns those of that layer",
        )
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
    weight = next(encoder.parameters(), None)
    items = items if weight is None else items.to(weight.dtype)
    if kind.tower is not None:
        states = tokens_of(kind.tower, encoder, items)
    elif layer is None:
        states = encoder(items).last_hidden_state
    else:
        states = encoder(items, output_hidden_states=True).hidden_states[layer]
    return states if keep_prefix else states[:, kind.prefix :]


def grid(encoder: Any, kind: EncoderFamily, shape: Sequence[int]) -> tuple[int, ...]:
    """(rows, columns) of patches of a picture of this shape (3, height, width), or (frames,) of (mel bins, frames)."""
    if kind.tower is not None:
        return kind.tower.grid
    if kind.input == "input_features":
        return ((shape[-1] - 1) // 2 + 1,)  # the second convolution has stride 2
    patch = encoder.config.patch_size
    height, across = patch if isinstance(patch, (tuple, list)) else (patch, patch)
    return (shape[-2] // height, shape[-1] // across)


def item_shape(encoder: Any, kind: EncoderFamily) -> tuple[int, ...] | None:
    """The shape of items that the encoder takes; None if it takes several sizes (DINOv2 stretches its positions)."""
    if kind.tower is not None:
        return kind.tower.item
    config = encoder.config
    if kind.input == "input_features":
        return (config.num_mel_bins, 2 * config.max_source_positions)
    if kind.name == "Dinov2Model":
        return None
    size = config.image_size
    return (config.num_channels, *(size if isinstance(size, (tuple, list)) else (size, size)))


# --- What a composed model knows of each of its modalities, and the batch entries they are read from -----------------
#
# Terms
#   keyword   the batch entry that an encoder reads: its own name for it (pixel_values, input_features), or
#             `<modality>_<keyword>` for all encoders of which several have the same


@dataclass(frozen=True)
class Modality:
    """What a modality is, besides its modules. projector: None for a module of the user's own."""

    name: str
    kind: EncoderFamily
    keyword: str
    placeholder: int
    projector: ProjectorSpec | None
    feature_layer: int | None
    keep_prefix: bool


def keywords(kinds: Mapping[str, EncoderFamily]) -> dict[str, str]:
    """The batch entry of each modality; no two share one."""
    count = Counter(kind.input for kind in kinds.values())
    return {name: kind.input if count[kind.input] == 1 else f"{name}_{kind.input}" for name, kind in kinds.items()}
