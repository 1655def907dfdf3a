"""Towers of any library: what stands for tokens in what a user's nn.Module, timm, open_clip, torchvision or torchaudio
gives.

What a tower gives may be (items, tokens, width); (items, channels, rows, columns), whose places are tokens; with
`width`, (items, rows, columns, width) too; (items, width), which is one token; the first of a tuple or list; or an
object with `last_hidden_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from csc.errors import InputError

RECIPES = (
    "give features= as the path of a method of the module (timm: 'forward_features'), or as a function of (module, "
    "items) that returns (items, tokens, width) or (items, channels, rows, columns)"
)


@dataclass(frozen=True)
class Tower:
    """An encoder that csc.compose does not know, and how to read it.

    Args:
        module: It stays as it is and keeps its weights.
        item: The shape of one item: (3, height, width), or (samples,) or (bins, frames) of sound.
        features: What makes the features: the path of a method ("forward_features", "visual.trunk.forward_features"),
            a function of (module, items), or None for the module's own call.
        entry: The batch entry that it reads.
        width: The size of a feature, where its output does not tell: one dimension of the output has this size.
        prefix: Tokens before the patches that stand for no place, such as a class token.
    """

    module: nn.Module
    item: tuple[int, ...]
    features: str | Callable[[Any, torch.Tensor], Any] | None = None
    entry: str = "pixel_values"
    width: int | None = None
    prefix: int = 0


@dataclass(frozen=True)
class Outputs:
    """What is known of a tower after one item. grid: rows and columns of its patches, or its frames, without prefix."""

    item: tuple[int, ...]
    features: str | Callable[[Any, torch.Tensor], Any] | None
    width: int
    given_width: int | None
    grid: tuple[int, ...]


def tower_of(module: nn.Module) -> Tower | None:
    """A tower that says itself how it is read; None for any other module."""
    inner: Any = getattr(module, "timm_model", module)
    settings = getattr(inner, "pretrained_cfg", None)
    if not callable(getattr(inner, "forward_features", None)) or not isinstance(settings, dict):
        return None
    item = getattr(getattr(inner, "patch_embed", None), "img_size", None)
    item = (3, *item) if isinstance(item, tuple) else settings.get("input_size")
    if item is None:
        return None
    path = "timm_model.forward_features" if inner is not module else "forward_features"
    prefix = getattr(inner, "num_prefix_tokens", 0)
    return Tower(module, tuple(item), path, width=inner.num_features, prefix=prefix)


def outputs(modality: str, tower: Tower) -> Outputs:
    """Runs the tower on one item of zeros, in eval mode and without gradients. InputError if that gives no features."""
    where, item = f"compose, encoder {modality!r}", tower.item
    if not isinstance(tower.module, nn.Module):
        raise InputError(f"Tower has no nn.Module but {tower.module!r:.80}", where, "pass the module that encodes")
    if not item or not all(isinstance(size, int) and size > 0 for size in item):
        raise InputError(f"item is {item!r}", where, "give the shape of one item, for example (3, 224, 224)")
    if not isinstance(tower.entry, str) or not tower.entry.isidentifier():
        raise InputError(f"entry is {tower.entry!r}", where, "give the name of the batch entry that it reads")
    weight = next(tower.module.parameters(), torch.empty(0))
    modes = [(one, one.training) for one in tower.module.modules()]
    zeros = torch.zeros((1, *item), device=weight.device, dtype=weight.dtype)
    try:
        with torch.no_grad():
            tower.module.eval()
            result = _result(tower.features, tower.module, zeros)
            states = _as_tokens(result, tower.width)
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise InputError(f"it does not encode an item of shape {list(item)}: {reason}", where, RECIPES) from error
    finally:
        for one, training in modes:
            one.training = training
    if states is None:
        raise InputError(f"it gives {_shown(result)}, which could not stand for tokens", where, RECIPES)
    if tower.width is not None and states.shape[2] != tower.width:
        raise InputError(f"it gives {_shown(result)}, and width is {tower.width}", where, "leave width out, or mend it")
    if not 0 <= tower.prefix < states.shape[1]:
        raise InputError(
            f"prefix is {tower.prefix}, and it makes {states.shape[1]} tokens", where, "count the tokens before patches"
        )
    return Outputs(
        tuple(item), tower.features, int(states.shape[2]), tower.width, _grid(int(states.shape[1]) - tower.prefix, item)
    )


def tokens_of(known: Outputs, module: nn.Module, items: torch.Tensor) -> torch.Tensor:
    """(items, tokens, width) of items of the shape that is known."""
    states = _as_tokens(_result(known.features, module, items), known.given_width)
    assert states is not None
    return states


def _grid(tokens: int, item: tuple[int, ...]) -> tuple[int, ...]:
    """Of a picture's patches a square, if they are one: what a projector may take neighbours of."""
    side = math.isqrt(tokens)
    return (side, side) if len(item) == 3 and side * side == tokens else (tokens,)


def _result(features: str | Callable[[Any, torch.Tensor], Any] | None, module: nn.Module, items: torch.Tensor) -> Any:
    if isinstance(features, str):
        return attrgetter(features)(module)(items)
    return module(items) if features is None else features(module, items)


def _as_tokens(result: Any, width: int | None) -> torch.Tensor | None:
    """None for what has no shape of features."""
    states = getattr(result, "last_hidden_state", result)
    if isinstance(states, (tuple, list)) and states:
        states = states[0]
    if not isinstance(states, torch.Tensor):
        return None
    if states.dim() == 2:
        return states.unsqueeze(1)
    if states.dim() == 4:
        last = width is not None and states.shape[3] == width and states.shape[1] != width
        return states.flatten(1, 2) if last else states.flatten(2).transpose(1, 2)
    return states if states.dim() == 3 else None


def _shown(result: Any) -> str:
    return str(list(result.shape)) if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
