"""Operators with little between a call and their kernel.

    @light_operator("attention", backward, setup)       csc::attention, with the signature of the kernel, which changes
    def kernel(q: torch.Tensor, ...) -> ...: ...        and returns none of its arguments

backward, setup: as torch.library.register_autograd has them; without them a backward through the operator is an error.
What it gives for tensors without values is said as of any operator, by torch.library.register_fake.

`torch.library.custom_op` has three functions of its own between the two, which look whether a kernel returns an
argument and keep Dynamo away: some 20 us in a step, which drives them out of the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("csc", "FRAGMENT")
Kernel = Callable[..., Any]


def light_operator(
    name: str, backward: Callable[..., Any] | None = None, setup: Callable[..., None] | None = None
) -> Callable[[Kernel], Kernel]:
    """See the module."""

    def no_gradient(*_: Any) -> None:
        raise RuntimeError(f"csc::{name} has no gradient")

    def register(kernel: Kernel) -> Kernel:
        signature = torch.library.infer_schema(kernel, mutates_args=())
        _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_autograd(f"csc::{name}", backward or no_gradient, setup_context=setup, lib=_LIBRARY)
        return kernel

    return register
