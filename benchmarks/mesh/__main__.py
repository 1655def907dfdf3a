"""python -m benchmarks.mesh [--json] [--quick] [--only GLOB] [--kept FILE]: see benchmarks.mesh and docs/scale.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.mesh.cases import RANKS, cases
from benchmarks.mesh.kept_rows import keep, kept
from benchmarks.mesh.measure import MeshComparison, evaluate
from benchmarks.mesh.summary import AIMS, document, summary
from benchmarks.mesh.uniform import MeshRival
from benchmarks.mllm.configurations import CONFIGURATIONS
from benchmarks.pipeline import memory
from csc.driver.search_clock import SECONDS

WIDTH = 170


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description="Benchmark chosen meshes.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="four cases: every figure, in minutes")
    parser.add_argument("--configuration", action="append", default=[], choices=list(CONFIGURATIONS))
    parser.add_argument("--ranks", action="append", type=int, default=[], choices=RANKS)
    parser.add_argument("--only", default="*", help="a glob over names of cases: '*24 ranks, h100'")
    parser.add_argument("--kept", type=Path, help="a file of cases: those in it are not run again, others are added")
    parser.add_argument("--no-memory", action="store_true", help="start no processes to measure memory")
    given = parser.parse_args(arguments)
    rows = []
    listed = cases(given.quick, given.configuration, given.ranks, given.only)
    known = kept(given.kept)
    for number, case in enumerate(listed, 1):
        row = known.get(case)
        if row is None:
            row = evaluate(case, SECONDS)
            keep(given.kept, row)
        rows.append(row)
        print(f"{number} of {len(listed)}: {_text(rows[-1])}", file=sys.stderr, flush=True)
    held = [] if given.no_memory else memory.measure(1 if given.quick else len(memory.RUNS), lambda *_: None)
    if given.json:
        print(json.dumps(document(rows, held), indent=1))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(_table(rows))
    for name, value in summary(rows, held).items():
        text = "not run" if value is None else f"{value:.4g}"
        console.print(f"{name}: {text}" + (f" (aim {AIMS[name]})" if name in AIMS else ""), highlight=False)


def _table(rows: Sequence[MeshComparison]) -> Table:
    table = Table(title="seconds of a step; csc's mesh beside those of others")
    names = [rival.name for rival in rows[0].rivals] if rows else []
    for name in ("case", "csc", "seconds", *names, "by component", "search"):
        table.add_column(name)
    for row in rows:
        seconds = (_seconds(one) for one in (row.own, *row.rivals, row.by_component))
        table.add_row(row.case.name, row.own.what, *seconds, f"{row.search_seconds:.0f} s")
    return table


def _seconds(rival: MeshRival) -> str:
    if rival.seconds is None:
        return "none"
    return f"{rival.seconds:.3g}" + ("" if rival.fits else f" (out of memory: {rival.peak_memory / 2**30:.0f} GiB)")


def _text(row: MeshComparison) -> str:
    others = "; ".join(f"{one.name} {_seconds(one)} [{one.what}]" for one in (*row.rivals, row.by_component))
    return f"{row.case.name}: csc {_seconds(row.own)} [{row.own.what}], {row.search_seconds:.0f} s; {others}"


if __name__ == "__main__":
    main()
