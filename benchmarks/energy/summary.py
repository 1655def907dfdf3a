"""The figures of the benchmark of energy as one JSON document.

document(cells, rivals, plans) -> dict with `summary`, the aims beside it, and every row
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.energy.perseus import FACTORS, CellRow
from benchmarks.energy.plans import PlanRow
from benchmarks.energy.rival import RivalRow

AIMS = {
    "points_below_bound_a100_max": 0.2,
    "points_below_bound_a40_max": 0.6,
    "seconds_8x96": 20.0,
    "seconds_over_lowtime": 1 / 20,
    "order_and_clocks_points": 3.0,
    "step_over_promised_max": 1.0,
}


def document(cells: Sequence[CellRow], rivals: Sequence[RivalRow], plans: Sequence[PlanRow]) -> dict[str, Any]:
    """What was not run is null. seconds_8x96: CPU seconds of a whole frontier, of the slowest such cell."""
    rows = [row for cell in cells for row in cell.rows]
    long = [cell.frontier_seconds for cell in cells if cell.cell.microbatches == 96]
    frozen = [row for row in plans if row.frozen != "all trainable"]
    promised = [cell.worst_promise for cell in cells]
    promised += [each.over_promised for row in plans for each in row.schedules]
    summary = {
        "cells": len(cells),
        "ahead_of_perseus": sum(row.ahead for row in rows if row.factor == 1),
        **{
            f"ahead_of_perseus_at_{factor:.2f}": sum(row.ahead for row in rows if row.factor == factor)
            for factor in FACTORS[1:]
        },
        "points_below_bound_a100_max": _below(cells, "a100_sxm"),
        "points_below_bound_a40_max": _below(cells, "a40"),
        "seconds_8x96": max(long, default=None),
        "seconds_8x96_one_point": max((c.point_seconds for c in cells if c.cell.microbatches == 96), default=None),
        "seconds_over_lowtime": max((row.csc_seconds / row.lowtime_seconds for row in rivals), default=None),
        "ahead_of_lowtime_replayed": f"{sum(row.ahead for row in rivals)} of {sum(row.plans for row in rivals)}",
        "lowtime_over_claimed_max": max((row.over_claimed for row in rivals), default=None),
        "saved_same_time_geomean": _geomean([row.auto.same_time for row in frozen if row.auto is not None]),
        "saved_same_time_1f1b_geomean": _geomean([row.own.same_time for row in frozen]),
        "order_and_clocks_points": sum(row.points for row in frozen) / len(frozen) if frozen else None,
        "step_over_promised_max": max(promised, default=None),
    }
    return {
        "summary": summary,
        "aims": AIMS,
        "cells": [cell.as_dict() for cell in cells],
        "lowtime": [row.as_dict() for row in rivals],
        "plans": [row.as_dict() for row in plans],
    }


def _below(cells: Sequence[CellRow], device: str) -> float | None:
    return max((cell.worst_below_bound for cell in cells if cell.cell.device == device), default=None)


def _geomean(shares: Sequence[float]) -> float | None:
    if not shares:
        return None
    return math.exp(sum(math.log(max(share, 1e-9)) for share in shares) / len(shares))
