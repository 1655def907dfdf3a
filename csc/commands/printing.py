"""Where commands print, and the options that many of them have.

Terms: tables are as wide as the terminal, or as the environment says (COLUMNS); without both they have 160 columns. A
cell that is too long goes on in the next line: names are what options take, so none is cut.

    console      table(*columns, title)      print_json(content)
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

WIDE = 160


def width() -> int | None:
    """None: rich looks it up, in COLUMNS or at the terminal."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDE


console = Console(width=width())

DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


def table(*columns: str, title: str | None = None, show_lines: bool = False) -> Table:
    """A table whose cells are folded, never cut."""
    made = Table(title=title, show_lines=show_lines)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_json(content: dict[str, Any]) -> None:
    """One object, and nothing else. Numbers that JSON has not (infinities, NaN) are null."""
    sys.stdout.write(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
