"""Cornstarch's masks: one int64 per token (arXiv 2503.11367).

Terms: L = x & (2^62 - 1). Bit 0 is text, bits 1..61 are modalities, 0 is padding. Query q attends key k iff
  - q is text (bit 0):  k <= q and (L_q & L_k) != 0. A text token carries the bits of the modalities that it may see
  - q is not text:      L_q == L_k and L_q > 0, wherever k is

    bitfields(fields) -> Mask               int64 [B, T]

Equality and intersection are both asked of the same numbers, so a kind is a different number, up to 63 of them, and a
query admits the set of numbers that it attends.
"""

from __future__ import annotations

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.checks import Numbers, row_major
from csc.masks.combine import MOST_CLASSES, bits, compact
from csc.masks.equal_runs import few

LABEL = (1 << 62) - 1
TEXT = 1


def bitfields(fields: Numbers) -> Mask:
    """The mask of bitfields [B, T], exactly. One rule. InputError for more than 63 different labels."""
    labels = row_major(fields, "bitfields", "int64 [B, T]") & LABEL
    different = few(labels)
    different = different[different != 0]
    if len(different) > MOST_CLASSES:
        raise InputError(
            f"{len(different)} different labels, and {MOST_CLASSES} is the limit",
            "bitfields",
            "Images that must not see each other need no label each: csc.masks.spans tells spans apart by position",
        )
    tokens = labels.shape[1]
    slot = torch.arange(tokens, device=labels.device)
    padded = torch.cat([different.new_zeros(1), different])  # class 0 is padding: of kind 0, it sees nothing
    number = torch.searchsorted(padded, labels)
    meets = torch.where(
        (different[:, None] & TEXT) != 0, (different[:, None] & different) != 0, different[:, None] == different
    )
    nobody = different.new_zeros(1)
    kinds = torch.cat([nobody, torch.ones_like(different) << torch.arange(len(different), device=labels.device)])
    admits = torch.cat([nobody, bits(meets)])[number]
    hi = torch.where((labels & TEXT) != 0, slot + 1, tokens)
    return compact(torch.stack([torch.zeros_like(hi), hi], -1)[:, None], admits[:, None], kinds[number], tokens)
