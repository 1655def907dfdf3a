"""Which stages a GPU does not record, as far as a program's graphs tell.

unfit_table(parts, stages) -> a table to print, or a sentence if all are recorded
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from csc.commands.printing import table
from csc.commands.rows import Rows

if TYPE_CHECKING:
    from csc.analysis.unfit_parts import UnfitPart


def unfit_table(parts: list[UnfitPart], stages: int) -> Rows | str:
    """stages: how many there are. A stage whose F is not recorded has no other part that is."""
    if not parts:
        return (
            f"cuda_graphs: nothing speaks against recording the {stages} stages"
            if stages > 1
            else ("cuda_graphs: nothing speaks against recording the stage")
        )
    made = table("stage", "part", "why", title="what cuda_graphs leaves as it is")
    for row in parts:
        made.add_row(str(row.stage), "all" if row.part == "F" else row.part, escape(row.why))
    return made
