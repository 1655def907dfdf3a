"""How many cores this process may keep busy, and the environment of processes that are started beside others."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

# Read by OpenMP, MKL and OpenBLAS when they are loaded: whoever has imported torch or numpy has its threads already.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time, or "max", in a period of so many (cgroup v2)
QUOTA_1, PERIOD_1 = (Path("/sys/fs/cgroup/cpu") / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # v1


def here() -> int:
    """Returns how many cores this process may keep busy, at least 1: those that it may run on, or fewer where its
    container has a share of the machine's time. A container's share is rounded up: what is left of a core is better
    used than not.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _share())))


def environment(threads: int = 1) -> dict[str, str]:
    """The variables for a process that is started beside others, whatever the user's say: each would take a thread for
    every core, and processes whose threads wait for each other on cores that are busy take many times as long.

    Args:
        threads: how many it may use for its products.

    Returns:
        A copy of `os.environ`, for `subprocess.Popen(env=...)`; it may be added to.
    """
    return {**os.environ, **dict.fromkeys(THREADS, str(threads))}


def _share() -> float:
    """In cores; infinite where nothing says that there is a limit."""
    for read in (lambda: QUOTA.read_text().split(), lambda: [QUOTA_1.read_text(), PERIOD_1.read_text()]):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            quota, period = map(int, read())
            if quota > 0:
                return quota / period
    return math.inf
