"""Questions and calls that torch answers in C: versions of dicts, layouts of many tensors, lists of tensors in one
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards, dict_version

# --- Lists of tensors in one call: of hundreds of small ones each call takes longer than what it computes ------------


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The 2-norm of each, in its own precision. All on one device."""
    return torch.stack(torch._foreach_norm(list(tensors), 2)).tolist() if tensors else []


def norms_of_differences(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[float]:
    """The 2-norm of each of the first ones without its other."""
    return norms(torch._foreach_sub(list(ones), list(others))) if ones else []


# --- Whether tensors are laid out as others were, asked in C as torch's own guards ask: 2 us for 24 of them ----------


def same_layouts(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Asked with as many arguments (else TypeError): True only if each has the class, sizes, strides, dtype, device and
    requires_grad of the one at its place. It may be False all the same: in other modes of autograd, or where one comes
    twice. It is False of anything that is no tensor. The tensors are not held.
    """
    holds: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return holds


# --- How often a dict was written to, as torch's own guards ask ------------------------------------------------------


__all__ = ["dict_version"]  # (dict) -> number: the same one for as long as no key and no value was written
