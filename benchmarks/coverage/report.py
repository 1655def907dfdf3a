"""The coverage table: on a terminal, as Markdown, and in numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.coverage.check import WAYS, Row, fine

COLUMNS = ("model", "nodes", "regions", "templates", "s", *WAYS)


def _cells(row: Row) -> list[str]:
    numbers = [row.nodes, row.regions, row.templates, row.seconds]
    return [row.name, *("-" if n is None else str(n) for n in numbers), *(_short(row.ways[way]) for way in WAYS)]


def _short(result: str) -> str:
    return result if fine(result) else "no"


def _reasons(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(model, ways, reason), each reason once; library files by their place in the library."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for way, result in row.ways.items():
            if not fine(result):
                found.setdefault((row.name, re.sub(r"\S*site-packages/", "", result)), []).append(way)
    return [(name, ", ".join(ways), reason) for (name, reason), ways in found.items()]


def show(rows: Sequence[Row]) -> None:
    """Print the table, and under it why something does not compile."""
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table)
    for name, way, reason in _reasons(rows):
        console.print(f"[bold]{name}[/bold], {way}: {reason}", highlight=False)


def markdown(rows: Sequence[Row]) -> str:
    """The same for docs/models.md."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    reasons = [f"- **{name}**, {way}: {reason}" for name, way, reason in _reasons(rows)]
    return "\n".join([*lines, "", *reasons]).rstrip()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How many models there are, and how many compile each way with all gradients right."""
    return {"models": len(rows)} | {way: sum(fine(row.ways[way]) for row in rows) for way in WAYS}
