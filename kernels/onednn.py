"""Products of float32 matrices on CPUs whose widest vector instructions MKL leaves unused.

MKL, which computes PyTorch's products, takes AVX-512 on its own vendor's processors alone; oneDNN, which is in PyTorch
as well, takes it wherever it is. There it needs half the time (docs/measurements.md). It adds in another order, so this
is for what need not have eager's bits: functions that are compiled (`fuse`), and heads in chunks.

    product(a, b, bias=None) -> [M, N]      a [M, K], b [K, N], bias [N]; by oneDNN if it `is_worth` that, by ATen else
    prefers_onednn() -> bool                of this machine, as torch is set now
    is_worth(m, k, n) -> bool               of sizes alone
    csc::product(a, b, bias)                by oneDNN in any case: what compiled functions call

Operands may have any strides. A transposed right one is read as it is, a left one that is not contiguous is copied.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from csc.kernels.light_operator import light_operator

LEAST = 2**21  # multiplications, from which on a call that costs 10 us more is made up for
NARROWEST = 8  # of the three sizes: for fewer rows oneDNN copies a transposed matrix whole
# By which the environment asks either library for other instructions, or for the same bits on every processor.
OWN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See the module."""
    wide = a.dtype is torch.float32 and a.device.type == "cpu"
    if wide and is_worth(a.shape[0], a.shape[1], b.shape[1]) and prefers_onednn():
        return _by_onednn(a, b, bias)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def is_worth(m: int, k: int, n: int) -> bool:
    """Whether a product of [m, k] and [k, n] takes oneDNN less time, where it is the faster one."""
    return min(m, k, n) >= NARROWEST and m * k * n >= LEAST


def prefers_onednn() -> bool:
    """See the module. False under `torch.backends.mkldnn.flags(enabled=False)`, where the environment asks either
    library for other instructions, and in "medium" precision, in which PyTorch takes oneDNN's products itself.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.enabled or onednn.matmul.fp32_precision == "bf16" or any(map(os.environ.get, OWN_LIMITS)):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _mkl_is_narrow()


@cache
def _mkl_is_narrow() -> bool:
    """Whether products go to MKL on another vendor's processor. False where that cannot be told."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    vendors = {line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")}
    return bool(vendors) and "GenuineIntel" not in vendors


@light_operator("product")
def _by_onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")  # not in every build of torch


@torch.library.register_fake("csc::product")
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


PRODUCT = torch.ops.csc.product.default
