"""What runs beside a step: profilers, torch.compile, the workers of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def unattended_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """The iterator of a DataLoader, whose workers' deaths are found when a batch is waited for (within five seconds).
    Torch's handler of SIGCHLD else raises wherever the process is just then: in the middle of a step.
    """
    if getattr(batches, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False  # type: ignore[attr-defined]
    return batches


def is_profiled() -> bool:
    """Whether a profiler of torch's is on, emit_nvtx included."""
    return bool(torch.autograd._profiler_enabled())
