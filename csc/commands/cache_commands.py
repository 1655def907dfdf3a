"""`csc cache list | clear | path`: what the cache on disk holds. See docs/cache.md."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

from csc.commands.printing import Column, DebugOption, JsonOption, console, print_json
from csc.commands.printing import table as folding

app = typer.Typer(no_args_is_help=True, help="List or clear the programs in the cache.")

SHOWN = 12  # digits of a key


@app.command("list")
def list_command(
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Programs and traced graphs: of which model, for which mesh and sizes, how large, when used last, how often."""
    from csc.cache.store import SHOWN as KINDS
    from csc.cache.store import store
    from csc.simulation.page import bytes_text

    cache = store()
    entries = [entry for entry in (cache.entries() if cache is not None else []) if entry.kind in KINDS]
    folder = str(cache.folder) if cache is not None else None
    if json_output:
        total = sum(entry.size for entry in entries)
        print_json({"folder": folder, "bytes": total, "entries": entries})
        return
    if cache is None:
        console.print("the cache is switched off (CSC_CACHE=0)")
        return
    about_program = (Column("mesh", 1), Column("frozen", 3), Column("shapes", 4))
    table = folding("key", "holds", "model", *about_program, "size", Column("used last", 2), Column("hits", 5))
    for entry in entries:
        about = entry.about
        cells = (entry.key[:SHOWN], entry.kind, str(about.get("name", "")), _mesh(about), _frozen(about))
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) if entry.used else ""
        rest = (_shapes(about), bytes_text(entry.size), used, str(entry.hits))
        table.add_row(*(escape(cell) for cell in (*cells, *rest)))
    console.print(table)
    together = bytes_text(sum(entry.size for entry in entries))
    console.print(f"{len(entries)} entries, {together} of at most {bytes_text(cache.limit)}, in {escape(str(folder))}")


@app.command()
def clear(
    prefix: Annotated[str, typer.Argument(help="remove only the entries whose keys begin with this")] = "",
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove entries: all, or those of a key as `csc cache list` shows it."""
    from csc.cache.store import store
    from csc.errors import InputError

    cache = store()
    removed = cache.clear(prefix) if cache is not None else 0
    if prefix and not removed:
        raise InputError(f"no entry's key begins with {prefix!r}", "csc cache clear", "see `csc cache list`")
    print_json({"removed": removed}) if json_output else print(f"{removed} entries removed")


@app.command()
def path(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """Print the folder of the cache."""
    from csc.cache.store import location

    print_json({"folder": str(location())}) if json_output else print(location())


def _mesh(about: Mapping[str, Any]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in about.get("mesh", {}).items() if size > 1)


def _frozen(about: Mapping[str, Any]) -> str:
    return ", ".join(about.get("freeze") or ())


def _shapes(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in about.get("shapes", {}).items())
