"""Times of functions, on the device that they run on.

seconds_on_gpu(function, budget) -> float      median of CUDA events around single calls, after warming up
seconds_on_cpu(function, runs) -> float        median, after one call
matmul_peak() -> float                         TFLOP/s of a large bfloat16 matrix product, the measured peak
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FEWEST, MOST = 5, 50
SIZE = 8192  # of the matrices whose product is taken for the peak


def seconds_on_gpu(function: Callable[[], object], budget: float = 0.5) -> float:
    """Calls the function for about `budget` seconds."""
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    runs = max(FEWEST, min(MOST, int(budget / max(time.perf_counter() - start, 1e-6))))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for first, last in marks:
        first.record()
        function()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks) / 1000


def seconds_on_cpu(function: Callable[[], object], runs: int) -> float:
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul_peak() -> float:
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIZE**3 / seconds_on_gpu(lambda: a @ b, 1.0) / 1e12
