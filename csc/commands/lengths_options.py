"""What commands take that look at the lengths of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LENGTHS = "an .npz with a column `tokens`, and one for each kind of units"

LengthsOption = Annotated[Path | None, typer.Option("--lengths", help=f"plan for samples like these: {LENGTHS}")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="samples of a step, of all replicas")]
MultipleOption = Annotated[int, typer.Option("--multiple", min=1, help="widths of rows are multiples of it")]
PackedOption = Annotated[bool, typer.Option("--packed/--padded", help="samples in one row, or a row for each")]
