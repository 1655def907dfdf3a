"""Where commands print, and the options that many of them have.

Terms: tables are as wide as the terminal, or as the environment says (COLUMNS); without both they have 160 columns.
Names are what options take, so none is cut: see csc.commands.rows.

    console      table(*columns, title)      print_json(content)      print_text(text)
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from csc.commands.rows import Column, Rows

WIDE = 160
COMMENT, HELD = "# ", "\N{NO-BREAK SPACE}"  # a source location stays with its mark
CONTINUED = 4  # columns further in than the line that goes on


def width() -> int | None:
    """None: rich looks it up, in COLUMNS or at the terminal."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDE


console = Console(width=width())

DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


def table(
    *columns: str | Column, title: str | None = None, show_lines: bool = False, elsewhere: str = "--json"
) -> Rows:
    """A table in which no name is cut or broken; a heading alone is a column that stays at every width. elsewhere: what
    shows all columns.
    """
    headed = [column if isinstance(column, Column) else Column(column) for column in columns]
    return Rows(headed, title, show_lines, elsewhere)


def print_text(text: str) -> None:
    """A listing. On a terminal a line that is too long goes on in the next one, further in; files and pipes get it
    as it is.
    """
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    for line in text.splitlines():
        for part in _in_width(line, console.width):
            sys.stdout.write(part + "\n")


def _in_width(line: str, most: int) -> list[str]:
    """Broken between words; a diff's mark stands before each part."""
    if len(line) <= most:
        return [line]
    mark = line[0] if line[0] in "+-" else ""
    body = line[len(mark) :].replace(COMMENT, COMMENT.replace(" ", HELD))
    inner = " " * (len(body) - len(body.lstrip()) + CONTINUED)
    parts = textwrap.wrap(
        body, most - len(mark), subsequent_indent=inner, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False,
    )  # fmt: skip
    return [mark + part.replace(HELD, " ") for part in parts]


def print_json(content: dict[str, Any]) -> None:
    """One object, and nothing else. Numbers that JSON has not (infinities, NaN) are null."""
    sys.stdout.write(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
