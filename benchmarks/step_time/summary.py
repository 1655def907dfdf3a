"""The figures of all rows together.

    summary(rows) -> {name: figure}      a figure that no row gives is not there

A row is a case with what benchmarks.step_time.measure prints of it, by rival.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.step_time.cases import Case
from benchmarks.step_time.measure import COMPILE, CSC, EAGER, FUSED, WHOLE

Row = tuple[Case, Mapping[str, Mapping[str, float]]]
DEEP = 32  # layers


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """See docs/fusing.md for what each should be."""
    frozen = [row for row in rows if row[0].frozen != "nothing"]
    deep = [row for row in rows if row[0].layers == DEEP]
    single = [row for row in rows if row[0].pp == 1]
    found = {
        "csc_over_eager_max": _most(_ratios(rows, CSC, EAGER, "cpu_ms")),
        "fused_over_compile_geomean": _mean(_ratios(single, FUSED, COMPILE, "cpu_ms")),
        "fused_over_compile_max": _most(_ratios(single, FUSED, COMPILE, "cpu_ms")),
        "fused_over_compile_frozen_geomean": _mean(_ratios(frozen, FUSED, COMPILE, "cpu_ms")),
        "compile_seconds_over_compile_32_layers": _most(_ratios(deep, FUSED, COMPILE, "first_s")),
        "warm_seconds": _most([row[FUSED]["warm_s"] for _, row in rows if "warm_s" in row.get(FUSED, {})]),
        "peak_over_compile_geomean": _mean(_ratios(single, FUSED, COMPILE, "peak_mb")),
        "loss_peak_over_whole_logits": _most(_ratios(rows, CSC, WHOLE, "peak_mb")),
        "loss_cpu_over_whole_logits": _most(_ratios(rows, CSC, WHOLE, "cpu_ms")),
        "difference_max": _most([one["difference"] for _, row in rows for one in row.values() if "difference" in one]),
    }
    return {name: value for name, value in found.items() if value is not None}


def _ratios(rows: Sequence[Row], name: str, other: str, what: str) -> list[float]:
    there = [row for _, row in rows if name in row and other in row]
    return [row[name][what] / row[other][what] for row in there if row[other][what] > 0]


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else None
