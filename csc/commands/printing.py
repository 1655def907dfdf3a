"""Where commands print, and the options that many of them have."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console(width=None if sys.stdout.isatty() else 160)

DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


def print_json(content: dict[str, Any]) -> None:
    """One object, and nothing else."""
    sys.stdout.write(json.dumps(content, indent=1) + "\n")
