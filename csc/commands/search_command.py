"""`csc search`: the best pair of encoder and language model, by the arguments of csc.search in a file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from csc.commands.printing import Column, DebugOption, JsonOption, console, print_json, table
from csc.errors import InputError

NAME = "search"


def search(
    file: Annotated[
        str, typer.Argument(help="path.py:name of the arguments of csc.search, or of a function that makes them")
    ],
    directory: Annotated[
        Path | None, typer.Option("--directory", help="where the search is stored and resumed")
    ] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="halving, mordal, random or grid")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="samples over all trials; below 1: a share of the grid's")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="samples of a full training")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="seed of projectors and of the order of samples")] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help="mesh to plan each pair's step for, as pp=3,dp=2")] = None,
    microbatches: Annotated[int | None, typer.Option("--microbatches", min=1, help="microbatches of that step")] = None,
    hardware: Annotated[str | None, typer.Option("--hardware", help="profile of the devices of that mesh")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="memory of one rank there, as 40GB")] = None,
    trial_mesh: Annotated[str | None, typer.Option("--trial-mesh", help="mesh of one trial, as dp=2")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="also write an HTML page with pictures")] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="directory for the winner, as save_pretrained writes it")
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the encoder and language model that learn a task best, at a twelfth of the grid's samples."""
    first = os.environ.get("RANK", "0") == "0"  # under torchrun the first process alone prints
    settings = {
        "directory": directory, "strategy": strategy, "samples": samples, "seed": seed, "mesh": mesh,
        "microbatches": microbatches, "hardware": hardware, "memory": memory, "trial_mesh": trial_mesh,
        "budget": int(budget) if budget is not None and budget >= 1 else budget,
    }  # fmt: skip
    from csc.driver.user_files import load_value
    from csc.model_search import search as run
    from csc.reports.search_page import page as page_of
    from csc.reports.search_page import summary

    errors = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints is no part of what a command prints
        arguments = _arguments(load_value(file, NAME), file)
        arguments |= {name: value for name, value in settings.items() if value is not None}
        if "directory" not in arguments:
            raise InputError("there is no directory", "csc search", "give --directory, where the search is kept")
        arguments.setdefault("tell", lambda line: errors.print(escape(line), highlight=False))
        result = run(**arguments)
    if not first:
        return
    if save is not None:
        result.winner().save_pretrained(save)
    if page is not None:
        page.write_text(page_of(result, f"csc search {file}"), encoding="utf-8")
    if json_output:
        print_json(result.as_dict())
        return
    _show(result)
    console.print(escape(summary(result)), highlight=False)


def _arguments(value: Any, file: str) -> dict[str, Any]:
    defined = value() if callable(value) else value
    if not isinstance(defined, Mapping):
        raise InputError(
            f"it is a {type(defined).__name__}", file,
            "name a dict of the arguments of csc.search, or a function that makes one",
        )  # fmt: skip
    return dict(defined)


def _show(result: Any) -> None:
    from csc.reports.search_page import HEADINGS, cells

    *names, why = HEADINGS
    optional = {"spread": 3, "seconds": 4, "samples": 2, "bytes a rank": 1, "energy": 3, "joules a step": 2}
    hidden = set() if any(row.planned_seconds is not None for row in result.rows) else {"step", "bytes a rank"}
    hidden |= set() if any(row.planned_joules is not None for row in result.rows) else {"energy", "joules a step"}
    kept = [n for n, name in enumerate(names) if name not in hidden]
    columns = [Column(names[n], optional[names[n]]) if names[n] in optional else Column(names[n]) for n in kept]
    shown = table(*columns, Column(why, 5), title=f"{len(result.rows)} pairs, the best first")
    for row in result.rows:
        row_cells = cells(row, result)
        shown.add_row(*(escape(row_cells[n]) for n in kept), escape(row.dropped))
    console.print(shown)
