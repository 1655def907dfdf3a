"""The coverage table: on a terminal, as Markdown, and in numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.coverage.check import Row, fine

COLUMNS = ("model", "nodes", "regions", "templates", "s")


def _columns(rows: Sequence[Row]) -> list[str]:
    """The ways of all rows are the same."""
    ways, divided = rows[0].ways, {way: None for row in rows for way in row.divided}
    return [*COLUMNS, *ways, *(f"{way}: divided" for way in divided)]


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    numbers = [row.nodes, row.regions, row.templates, row.seconds]
    cells = [row.name, *("-" if n is None else str(n) for n in numbers), *map(_short, row.ways.values())]
    parts = (row.divided.get(column.removesuffix(": divided")) for column in columns[len(cells) :])
    return [*cells, *("-" if part is None else f"{part:.0%}" for part in parts)]


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
    columns = _columns(rows)
    table = Table(*columns)
    for row in rows:
        table.add_row(*_cells(row, columns))
    console = Console()
    console.print(table)
    for name, way, reason in _reasons(rows):
        console.print(f"[bold]{name}[/bold], {way}: {reason}", highlight=False)
    for row in rows:
        for reason in row.whole:
            console.print(f"[bold]{row.name}[/bold], whole: {reason}", highlight=False)


def markdown(rows: Sequence[Row]) -> str:
    """The same for docs/models.md."""
    columns = _columns(rows)
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(_cells(row, columns))} |" for row in rows]
    reasons = [f"- **{name}**, {way}: {reason}" for name, way, reason in _reasons(rows)]
    return "\n".join([*lines, "", *reasons]).rstrip()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How many models there are, and how many compile each way with all gradients right."""
    return {"models": len(rows)} | {way: sum(fine(row.ways[way]) for row in rows) for way in rows[0].ways}
