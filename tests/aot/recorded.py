"""What the compilers report for every configuration, recorded: compiling them all takes ten minutes of a core.

Terms
  row       the key of a case and its resources; it counts only as long as the key is the one that the case has now:
            another source of the kernel, other blocks or another Triton, and the case is compiled

    resources(case, update) -> Resources

After a change of the kernels: `pytest tests/aot --update-golden`, then read `git diff`.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from tests.aot.building import Case, Resources, build, key

FILE = Path(__file__).with_name("recorded.json")


@cache
def _rows() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def recorded(case: Case) -> Resources | None:
    """What is recorded of a case as it is now."""
    row = _rows().get(str(case))
    return Resources(*row[1:]) if row is not None and row[0] == key(case) else None


def resources(case: Case, update: bool) -> Resources:
    """What is recorded, else what compiling it gives. update: compile it and record that."""
    found = None if update else recorded(case)
    if found is None:
        found = build(case)
    if update:
        rows = _rows()
        rows[str(case)] = [key(case), *astuple(found)]
        lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return found
