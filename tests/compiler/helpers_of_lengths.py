"""A file whose functions a model of test_lengths_of_tensors.py calls."""

from __future__ import annotations

import torch


def zeros_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """As many rows as there are samples."""
    return torch.zeros(len(x), 1, width) + x.mean((1, 2))[:, None, None]
