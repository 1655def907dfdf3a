"""python -m benchmarks.pipeline: see benchmarks.pipeline and docs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PARTS = ("simulated", "emulated", "real", "memory", "published")
WIDTH = 160
TOLD = 10  # lines of progress without a terminal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description="Benchmark csc's pipelines.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="four cases, fewer runs: every figure, in minutes")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="that plan and simulate (default: 2)")
    parser.add_argument("--configuration", action="append", help="only this configuration; may be repeated")
    parser.add_argument(
        "--rows", type=Path, help="a file of simulated rows: those in it are not made again, new ones are added"
    )
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of every process: there are as many as cores, or more
    chosen = arguments.part or PARTS
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        found = run(chosen, arguments, _progress(bar))
    if arguments.json:
        from benchmarks.pipeline.summary import document

        print(json.dumps(document(**found), indent=1))
        return
    from benchmarks.pipeline.report import show

    link, runs, gradients = found["emulated"]
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    show(
        console,
        found["simulated"],
        link,
        runs,
        gradients,
        found["real"],
        found["large"],
        found["held"],
        found["published"],
    )


def run(parts: Any, arguments: argparse.Namespace, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """The parts, as the arguments of `document`. Measured parts come first: nothing else runs beside them."""
    from benchmarks.mllm.configurations import CONFIGURATIONS
    from benchmarks.pipeline import emulated_ranks, large, memory, published, real, rows_file, simulated
    from benchmarks.pipeline.cases import cases, numbers
    from benchmarks.pipeline.torch_schedules import TORCH

    quick = arguments.quick
    found: dict[str, Any] = {
        "simulated": [],
        "emulated": (None, [], []),
        "real": None,
        "large": None,
        "held": [],
        "published": [],
    }
    if "real" in parts:
        found["real"] = real.measure(runs=1 if quick else 3, steps=4, budget=5 if quick else 20, progress=progress)
    if "memory" in parts:
        found["held"] = memory.measure(1 if quick else len(memory.RUNS), progress)
    if "emulated" in parts:
        chosen = emulated_ranks.QUICK if quick else emulated_ranks.CASES
        traced = {
            both: numbers(both[0], [both[1]]) for both in {(case.configuration, case.hardware) for case in chosen}
        }
        figures = {case: traced[case.configuration, case.hardware][case.hardware, case.frozen] for case in chosen}
        link, runs = emulated_ranks.measure(chosen, figures, steps=(2, 1) if quick else (3, 3), progress=progress)
        jobs = [{"kind": "gradients", "name": name} for name in TORCH]
        gradients = [job | answer for job, answer in zip(jobs, emulated_ranks.work(jobs, 4))]
        found["emulated"] = (link, runs, gradients)
    with ProcessPoolExecutor(1) as beside:  # what nobody times by the clock
        tables = beside.submit(published.measure) if "published" in parts else None
        seconds = beside.submit(large.plan_seconds) if "simulated" in parts else None
        if seconds is not None:
            only = arguments.configuration
            listed = [case for case in cases(quick) if not only or case.configuration in only]
            kept = arguments.rows
            known = rows_file.read(kept) if kept else {}
            keep = partial(rows_file.append, kept) if kept else lambda row: None
            found["simulated"] = simulated.run(listed, arguments.processes, progress, known, keep)
            found["large"] = seconds.result()
        found["published"] = tables.result() if tables is not None else []
    used = dict.fromkeys(row.case.configuration for row in found["simulated"])
    found["notes"] = {name: CONFIGURATIONS[name].notes for name in used}
    return found


def _progress(bar: Progress) -> Callable[[str, int, int], None]:
    """One line of the progress bar for each thing that is done; without a terminal, plain lines now and then."""
    lines: dict[str, Any] = {}

    def progress(what: str, done: int, all_: int) -> None:
        if not bar.console.is_terminal and (done * TOLD // all_ > (done - 1) * TOLD // all_):
            print(f"{what}: {done} of {all_}", file=sys.stderr, flush=True)
        if what not in lines:
            lines[what] = bar.add_task(what, total=all_)
        bar.update(lines[what], completed=done)

    return progress


if __name__ == "__main__":
    main()
