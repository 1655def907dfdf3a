"""One measurement, in a process of its own: python -m benchmarks.compile_time.measure NAME LAYERS RANKS SCHEDULE

Prints one JSON object: seconds, rss_gb; of csc also capture, after, plan, emit, refreeze, lines of a rank's file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.compile_time.models import MESHES, MICROBATCHES, batch, model
from csc.commands.tables import peak_memory

CSC = "csc"


def measure(name: str, layers: int, ranks: int, schedule: str) -> dict[str, Any]:
    """The measurement of one name; see the module."""
    made, example = model(layers), batch()
    if name == CSC:
        found = _csc(made, example, ranks, schedule)
    else:
        from benchmarks.compile_time.rivals import RIVALS

        start = time.perf_counter()
        RIVALS[name](made, example)
        found = {"seconds": time.perf_counter() - start}
    return {**found, "rss_gb": peak_memory() / 1024**3}


def _csc(made: Any, example: Any, ranks: int, schedule: str) -> dict[str, Any]:
    import csc.api

    options: dict[str, Any] = {"mesh": MESHES[ranks], "microbatches": MICROBATCHES, "schedule": schedule}
    options |= {"memory": "100TB", "loss_weight": "tokens"}  # said, as a batch of one sample that nothing checks asks
    with tempfile.TemporaryDirectory() as home:
        first = Path(home) / "first"
        start = time.perf_counter()
        compiled = csc.compile(
            made, example=[example], freeze=["vision_tower"], hardware="a100", check=False, **options
        )
        planned = time.perf_counter()
        compiled.write(first)
        written = time.perf_counter()
        steps = json.loads((first / "program.json").read_text())["timings"]
        capture = steps["capture"] + steps["normalise"]
        lines = max(len(path.read_text().splitlines()) for path in first.glob("rank_*.py"))
        again = time.perf_counter()
        compiled.with_options(freeze=["vision_tower", "language_model"]).write(Path(home) / "second")
        return {
            "seconds": written - start,
            "capture": capture,
            "after": written - start - capture,
            "plan": steps["partition"],
            "emit": written - planned,
            "refreeze": time.perf_counter() - again,
            "lines": lines,
            "bytes": sum(path.stat().st_size for path in first.rglob("*.py")),
        }


if __name__ == "__main__":
    os.environ["CSC_CACHE"] = "0"
    asked, depth, count, order = sys.argv[1:5]
    print(json.dumps(measure(asked, int(depth), int(count), order)))
