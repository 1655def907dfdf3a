"""The products of a function that is to be compiled, computed by oneDNN where that is the faster library.

with products_by_onednn() as count:     while a function is traced, csc::product is called in place of aten.mm and
    function(...)                       aten.addmm, where csc.kernels.onednn says that it is worth it
count.made                              how often it was
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from csc.kernels.onednn import PRODUCT, is_worth, least_multiplications

aten = torch.ops.aten
LARGE = 2**16  # entries of a transposed matrix, from which on a kernel of Inductor's is worth the compiler's time


@dataclass
class Replaced:
    """made: products that were put in the place of others."""

    made: int = 0


@contextmanager
def products_by_onednn() -> Iterator[Replaced]:
    """A large transposed left matrix is copied first, by a kernel that Inductor makes, part of the one that computes
    the matrix: oneDNN's call has it copied by one of ATen's, which takes several times as long.
    """
    count = Replaced()
    if not least_multiplications():
        yield count
        return
    from csc.torch_private.traces import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            matrices = _matrices(operator, args, kwargs)
            if not matrices or not _gains(*matrices):
                return operator(*args, **(kwargs or {}))
            left, *others = matrices
            if left.numel() >= LARGE and not left.is_contiguous():
                left = left.clone(memory_format=torch.contiguous_format)
            count.made += 1
            return PRODUCT(left, *others)

    with Products():
        yield count


def _matrices(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[torch.Tensor, ...]:
    """Of a product of two matrices: both, and a row that is added to it; empty for any other call."""
    if kwargs:  # alpha, or beta
        return ()
    if operator is aten.mm.default:
        return args
    if operator is aten.addmm.default:
        added, *matrices = args
        return (*matrices, added)
    return ()


def _gains(left: torch.Tensor, right: torch.Tensor, row: torch.Tensor | None = None) -> bool:
    if left.dtype is not torch.float32 or left.device.type != "cpu":
        return False
    if row is not None and row.shape != right.shape[1:]:  # a number, or other rows for each token
        return False
    return is_worth(*left.shape, right.shape[1])
