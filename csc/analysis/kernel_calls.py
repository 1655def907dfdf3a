"""Kernels that a graph runs, in numbers: their operators, FLOPs and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from csc.analysis.exchanges import Exchange


@dataclass(frozen=True)
class KernelCall:
    """One kernel. dtype: of the operands, which decides the peak rate. mask: the table by which attention skips. meets:
    what it gets from other ranks. compiled: a product in a compiled function.
    """

    op: str
    dtype: str
    flops: int
    bytes: int
    mask: str = ""
    meets: Exchange | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Kernels:
    """The kernels of F, B or W, in order."""

    calls: tuple[KernelCall, ...] = ()

    @cached_property
    def flops(self) -> int:
        return sum(call.flops for call in self.calls)

    @cached_property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(call.bytes for call in self.calls)

    @property
    def kernels(self) -> int:
        return len(self.calls)

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(self.calls + other.calls)
