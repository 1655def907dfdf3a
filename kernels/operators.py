"""What csc's operators share: layouts of results, cheap calls, objects by number."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

# --- How attention lays out what it returns, on every device and in fake kernels alike -------------------------------


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What a projection's view leads to and back from."""
    batch, heads, tokens, width = x.shape
    return x.new_empty((batch, tokens, heads, width), dtype=dtype or x.dtype).transpose(1, 2)


def as_heads_last(x: torch.Tensor) -> torch.Tensor:
    """What fake kernels promise, of what a kernel of ATen's has laid out."""
    return x if x.transpose(1, 2).is_contiguous() else heads_last(x).copy_(x)


def dense(x: torch.Tensor) -> torch.Tensor:
    """With neighbours along the last dimension side by side: kernels, ATen's for CPUs too, read nothing else right."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def statistics(q: torch.Tensor) -> torch.Tensor:
    """One number for each query and head."""
    return q.new_empty(q.shape[:3], dtype=exact(q.dtype))


# --- Operators with little between a call and their kernel -----------------------------------------------------------
#
#     @light_operator("attention", backward, setup)
#     def kernel(q: torch.Tensor, ...) -> ...: ...
#
# makes csc::attention, with the signature of the kernel, which changes and returns none of its arguments. What it gives
# for tensors without values is said as of any operator, by torch.library.register_fake.
#
# `torch.library.custom_op` has three functions of its own between the two, which look whether a kernel returns an
# argument and keep Dynamo away: some 20 us in a step, which drives them out of the caches.


_LIBRARY = torch.library.Library("csc", "FRAGMENT")
Kernel = Callable[..., Any]


def light_operator(
    name: str, backward: Callable[..., Any] | None = None, setup: Callable[..., None] | None = None
) -> Callable[[Kernel], Kernel]:
    """Returns a decorator that registers a kernel as csc::NAME, with the signature of the kernel, and returns the
    kernel. backward, setup: as torch.library.register_autograd has them; without a backward one through the operator
    raises RuntimeError.
    """

    def no_gradient(*_: Any) -> None:
        raise RuntimeError(f"csc::{name} has no gradient")

    def register(kernel: Kernel) -> Kernel:
        signature = torch.library.infer_schema(kernel, mutates_args=())
        _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_autograd(f"csc::{name}", backward or no_gradient, setup_context=setup, lib=_LIBRARY)
        return kernel

    return register


# --- Objects that operators need and no tensor holds, by numbers that stand for them in a graph ----------------------


T = TypeVar("T")


class Numbered(Generic[T]):
    """A table that keeps nothing alive. absent: what to say where a number has no object here."""

    def __init__(self, absent: str) -> None:
        self._absent, self._numbers = absent, itertools.count()
        self._known: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def number(self, what: T) -> torch.Tensor:
        """A number on the CPU that stands for it as long as it lives."""
        number = next(self._numbers)
        self._known[number] = what
        return torch.tensor(number)

    def find(self, number: torch.Tensor) -> T:
        """What the number stands for. RuntimeError if it is none of this table, or what it stood for is gone."""
        operation = None if number.dim() else self._known.get(int(number))
        if operation is None:
            raise RuntimeError(self._absent)
        return operation
