"""Features at the placeholders of the text, and the check that they fit.

Terms
  placeholder   a token id whose places in the text the features of one modality take, in order
  slot          room for one item of a sample: a batch has (samples, ...) items, or (samples, slots, ...)
  empty slot    one that holds zeros alone, in a sample with fewer items than others; its features are used nowhere

    merge(embeddings, at, features) -> embeddings
    check_places(...)                            InputError that names the sample, what it needs and what it has

Every sample takes its own features. That, unlike filling all places of the batch in order, stays right when a batch is
divided into microbatches, and for samples that have fewer items than slots.
"""

from __future__ import annotations

import torch

from csc.errors import InputError


def merge(embeddings: torch.Tensor, at: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The n-th True of a row of `at` (samples, length) gets the n-th of the row's features (samples, tokens, hidden);
    the embeddings (samples, length, hidden) stay elsewhere. No size depends on a value: torch.export can trace it.
    """
    place = (at.cumsum(1) - 1).clamp(min=0)
    picked = features.gather(1, place.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
    return torch.where(at.unsqueeze(-1), picked.to(embeddings.dtype), embeddings)


def check_places(modality: str, keyword: str, at: torch.Tensor, items: torch.Tensor | None, tokens: int) -> None:
    """at: (samples, length), where the placeholders are; items: (samples, slots, ...) or None; tokens: of one item.

    A sample must have places for all its items, and may have places for empty slots.
    """
    counts = at.sum(1).tolist()
    if items is None:
        for sample, count in enumerate(counts):
            if count:
                raise InputError(
                    f"sample {sample} has {count} placeholders for {modality!r}, and the batch has no {keyword!r}",
                    "batch",
                    f"add {keyword}, or leave the placeholders out of the text",
                )
        return
    slots = items.shape[1]
    for sample, count in enumerate(counts):
        if count == slots * tokens:
            continue
        used = (items[sample].reshape(slots, -1) != 0).any(1).nonzero()
        needed = int(used[-1]) + 1 if len(used) else 0  # slots up to the last that is not empty
        if count % tokens or not needed * tokens <= count <= slots * tokens:
            raise InputError(
                f"sample {sample} needs {needed * tokens} placeholders for {modality!r} ({needed} x {tokens} tokens), "
                f"and has {count}",
                "batch",
                f"repeat the placeholder {tokens} times for each item of {keyword}, as the model's processor does",
            )
