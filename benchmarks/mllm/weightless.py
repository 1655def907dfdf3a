"""Models without memory for their weights: every tensor made in the block has a shape and a dtype and no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.initialization import no_init_weights

from csc.torch_private import FakeTensorMode


@contextmanager
def weightless(dtype: torch.dtype) -> Iterator[None]:
    """Modules made in the block have fake parameters, of `dtype` unless they ask for another.

    Not the meta device: fake tensors keep the device, and with it the kernels that autograd traces.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
            yield
    finally:
        torch.set_default_dtype(before)
