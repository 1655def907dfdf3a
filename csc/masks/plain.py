"""Masks that need sizes only: causal, bidirectional, prefix, sliding window.

    causal(tokens) -> Mask                              a token sees itself and what is before it
    bidirectional(queries, keys) -> Mask                everyone sees everything
    prefix(tokens, lengths) -> Mask                     causal, and everyone sees the first `lengths` tokens of its row
    window(tokens, width, symmetric) -> Mask            nearer than `width`, and not later unless symmetric

All of one rule, without kinds.
"""

from __future__ import annotations

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.checks import Numbers, positive, refuse_where, row_major


def ranged(lo: torch.Tensor, hi: torch.Tensor, keys: int) -> Mask:
    """A mask of one rule: query q sees the keys [lo, hi).

    Args:
        lo: Integers that broadcast to [B, Tq].
        hi: The same.
        keys: How many there are.
    """
    lo, hi = torch.broadcast_tensors(lo, hi)
    return Mask(torch.stack([lo, hi], -1).to(torch.int32)[:, None], None, None, keys)


def causal(tokens: int) -> Mask:
    """Query q sees keys 0 to q.

    Args:
        tokens: T: queries, and keys.
    """
    slot = torch.arange(positive(tokens, "tokens"))[None]
    return ranged(torch.zeros_like(slot), slot + 1, tokens)


def bidirectional(queries: int, keys: int | None = None) -> Mask:
    """Every query sees every key.

    Args:
        queries: How many.
        keys: How many; None: as many as queries.
    """
    positive(queries, "queries")
    keys = queries if keys is None else positive(keys, "keys")
    zero = torch.zeros(1, queries, dtype=torch.int64)
    return ranged(zero, zero + keys, keys)


def prefix(tokens: int, lengths: int | Numbers) -> Mask:
    """Causal, and the first tokens are seen by all.

    Args:
        tokens: T.
        lengths: How many are seen by all: one number, or one for every row [B].

    Raises:
        InputError: A prefix is longer than the row.
    """
    slot = torch.arange(positive(tokens, "tokens"))[None]
    rows = row_major([lengths] if isinstance(lengths, int) else lengths, "lengths", "integers [B]").view(-1, 1)
    refuse_where(
        (rows < 0) | (rows > tokens), "lengths", lambda b, _: f"a prefix of {int(rows[b, 0])} in {tokens} tokens"
    )
    return ranged(torch.zeros_like(slot), torch.maximum(slot + 1, rows), tokens)


def window(tokens: int, width: int, symmetric: bool = False) -> Mask:
    """q - k < width and k <= q: a sliding window.

    Args:
        tokens: T.
        width: Keys, the token itself with them, as `sliding_window` of HF configurations counts.
        symmetric: |q - k| < width instead.

    Raises:
        InputError: width is less than 1.
    """
    slot = torch.arange(positive(tokens, "tokens"))[None]
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise InputError(f"a window of width {width!r}", remedy="1 is a token that sees itself only")
    ahead = width if symmetric else 1
    return ranged((slot - width + 1).clamp(min=0), (slot + ahead).clamp(max=tokens), tokens)
