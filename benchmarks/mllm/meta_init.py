"""Models without memory for their weights, in a dtype of choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import csc


@contextmanager
def meta_init(dtype: torch.dtype) -> Iterator[None]:
    """Modules made in the block have no weights (see csc.meta_init); their dtype, unless they ask for another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with csc.meta_init():
            yield
    finally:
        torch.set_default_dtype(before)
