"""python -m benchmarks.balance: csc's assignment of samples against others'. See benchmarks.balance and docs."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH = 160
EMULATED = 4  # cells
STEPS, TURNS, PROFILE = 3, 5, 20.0  # of each set, of each way, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balance", description="Divide real lengths among microbatches."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="the small model, two shapes, no integer programs")
    parser.add_argument("--batches", type=int, default=2, help="of each cell (default: 2)")
    parser.add_argument("--only", default="*", help="a glob over the names of cells, and 'sizes'")
    parser.add_argument("--emulated", action="store_true", help="also some cells as emulated ranks: real processes")
    parser.add_argument("--real", action="store_true", help="also steps of a small model on two ranks that compute")
    parser.add_argument("--ahead", action="store_true", help="also steps that encode for the next one")
    parser.add_argument(
        "--divided", action="store_true", help="the bound that lets samples be cut: tighter, some seconds a batch"
    )
    given = parser.parse_args()
    from benchmarks.balance.new_sizes import new_sizes
    from benchmarks.balance.simulated import cells, measure
    from benchmarks.balance.summary import document, show
    from csc.planning.assign.step import bound, divided_bound

    chosen = [cell for cell in cells(given.quick) if fnmatchcase(cell.name, given.only)]
    columns = (TextColumn("{task.description:<72}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(chosen))
        for cell in chosen:
            bar.update(task, description=cell.name)
            ilp_seconds = 0.0 if given.quick or cell.shape[2] > 1 else 1.0
            rows.append(measure(cell, given.batches, ilp_seconds, divided_bound if given.divided else bound))
            bar.advance(task)
    runs = []
    if given.emulated and chosen:
        from benchmarks.balance.emulated_cells import emulated

        runs = emulated([cell for cell in chosen if cell.shape[0] == 4 and cell.shape[2] == 1][:EMULATED])
    new = new_sizes() if fnmatchcase("sizes", given.only) else {}
    real = []
    if given.real:
        from benchmarks.balance.real import SETS, measured

        real = measured(SETS[:1] if given.quick else SETS, STEPS, TURNS, PROFILE, Console(stderr=True).print)
    ahead: list[dict[str, Any]] = []
    if given.ahead:
        from benchmarks.balance.ahead_cells import figures_ahead

        ahead = figures_ahead(given.quick, given.emulated)
    if given.json:
        print(json.dumps(document(rows, runs, real, new) | ({"ahead": ahead} if ahead else {}), indent=1))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    show(console, rows, runs, real, new)
    for one in ahead:
        console.print("ahead, " + ", ".join(f"{name} {value}" for name, value in one.items()), highlight=False)


if __name__ == "__main__":
    main()
