"""The figures of all rows together.

summary(rows) -> dict[str, float | None]: None where no row of the kind was run
document(rows, hardware, partial) -> dict: what --json prints
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from benchmarks.context_parallel.cases import HARDWARE, SPARSE, Shape
from benchmarks.context_parallel.measure import BALANCED, CSC, Row
from benchmarks.context_parallel.rivals import RIVALS

TOKENS, RANKS = 131072, 8  # where the aims are
PTRR = "torch PTRR"
VOLUMES = ("packed", "long_tail", "giant", "generation")


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def over_gathered_ptrr(row: Row) -> float:
    """How many times faster than PTRR with an all-gather, by the model."""
    return row.plans[PTRR].gathered / row.plans[CSC].seconds


def over_best_rival(row: Row) -> float:
    """How many times faster than the best rival, which moves exact sets too."""
    return min(row.plans[name].seconds for name in RIVALS) / row.plans[CSC].seconds


def summary(rows: list[Row]) -> dict[str, float | None]:
    """The aims, at 128k tokens and 8 ranks; worst_speedup_over_any_rival is of all rows. Volumes: means of seeds."""
    here = [row for row in rows if (row.case.tokens, row.case.ranks) == (TOKENS, RANKS)]
    sparse = [row for row in here if row.share < SPARSE]
    dense = [row for row in here if row.share >= SPARSE]
    found: dict[str, float | None] = {"tile_imbalance_max": _max(here, lambda row: row.plans[CSC].tile)}
    found |= {f"kv_volume_{mask}": _volume(here, mask, CSC) for mask in VOLUMES}
    found["modelled_speedup_over_ptrr_sparse_geomean"] = geomean(map(over_gathered_ptrr, sparse))
    found["modelled_speedup_over_ptrr_dense_min"] = _min(dense, over_gathered_ptrr)
    found["planner_ms_max"] = _max(here, lambda row: row.plans[CSC].planner * 1e3)
    found["worst_speedup_over_any_rival"] = _min(rows, over_best_rival)
    found["time_over_lower_bound_max"] = _max(here, lambda row: row.plans[CSC].seconds / row.bound)
    found["balanced_tile_imbalance_max"] = _max(here, lambda row: row.plans[BALANCED].tile)
    found |= {f"balanced_kv_volume_{mask}": _volume(here, mask, BALANCED) for mask in VOLUMES}
    return found


def _volume(rows: list[Row], mask: str, name: str) -> float | None:
    found = [row.plans[name].volume for row in rows if row.case.mask == mask]
    return sum(found) / len(found) if found else None


def _max(rows: list[Row], value: Callable[[Row], float]) -> float | None:
    return max(map(value, rows), default=None)


def _min(rows: list[Row], value: Callable[[Row], float]) -> float | None:
    return min(map(value, rows), default=None)


def document(rows: list[Row], hardware: str, partial: float) -> dict[str, Any]:
    model = {"name": hardware, **asdict(HARDWARE[hardware]), **asdict(Shape()), "partial": partial}
    return {"summary": summary(rows), "model": model, "rows": [asdict(row) for row in rows]}
