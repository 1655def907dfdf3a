"""The cost model of csc.analysis.costs fitted to measured seconds.

Terms: the *fit* is the efficiency of matmuls, the bandwidth and the launch time for which the model is nearest to them.

    fit(base, parts) -> Hardware
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from csc.analysis.costs import Kernels, seconds
from csc.analysis.hardware import Hardware

Part = tuple[Kernels, float, int]  # work, measured seconds, how many regions run it
BOUNDS = ((0.2, 1e3), (0.2, 1e3), (0.0, 1e-2))  # peak / reached rate, bandwidth / reached, seconds per kernel


def fit(base: Hardware, parts: Sequence[Part]) -> Hardware:
    """`base` with the efficiencies and the launch time for which the model is nearest to the measured parts.

    With x = 1 / matmul_efficiency, y = 1 / bandwidth_efficiency and z = launch the roofline is linear once it is known
    which calls are bound by compute: least squares of the errors over the square roots of the times, within bounds,
    alternating with that choice. A parameter that no part depends on stays as in `base`. A device that is faster than
    the base says gets higher peaks or bandwidth, and an efficiency of 1.
    """
    parts = [part for part in parts if part[0].calls and part[1] > 0]
    if not parts:
        return base
    best = (1 / base.matmul_efficiency, 1 / base.bandwidth_efficiency, base.launch)
    least = _misfit(base, best, parts)
    current = best
    for _ in range(30):
        rows = [_columns(base, current, work) for work, _, _ in parts]
        current = _least_squares(rows, [t for _, t, _ in parts], [n / t for _, t, n in parts], current)
        off = _misfit(base, current, parts)
        if off >= least:
            break
        best, least = current, off
    return _with(base, best)


def _with(base: Hardware, found: tuple[float, float, float]) -> Hardware:
    compute, memory = 1 / found[0], 1 / found[1]
    return replace(
        base,
        peak={dtype: rate * max(1.0, compute) for dtype, rate in base.peak.items()},
        compiled={dtype: rate * max(1.0, compute) for dtype, rate in base.compiled.items()},
        bandwidth=base.bandwidth * max(1.0, memory),
        matmul_efficiency=min(1.0, compute),
        bandwidth_efficiency=min(1.0, memory),
        launch=found[2],
    )


def _misfit(base: Hardware, parameters: tuple[float, float, float], parts: Sequence[Part]) -> float:
    tried = _with(base, parameters)
    return sum(count * (seconds(work, tried) - measured) ** 2 / measured for work, measured, count in parts)


def _columns(base: Hardware, parameters: tuple[float, float, float], work: Kernels) -> tuple[float, float, float]:
    """What x, y and z are multiplied by in the time of the work, given which calls are bound by compute."""
    compute = memory = 0.0
    for call in work.calls:
        flops = call.flops / (base.peak_of(call.dtype, call.compiled) * base.share(call.flops)) if call.flops else 0.0
        moved = call.bytes / base.bandwidth
        if flops * parameters[0] > moved * parameters[1]:
            compute += flops
        else:
            memory += moved
    return compute, memory, float(work.kernels)


def _least_squares(
    rows: Sequence[tuple[float, float, float]],
    targets: Sequence[float],
    weights: Sequence[float],
    start: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Weighted least squares within BOUNDS: the best of all choices of which unknowns are free and which at a bound.

    An unknown that no row depends on stays as in `start`.
    """
    root = np.sqrt(np.array(weights))
    matrix, right = np.array(rows) * root[:, None], np.array(targets) * root
    scale = np.abs(matrix).max(axis=0)  # seconds per kernel are a million times smaller than the other two
    choices = [(None, low, high) if size > 0 else (value,) for (low, high), size, value in zip(BOUNDS, scale, start)]
    best, least = start, float("inf")
    for fixed in product(*choices):
        found = np.array([0.0 if value is None else value for value in fixed])
        free = [i for i, value in enumerate(fixed) if value is None]
        if free:
            solution = np.linalg.lstsq(matrix[:, free] / scale[free], right - matrix @ found, rcond=None)[0]
            found[free] = solution / scale[free]
        if not all(BOUNDS[i][0] <= found[i] <= BOUNDS[i][1] for i in free):
            continue
        off = float(((matrix @ found - right) ** 2).sum())
        if off < least:
            best, least = (float(found[0]), float(found[1]), float(found[2])), off
    return best
