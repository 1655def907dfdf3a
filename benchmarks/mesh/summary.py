"""The figures of the mesh benchmark, and everything as one JSON object.

  summary(rows, held) -> {field: number or None}        document(rows, held) -> dict

speedup_over_best_uniform_geomean   over the fastest mesh for all components, layers spread evenly, by brute force
best_uniform_over_least_geomean     the most that any choice could win over the fastest uniform mesh on these layouts:
                                    over the seconds of work, divided evenly, and of the least step's end, with memory
                                    and messages for free
worst_speedup                       over any rival that csc could run: Megatron's and Cornstarch's, and the above
worst_speedup_over_formulas         over DistTrain's and DFLOP's thetas, which have a mesh for each component
by_component_speedup_geomean        csc's choice over the estimate of what meshes by component take
search_seconds_max                  processor time
peak_memory_error                   the largest, of ranks that train (benchmarks.pipeline.memory)
"""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from benchmarks.mesh.components import FORMULAS
from benchmarks.mesh.measure import UNIFORM, MeshComparison
from benchmarks.pipeline.memory import Held, largest
from benchmarks.pipeline.summary import geomean

AIMS = {
    "speedup_over_best_uniform_geomean": "1.2 or more", "worst_speedup": "1.0 or more",
    "worst_speedup_over_formulas": "1.0 or more", "search_seconds_max": "60 or less",
    "peak_memory_error": ".05 or less",
}  # fmt: skip


def summary(rows: Sequence[MeshComparison], held: Sequence[Held] = ()) -> dict[str, float | None]:
    """Of all cases in which both fit."""
    own = [one for row in rows for rival in row.rivals if rival.name not in FORMULAS if (one := row.speedup(rival))]
    theirs = [one for row in rows for rival in row.rivals if rival.name in FORMULAS if (one := row.speedup(rival))]
    found = {
        "speedup_over_best_uniform_geomean": geomean(
            one for row in rows if (one := row.speedup(row.rival(UNIFORM))) is not None
        ),
        "best_uniform_over_least_geomean": geomean(
            seconds / row.least for row in rows if (seconds := row.rival(UNIFORM).seconds) is not None
        ),
        "worst_speedup": min(own, default=None),
        "worst_speedup_over_formulas": min(theirs, default=None),
        "by_component_speedup_geomean": geomean(
            1 / one for row in rows if (one := row.speedup(row.by_component)) is not None
        ),
        "search_seconds_max": max((row.search_seconds for row in rows), default=None),
        "layouts_left_max": max((float(row.left) for row in rows), default=None),
        "cases": float(len(rows)),
        "cases_that_fit": float(sum(row.own.fits for row in rows)),
    }
    for name in dict.fromkeys(rival.name for row in rows for rival in row.rivals):
        speedups = [one for row in rows if (one := row.speedup(row.rival(name))) is not None]
        found[f"speedup_over {name} geomean"] = geomean(speedups)
        found[f"out_of_memory {name}"] = float(sum(not row.rival(name).fits for row in rows))
    found["peak_memory_error"] = largest(held)
    return {name: None if value is None or math.isnan(value) else value for name, value in found.items()}


def document(rows: Sequence[MeshComparison], held: Sequence[Held] = ()) -> dict[str, Any]:
    """Everything as JSON would have it."""
    return {
        "summary": summary(rows, held),
        "rows": [asdict(row) for row in rows],
        "memory": [asdict(one) | {"errors": one.errors} for one in held],
        "machine": {"processor": platform.processor() or platform.machine(), "system": platform.platform()},
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
