"""Torch's own switches that decide what code computes: precision of products, kernels, dtypes, modes.

switches() -> tree                those that a capture depends on
tracing_switches() -> tree        but for modes that compiled steps do not depend on
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from csc import devices

backends: Any = torch.backends
SWITCHES: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "inference": torch.is_inference_mode_enabled,
    "autocast": lambda: [[torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)] for d in devices.TYPES],
    "autocast cache": torch.is_autocast_cache_enabled,
    "deterministic": lambda: [
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
    ],
    "float32 products": torch.get_float32_matmul_precision,
    "float32 of all": lambda: backends.fp32_precision,
    "float32 of oneDNN": lambda: [backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision],
    "oneDNN": lambda: backends.mkldnn.enabled,
    "fast path of transformers": backends.mha.get_fastpath_enabled,
    **devices.SWITCHES,
}  # fmt: skip


def switches() -> list[Any]:
    """Each switch as it is now. Torch refuses to tell a float32 switch that was set in its newer way in the older one;
    then the newer tells.
    """
    return [[name, _state(read)] for name, read in SWITCHES.items()]


def tracing_switches() -> list[Any]:
    """Those that what is traced depends on, here. A compiled step is in no inference mode, wherever it is called."""
    left_out = devices.absent_switches()
    return [[name, _state(read)] for name, read in SWITCHES.items() if name != "inference" and name not in left_out]


def _state(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except RuntimeError:
        return "set in another way"
