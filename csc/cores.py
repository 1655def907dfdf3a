"""How many cores this process may keep busy.

here() -> int       at least 1: those that it may run on, or fewer where its container has a share of the machine's time
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time, or "max", in a period of so many (cgroup v2)
QUOTA_1, PERIOD_1 = (Path("/sys/fs/cgroup/cpu") / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # v1


def here() -> int:
    """See the module. A container's share is rounded up: what is left of a core is better used than not."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _share())))


def _share() -> float:
    """In cores; infinite where nothing says that there is a limit."""
    for told in (lambda: QUOTA.read_text().split(), lambda: [QUOTA_1.read_text(), PERIOD_1.read_text()]):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            quota, period = map(int, told())
            if quota > 0:
                return quota / period
    return math.inf
