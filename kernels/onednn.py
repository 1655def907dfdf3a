"""Products of float32 matrices on CPUs whose widest vector instructions MKL leaves unused.

MKL, which computes PyTorch's products, takes AVX-512 on its own vendor's processors alone; oneDNN, which is in PyTorch
as well, takes it wherever it is. There it needs half the time (docs/measurements.md). It adds in another order, so this
is for what need not have eager's bits: functions that are compiled (`fuse`), and heads in chunks.

Operands may have any strides. A transposed right one is read as it is, a left one that is not contiguous is copied.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from csc.kernels.operators import light_operator

LEAST = 2**21  # multiplications, from which on a call that costs 10 us more is made up for
LEAST_IN_HALVES = 2**28  # the same where 512 bits are computed in two steps, and oneDNN gains a tenth at most
IN_HALVES = ("AuthenticAMD", "25")  # vendor and family of processors that do so
NARROWEST = 8  # of the three sizes: for fewer rows oneDNN copies a transposed matrix whole
# By which the environment asks either library for other instructions, or for the same bits on every processor.
OWN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a @ b + bias, [M, N]: by oneDNN where `is_worth` says so, by ATen elsewhere. a: [M, K]; b: [K, N]; bias:
    [N], or None.
    """
    if a.dtype is torch.float32 and a.device.type == "cpu" and is_worth(a.shape[0], a.shape[1], b.shape[1]):
        return _by_onednn(a, b, bias)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def is_worth(m: int, k: int, n: int) -> bool:
    """Of matrices of float32 on a CPU."""
    multiplications = m * k * n
    return (
        min(m, k, n) >= NARROWEST and multiplications >= LEAST and 0 < least_multiplications() <= multiplications
    )  # what the machine says is asked last


def least_multiplications() -> int:
    """Returns from how many multiplications on a product takes oneDNN less time, on this machine and as torch is set
    now; 0 where none does: under `torch.backends.mkldnn.flags(enabled=False)`, where the environment asks either
    library for other instructions, and in "medium" precision, in which PyTorch takes oneDNN's products itself.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.enabled or onednn.matmul.fp32_precision == "bf16" or any(map(os.environ.get, OWN_LIMITS)):
        return 0
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not _mkl_is_narrow():
        return 0
    return LEAST_IN_HALVES if IN_HALVES in _processors() else LEAST


def _mkl_is_narrow() -> bool:
    """Whether products go to MKL on another vendor's processor. False where that cannot be told."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    vendors = {vendor for vendor, _ in _processors()}
    return bool(vendors) and "GenuineIntel" not in vendors


@cache
def _processors() -> frozenset[tuple[str, str]]:
    """Vendor and family of this machine's. Empty where that cannot be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    fields = {name: [_value(line) for line in lines if line.startswith(name)] for name in ("vendor_id", "cpu family")}
    return frozenset(zip(fields["vendor_id"], fields["cpu family"], strict=False))


def _value(line: str) -> str:
    return line.partition(":")[2].strip()


@light_operator("product")
def _by_onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")  # not in every build of torch


@torch.library.register_fake("csc::product")
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


PRODUCT = torch.ops.csc.product.default
