"""The precision of float32 in matrix products and convolutions, as torch has it set.

float32_precision() -> [str]       set_float32_precision(told)

Torch has two ways to set it: by one word for products, and by library. Where one was set in the second way, the word
that is left from the first may no longer hold, and torch refuses to tell it: then it is "". What the libraries tell
holds in both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from csc import devices


def float32_precision() -> list[str]:
    """The word for products, then the precision of each library in csc.devices.LIBRARIES."""
    return [_word(), *(library.fp32_precision for library in devices.LIBRARIES)]


def set_float32_precision(told: Sequence[str]) -> None:
    """Make it what `float32_precision` has told, in another process, too."""
    word, *libraries = told
    torch.set_float32_matmul_precision(word or "highest")  # before the libraries: it sets some of theirs
    for library, precision in zip(devices.LIBRARIES, libraries, strict=True):
        library.fp32_precision = precision


def _word() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""
