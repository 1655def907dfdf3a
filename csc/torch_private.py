"""Every private torch name that csc leans on, in one place.

Each has a contract test in tests/unit/test_torch_private.py: a torch release that moves or changes one fails there, by
name, and not somewhere inside a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "OpOverload",
    "fx_traceback",
    "in_functorch_transform",
    "is_autocast_region",
    "is_no_grad_region",
    "make_fx",
    "outside_tracing",
]


def is_no_grad_region(target: Any) -> bool:
    """True for the higher-order op that export writes for `with torch.no_grad()`."""
    return target is torch.ops.higher_order.wrap_with_set_grad_enabled


def is_autocast_region(target: Any) -> bool:
    """True for the higher-order op that export writes for `with torch.autocast(...)`."""
    return getattr(target, "__name__", "") == "wrap_with_autocast"


def in_functorch_transform() -> bool:
    """True inside vmap, grad and the like, where tensors are wrapped."""
    return peek_interpreter_stack() is not None


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Operations in it run for real: no fake tensors, no proxies, no torch functions, nothing recorded."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield
