"""Projectors: from features of an encoder to embeddings of the language model.

Terms
  kind     linear: one matrix.  mlp: two with a GELU between them.  pixel-shuffle-mlp: r x r neighbouring patches become
           one token r * r times as wide (space to depth), then mlp.  stack-mlp: the same with r neighbouring frames
  factor   r, of the last two

    projector_spec(modality, given) -> ProjectorSpec      of "mlp" or {"kind": "pixel-shuffle-mlp", "factor": 4}
    build(spec, width, hidden) -> nn.Module               (items, tokens, width) -> (items, fewer tokens, hidden)
    token_count(...) -> int                               tokens after it
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from csc.errors import InputError

KINDS = ("linear", "mlp", "pixel-shuffle-mlp", "stack-mlp")
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
            f'give one of {", ".join(KINDS)}, or {{"kind": "pixel-shuffle-mlp", "factor": 2}}, or an nn.Module',
        )
    kind = table["kind"]
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, 1, 0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"there is no projector {kind!r}", where, f"{hint}Give one of {', '.join(KINDS)}")
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
        own: Any = getattr(projector, "tokens", None)
        return own(count) if callable(own) else count
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
