"""Whose rows are whose: how many rows of each entry of a batch belong to each of its samples, read off the batch.

Terms
  samples    rows of the token ids
  kind       image, video or audio: what an entry's name speaks of
  places     tokens that stand for features of a kind, in each sample
  items      images, videos or recordings of a kind, those of the first sample first
  measure    an entry with a row for each item that tells how many places it has: a grid, a size, a mask of frames

    belongings(tensors, tokens) -> {entry: Belonging}     of the entries that it is known of
    token_ids(model) -> {kind: token id}                  as its config has them
    miscounted(tensors, known) -> (entry, grid, patches)  whose rows are not those that its grid counts
    kind_of(name) -> kind or None
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csc.capture.batch import TOKENS, sample_axis

KINDS = {"video": ("video",), "audio": ("audio", "input_features", "feature_attention"), "image": ("image", "pixel")}
TYPES = {"image": 1, "video": 2, "audio": 3}  # of tokens, in Hugging Face's mm_token_type_ids
GRIDS = ("grid_thw", "grid_hws")  # of patches, whose rows the features are
SIZES = (*GRIDS, "image_sizes", "spatial_shapes")
MERGED = "merge_sizes"  # how many patches along each side become one token


@dataclass(frozen=True)
class Belonging:
    """rows: of each sample, along dimension `dim`."""

    rows: tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class PlaceholderCounts:
    """of: in each sample; runs: how many groups of them stand together, in each sample."""

    of: tuple[int, ...]
    runs: tuple[int, ...]


def token_ids(model: nn.Module) -> dict[str, int]:
    """The placeholders of each kind."""
    config = getattr(model, "config", None)
    found = {kind: getattr(config, f"{kind}_token_{end}", None) for kind in KINDS for end in ("index", "id")}
    return {kind: token for kind, token in found.items() if isinstance(token, int)}


def belongings(tensors: Mapping[str, torch.Tensor], tokens: Mapping[str, int]) -> dict[str, Belonging]:
    """tokens: placeholders by kind. An entry that is not in the result has rows of which nothing is known.

    Samples have as many items as their places ask for: of items without a measure all are alike, grids and sizes say in
    which proportion they are. Else each run of places is an item, or every sample with places has one.
    """
    text = next((tensors[name] for name in TOKENS if name in tensors and tensors[name].dim() == 2), None)
    if text is None:
        return {}
    samples = len(text)
    found: dict[str, Belonging] = {}
    for kind in KINDS:
        of_kind = {name: tensor for name, tensor in tensors.items() if kind_of(name) == kind and tensor.dim()}
        of_kind = {name: tensor for name, tensor in of_kind.items() if tensor.shape[:2] != text.shape}
        if of_kind:
            found |= _ofkind_of(of_kind, samples, _places(kind, tensors, tokens))
    for name, tensor in tensors.items():
        if name not in found and kind_of(name) is None and tensor.dim():
            if sample_axis(name, tensors) == 1:  # position ids of several axes
                found[name] = Belonging((1,) * samples, dim=1)
            elif len(tensor) == samples and tensor.dim() > 1:
                found[name] = Belonging((1,) * samples)
            elif tensor.shape[1:3] == text.shape:
                found[name] = Belonging((1,) * samples, dim=1)
    return found


def miscounted(tensors: Mapping[str, torch.Tensor], known: Collection[str]) -> tuple[str, str, int] | None:
    """(entry, grid, patches by the grid) of packed rows of patches that are not as many; known: other entries."""
    for name, tensor in tensors.items():
        beside = {one: tensors[one] for one in tensors if kind_of(one) == kind_of(name)}
        patches = _patches(beside) if kind_of(name) is not None else None
        if patches is not None and name not in known and tensor.is_floating_point() and tensor.dim() == 2:
            return name, next(one for one in beside if one.endswith(GRIDS)), sum(patches)
    return None


def kind_of(name: str) -> str | None:
    """What an entry's name speaks of."""
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), None)


def _places(kind: str, tensors: Mapping[str, torch.Tensor], tokens: Mapping[str, int]) -> PlaceholderCounts | None:
    """None if nothing tells which tokens they are."""
    ids, types = tensors.get("input_ids"), tensors.get("mm_token_type_ids")
    if kind in tokens and ids is not None and ids.dim() == 2:
        mask = ids == tokens[kind]
    elif types is not None and types.dim() == 2:
        mask = types == TYPES[kind]
    else:
        return None
    follows = nn.functional.pad(mask, (1, -1))
    return PlaceholderCounts(tuple(mask.sum(1).tolist()), tuple((mask & ~follows).sum(1).tolist()))


def _ofkind_of(
    entries: Mapping[str, torch.Tensor], samples: int, places: PlaceholderCounts | None
) -> dict[str, Belonging]:
    measure = _measure(entries)
    features = next((tensor for tensor in entries.values() if tensor.is_floating_point()), None)
    if measure is None and features is None:
        return {}
    items = len(measure) if measure is not None else len(features)  # type: ignore[arg-type]
    slots = measure is None and features is not None and features.dim() > 4 and items == samples
    counts = None if slots else _told(entries, samples, items)
    if counts is None and not slots and places is not None:
        counts = _counted(entries, measure, items, places)
    if counts is None and items % samples == 0:
        counts = [items // samples] * samples
    if counts is None:
        return {}
    found = {}
    patches = _patches(entries) if measure is not None else None
    for name, tensor in entries.items():
        if len(tensor) == items:
            found[name] = Belonging(tuple(counts))
        elif patches is not None and len(tensor) == sum(patches):
            found[name] = Belonging(tuple(sum(own) for own in _split(patches, counts)))
        elif len(tensor) == samples:
            found[name] = Belonging((1,) * samples)
    return found


def _told(entries: Mapping[str, torch.Tensor], samples: int, items: int) -> list[int] | None:
    """By an entry that says how many items each sample has."""
    for name, tensor in entries.items():
        if "num_" in name and tensor.shape == (samples,) and int(tensor.sum()) == items:
            return tensor.tolist()
    return None


def _counted(
    entries: Mapping[str, torch.Tensor], measure: torch.Tensor | None, items: int, places: PlaceholderCounts
) -> list[int] | None:
    """How many items have these places."""
    alike = measure is None or bool((measure == measure[:1]).all())
    found = _in_order(places.of, [1] * items if alike else _weights(entries))
    if found is None and sum(places.runs) == items:
        found = list(places.runs)
    if found is None and sum(map(bool, places.of)) == items:
        found = [int(own > 0) for own in places.of]
    return found


def _in_order(places: Sequence[int], weights: Sequence[int]) -> list[int] | None:
    """How many of the items, which come in order and have places in proportion to their weights, are each sample's;
    None if that does not come out even.
    """
    found, following = [], 0
    for own in places:
        first, missing = following, own * sum(weights)
        while missing > 0 and following < len(weights):
            missing -= weights[following] * sum(places)
            following += 1
        if missing:
            return None
        found.append(following - first)
    return found if following == len(weights) else None


def _measure(entries: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What tells the items apart: a row for each."""
    for name, tensor in entries.items():
        if name.endswith(SIZES) and tensor.dim() == 2:
            return tensor
    for name, tensor in entries.items():
        if name.endswith("attention_mask") and tensor.dim() == 2:
            return tensor.sum(1, keepdim=True)
    return None


def _weights(entries: Mapping[str, torch.Tensor]) -> list[int]:
    """Of each item, in proportion to its places; where none are (frames, tiles), nothing comes out even."""
    measure = _measure(entries)
    assert measure is not None
    merged = next((tensor for name, tensor in entries.items() if name.endswith(MERGED)), None)
    sizes = measure.prod(1)
    return (sizes // merged.to(sizes) ** 2 if merged is not None and merged.dim() == 1 else sizes).tolist()


def _patches(entries: Mapping[str, torch.Tensor]) -> list[int] | None:
    """Of each item, where a grid says so."""
    grid = next((tensor for name, tensor in entries.items() if name.endswith(GRIDS) and tensor.dim() == 2), None)
    return None if grid is None else grid.prod(1).tolist()


def _split(values: Sequence[int], counts: Sequence[int]) -> list[Sequence[Any]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [values[end - count : end] for end, count in zip(ends, counts)]
