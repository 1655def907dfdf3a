"""Cases that were run, one a line of a file, so that a run that was cut off or divided goes on.

kept(file) -> {case: MeshComparison}        keep(file, row)        None: no file
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.mesh.measure import MeshComparison
from benchmarks.mesh.uniform import MeshRival
from benchmarks.pipeline.cases import Case


def kept(file: Path | None) -> dict[Case, MeshComparison]:
    """A line that was cut off is none."""
    if file is None or not file.exists():
        return {}
    rows = [_row(json.loads(line)) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {row.case: row for row in rows}


def keep(file: Path | None, row: MeshComparison) -> None:
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(row)) + "\n")


def _row(found: dict[str, Any]) -> MeshComparison:
    rivals = tuple(MeshRival(**one) for one in found["rivals"])
    single = {name: MeshRival(**found[name]) for name in ("own", "by_component")}
    return MeshComparison(**{**found, **single, "case": Case(**found["case"]), "rivals": rivals})
