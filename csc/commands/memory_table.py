"""The memory that a plan expects of each rank, as a table.

memory_table(rows, limit) -> Rows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from csc.commands.printing import table
from csc.commands.rows import Column, Rows
from csc.simulation.page import bytes_text

if TYPE_CHECKING:
    from csc.reports.forecast import RankMemory

KINDS = ("parameters", "gradients", "optimizer", "activations", "working", "messages")
OPTIONAL = {"messages": 6, "working": 5, "gradients": 4, "recorded": 3, "parameters": 2, "optimizer": 1}


def memory_table(rows: Sequence[RankMemory], limit: float | None, devices: Sequence[str] = ()) -> Rows:
    """A row for each pipeline rank; equal neighbours share one. limit: bytes that a rank may hold; devices: what each
    rank is and may hold, where they differ.
    """
    above = "" if limit is None else f", limit {bytes_text(limit)}"
    if devices:
        above = f", limits: {'; '.join(dict.fromkeys(devices))}"
    kinds = [*KINDS, *(["recorded"] if any(row.recorded for row in rows) else [])]
    columns = [Column(kind, OPTIONAL.get(kind, 0)) for kind in kinds]
    made = table("rank", *columns, "all", title=f"memory of a rank at its fullest, as planned{above}")
    position = 0
    while position < len(rows):
        end = position
        while end + 1 < len(rows) and _sizes(rows[end + 1], kinds) == _sizes(rows[position], kinds):
            end += 1
        named = str(position) if end == position else f"{position} to {end}"
        made.add_row(named, *map(bytes_text, (*_sizes(rows[position], kinds), rows[position].total)))
        position = end + 1
    return made


def _sizes(row: RankMemory, kinds: Sequence[str]) -> tuple[int, ...]:
    return tuple(getattr(row, kind) for kind in kinds)
