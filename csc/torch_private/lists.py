"""Lists of tensors in one call: of hundreds of small ones each call takes longer than what it computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The 2-norm of each, in its own precision. All on one device."""
    return torch.stack(torch._foreach_norm(list(tensors), 2)).tolist() if tensors else []


def norms_of_differences(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[float]:
    """The 2-norm of each of the first ones without its other."""
    return norms(torch._foreach_sub(list(ones), list(others))) if ones else []
