"""What each step of a compilation took.

compile_times(directory) -> {step: seconds}, with "total" and "peak_memory" (bytes)
timings_table(name, spent, summaries) -> a table to print
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from csc.commands.printing import table as folding
from csc.commands.rows import Column, Rows
from csc.simulation.page import bytes_text

STEPS = {  # of the way through, and what of it stands in program.json
    "capture": ("capture",),
    "normalise": ("normalise",),
    "passes": (
        "shapes",
        "dropout",
        "precision",
        "attention",
        "context",
        "data_parallel",
        "loss",
        "head",
        "regions",
        "tensor",
    ),
    "differentiation": (
        "differentiate",
        "simplify",
        "views",
        "freeze",
        "prune",
        "recompute",
        "split",
        "attention_order",
        "overlap",
        "in_place",
    ),
    "planning": ("partition", "schedule"),
    "emission": ("emission",),
}


def compile_times(directory: Path) -> dict[str, float]:
    """Seconds of every step that is in a program's program.json, of all of them, and this process' peak memory."""
    spent: dict[str, float] = json.loads((directory / "program.json").read_text())["timings"]
    return {**spent, "total": round(sum(spent.values()), 4), "peak_memory": peak_memory()}


def peak_memory() -> int:
    """The most bytes of memory that this process has had.

    Where there is /proc, from there: getrusage also counts what the process that started this one had at that moment.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def timings_table(name: str, spent: Mapping[str, float], summaries: Mapping[str, str]) -> Rows:
    """A row for every step, under the part of the way that it belongs to. summaries: what a step leaves."""
    table = folding("part", "step", "seconds", Column("share", 1), "leaves", title=f"the compilation of {name}")
    total = spent["total"] or 1.0
    for part, steps in STEPS.items():
        for number, step in enumerate(step for step in steps if step in spent):
            row = (f"{spent[step]:.3f}", f"{spent[step] / total:.0%}", summaries.get(step, ""))
            table.add_row("" if number else part, step, *row)
        table.add_section()
    table.add_row(
        "all", "", f"{spent['total']:.3f}", "100%", f"{bytes_text(spent['peak_memory'])} of memory at its peak"
    )
    return table
