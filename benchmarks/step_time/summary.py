"""The figures of all rows together.

summary(rows) -> {name: figure}      a figure that no row gives is not there
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.step_time.measure import COMPILE, CSC, EAGER, FUSED, WHOLE
from benchmarks.step_time.rows import Ratio, Row

DEEP = 32  # layers


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """See docs/fusing.md for what each should be. in_every_process: what all processes of a row came to at least.
    difference_max: of csc from eager; torch.compile may give gradients of 0 where eager has none.
    """
    frozen = [row for row in rows if row.case.frozen != "nothing"]
    deep = [row for row in rows if row.case.layers == DEEP]
    unfused = _ratios(rows, CSC, EAGER)
    found = {
        "csc_over_eager_max": _most([one.middle for one in unfused]),
        "csc_over_eager_max_in_every_process": _most([one.low for one in unfused]),
        "csc_over_eager_geomean": _mean([one.middle for one in unfused]),
        "fused_over_compile_geomean": _mean([one.middle for one in _ratios(rows, FUSED, COMPILE)]),
        "fused_over_compile_max": _most([one.middle for one in _ratios(rows, FUSED, COMPILE)]),
        "fused_over_compile_frozen_geomean": _mean([one.middle for one in _ratios(frozen, FUSED, COMPILE)]),
        "compile_seconds_over_compile_32_layers": _most(_quotients(deep, FUSED, COMPILE, "first_s")),
        "warm_seconds": _most([s for row in rows if (s := getattr(row.rivals.get(FUSED), "warm_s", None)) is not None]),
        "peak_over_compile_geomean": _mean(_quotients(rows, FUSED, COMPILE, "peak_mb")),
        "loss_peak_over_whole_logits": _most(_quotients(rows, CSC, WHOLE, "peak_mb")),
        "loss_cpu_over_whole_logits": _most([one.middle for one in _ratios(rows, CSC, WHOLE)]),
        "difference_max": _most(
            [one.difference for row in rows for name, one in row.rivals.items() if name not in (EAGER, COMPILE)]
        ),
    }
    return {name: value for name, value in found.items() if value is not None}


def _ratios(rows: Sequence[Row], name: str, other: str) -> list[Ratio]:
    return [one for row in rows if (one := row.ratio(name, other)) is not None]


def _quotients(rows: Sequence[Row], name: str, other: str, what: str) -> list[float]:
    both = [(getattr(row.rivals[name], what), getattr(row.rivals[other], what))
            for row in rows if name in row.rivals and other in row.rivals]  # fmt: skip
    return [own / its for own, its in both if its > 0]


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else None
