"""Graphs as torch.export writes them: regions, and what it puts in place of operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["OpOverload"]  # of torch, as they are


def is_no_grad_region(target: Any) -> bool:
    """True for the higher-order op that export writes for `with torch.no_grad()`."""
    return target is torch.ops.higher_order.wrap_with_set_grad_enabled


def is_autocast_region(target: Any) -> bool:
    """True for the higher-order op that export writes for `with torch.autocast(...)`."""
    return getattr(target, "__name__", "") == "wrap_with_autocast"


def is_taken_apart(operation: OpOverload) -> bool:
    """Whether export, when it makes a graph functional, puts others in place of an operation: of one that is no more
    than others that it calls, and may give its argument, a view of it or a copy.
    """
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")
    views = any(argument.alias_info is not None for argument in operation._schema.arguments)
    return composite and (views or torch.Tag.maybe_aliasing_or_mutating in operation.tags)


def parts_of(operation: OpOverload) -> Callable[..., Any]:
    """What an operation that is made of others calls. Not its `decompose`: that asks the table in which export puts
    this here for the operation, and so asks itself.
    """
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    own = operation.py_kernels.get(composite)
    return own if callable(own) else partial(operation._op_dk, composite)
