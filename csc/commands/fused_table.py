"""What Inductor has made of a program's functions.

fused_functions(directory) -> rows of csc.runtime.fusing, of the latest start that compiled them on this machine
fused_table(rows) -> a table to print
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from csc.commands.printing import table
from csc.commands.rows import Column, Rows

if TYPE_CHECKING:
    from csc.runtime.fusing import FusedRow

NONE_YET = "no step has run with its functions compiled on this machine: the first one compiles them"


def fused_functions(directory: Path) -> list[FusedRow]:
    """Of the program in a directory; none if it has not made a step, or nothing is kept."""
    from csc.cache.inductor_folder import inductor_folder
    from csc.cache.store import store
    from csc.runtime.fusing import rows_of

    folder = inductor_folder(store())
    fingerprint: str = json.loads((directory / "program.json").read_text())["fingerprint"]
    return rows_of(folder, fingerprint) if folder is not None else []


def fused_table(rows: list[FusedRow]) -> Rows:
    """A row for each function; seconds are those of its compilation, which later starts do not spend. Products by
    oneDNN where it computes some.
    """
    from csc.runtime.fusing import AS_IT_IS

    by_onednn = any(row.products for row in rows)
    columns: tuple[str | Column, ...] = (
        "function",
        "seconds",
        *([Column("products by oneDNN", 1)] if by_onednn else []),
        "",
        "why",
    )
    made = table(*columns, title="functions that Inductor compiles")
    for row in rows:
        seconds = "" if row.how == AS_IT_IS else f"{row.seconds:.2f}"
        products = [str(row.products or "")] if by_onednn else []
        made.add_row(row.name, seconds, *products, row.how, escape(row.why))
    made.add_section()
    products = [str(sum(row.products for row in rows))] if by_onednn else []
    made.add_row("all", f"{sum(row.seconds for row in rows):.2f}", *products, "", "of processes side by side")
    return made
