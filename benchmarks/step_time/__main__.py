"""One training step in one process: eager PyTorch, `torch.compile(model, dynamic=False)`, csc, and csc fused.

    python -m benchmarks.step_time [--quick] [--json] [--models llama llava] [--only GLOB] [--rivals eager csc] [--warm]
              [--rounds 9] [--seconds 60] [--processes 3] [--kept FILE] [--preload libjemalloc.so.2]
    python -m benchmarks.step_time --overhead [--json]     the runtime beside a plain loop: see overhead.py

Each case runs in a process of its own with one thread, on a compilation cache of its own; rivals take turns, and CPU
time is compared. glibc is told to keep what is freed: which rival would else give memory back in the middle of a step
is chance.

--processes   a ratio is the median of theirs, with the least and the most: what is chance in one is so for all steps
--warm        also seconds to the first step of a second process, on the cache that the first one has filled
--preload     an allocator for all rivals. glibc's leaves gaps between tensors, so that the memory of a process is
              chance, too; jemalloc, which is told to give back at once, leaves none (take seconds without it)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.step_time.cases import FULL, HEAD, QUICK, Case, select
from benchmarks.step_time.measure import COMPILE, CSC, EAGER, FUSED, OF_HEAD, RIVALS
from benchmarks.step_time.models import MODELS
from benchmarks.step_time.overhead import fitted
from benchmarks.step_time.overhead import measure as measure_overhead
from benchmarks.step_time.rows import Ratio, Row, Timed, keep, kept
from benchmarks.step_time.summary import summary
from csc import cores

WIDTH = 170  # of what is no terminal
ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0",
}  # fmt: skip


def run(case: Case, given: argparse.Namespace) -> Row:
    """A case, in processes of its own. RuntimeError with what one said if it failed."""
    allocator = {"LD_PRELOAD": given.preload} if given.preload else {}
    rivals = [EAGER, *(name for name in given.rivals if name != EAGER)]
    alone = [name for name in rivals if case.pp == 1 or name in (EAGER, CSC, FUSED)]
    alone = [name for name in alone if name not in OF_HEAD or case.model == HEAD.model]
    rounds = ["--rounds", str(given.rounds), "--seconds", str(given.seconds), "--rivals", *alone]
    with tempfile.TemporaryDirectory() as home:
        found = [_process(case, home, allocator, *rounds) for _ in range(given.processes)]
        warm = {name: _process(case, home, allocator, "--warm", "--rivals", name)[name]["warm_s"]
                for name in (alone[1:] if given.warm else ())}  # fmt: skip
    return Row(case, {name: _timed([one[name] for one in found], warm.get(name)) for name in alone})


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _timed(processes: list[dict[str, Any]], warm: float | None) -> Timed:
    return Timed(
        rounds_ms=tuple(tuple(one["rounds_ms"]) for one in processes),
        first_s=processes[0]["first_s"],
        peak_mb=median(one["peak_mb"] for one in processes),
        difference=max(one["difference"] for one in processes),
        warm_s=warm,
    )


def _process(case: Case, home: str, allocator: dict[str, str], *arguments: str) -> dict[str, dict[str, Any]]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor", "CSC_CACHE_DIR": f"{home}/csc", "CSC_CACHE": "1"}
    command = [sys.executable, "-m", "benchmarks.step_time.measure", json.dumps(asdict(case)), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=cores.environment() | ENVIRONMENT | allocator | caches
    )
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def not_loaded(library: str) -> str:
    """Why; "" if it can be. The system's loader would only warn, and measure without it."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def table(rows: list[Row]) -> Table:
    """A line for each rival of each case."""
    columns = ("case", "rival", "cpu ms", "over eager", "over torch.compile", "peak MB", "first s", "warm s")
    shown = Table(*columns, "difference")
    for row in rows:
        for number, (name, one) in enumerate(row.rivals.items()):
            warm = f"{one.warm_s:.1f}" if one.warm_s is not None else ""
            shown.add_row(
                "" if number else str(row.case), name, f"{one.cpu_ms:.1f}", _shown(row.ratio(name, EAGER)),
                _shown(row.ratio(name, COMPILE)), f"{one.peak_mb:.0f}", f"{one.first_s:.1f}", warm,
                f"{one.difference:.1e}",
            )  # fmt: skip
    return shown


def _shown(ratio: Ratio | None) -> str:
    """With the range of processes where there are several."""
    if ratio is None:
        return ""
    around = "" if ratio.low == ratio.high else f" ({ratio.low:.3f} to {ratio.high:.3f})"
    return f"{ratio.middle:.3f}{around}"


def show_overhead(as_json: bool) -> None:
    """Rows of benchmarks.step_time.overhead and what they are fitted by."""
    torch.set_num_threads(1)
    rows = measure_overhead(rounds=30)
    found = fitted(rows)
    if as_json:
        print(json.dumps({"summary": found, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    shown = Table("pp", "microbatches", "actions", "messages", "step, cpu ms", "plain loop", "difference")
    for row in rows:
        counts = [str(number) for number in (row.pp, row.microbatches, row.actions, row.messages)]
        shown.add_row(*counts, f"{row.step_ms:.2f}", f"{row.plain_ms:.2f}", f"{row.difference:.1e}")
    _console().print(shown)
    for name, figure in found.items():
        Console().print(f"{name}: {figure:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases, two of them small")
    parser.add_argument("--models", nargs="*", default=[], choices=list(MODELS))
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS), help="the first is eager")
    parser.add_argument("--only", default="*", help="a glob over names of cases: '*512 x 256*'")
    parser.add_argument("--rounds", type=int, default=9, help="at least, in each process")
    parser.add_argument("--seconds", type=float, default=0.0, help="of rounds, at least, in each process")
    parser.add_argument("--processes", type=int, default=1, help="in which each case is measured")
    parser.add_argument("--kept", type=Path, help="a file of cases: those in it are not run again, others are added")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--preload", default="", metavar="LIBRARY", help="an allocator that each process loads first")
    parser.add_argument("--overhead", action="store_true", help="only what the runtime itself takes of a step")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    if arguments.preload and (why := not_loaded(arguments.preload)):
        parser.error(f"--preload: {why}; install the allocator, or give the path of its library")
    if arguments.overhead:
        show_overhead(arguments.json)
        return
    known = kept(arguments.kept)
    rows = []
    for case in select(QUICK if arguments.quick else FULL, arguments.models, arguments.only):
        row = known.get(case)
        if row is None:
            row = run(case, arguments)
            keep(arguments.kept, row)
        rows.append(row)
        if not arguments.json:
            _console().print(table([row]))
    if arguments.json:
        about = {"torch": torch.__version__, "machine": platform.machine()}
        print(json.dumps({**about, "summary": summary(rows), "rows": [asdict(row) for row in rows]}, indent=1))
        return
    for name, figure in summary(rows).items():
        Console().print(f"{name}: {figure:.3g}")


if __name__ == "__main__":
    main()
