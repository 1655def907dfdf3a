"""One training step in one process: eager PyTorch, `torch.compile(model, dynamic=False)`, csc, and csc fused.

    python -m benchmarks.step_time [--quick] [--json] [--models llama llava] [--rivals eager csc] [--rounds 9] [--warm]
                                   [--preload libjemalloc.so.2]
    python -m benchmarks.step_time --overhead [--json]     the runtime beside a plain loop: see overhead.py

Each case runs in a process of its own with one thread, on a compilation cache of its own; rivals take turns, and CPU
time is compared. glibc is told to keep what is freed: which rival would else give memory back in the middle of a step
is chance. --warm: also seconds to the first step of a second process, on the cache that the first one has filled.
--preload: an allocator for all rivals. glibc's leaves gaps between tensors, so that the memory of a process is chance,
too; jemalloc, which is told to give back at once, leaves none (take seconds without it).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.step_time.cases import FULL, HEAD, QUICK, Case, select
from benchmarks.step_time.measure import CSC, EAGER, FUSED, RIVALS, WHOLE
from benchmarks.step_time.models import MODELS
from benchmarks.step_time.overhead import fitted
from benchmarks.step_time.overhead import measure as measure_overhead
from benchmarks.step_time.summary import Row, summary

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0",
}  # fmt: skip


def run(case: Case, rivals: list[str], rounds: int, again: bool, preload: str = "") -> Row:
    """A case, in processes of its own. RuntimeError with what one said if it failed."""
    allocator = {"LD_PRELOAD": preload} if preload else {}
    alone = [name for name in rivals if case.pp == 1 or name in (EAGER, CSC, FUSED)]
    alone = [name for name in alone if name != WHOLE or case.model == HEAD.model]
    with tempfile.TemporaryDirectory() as home:
        found = _process(case, home, allocator, "--rounds", str(rounds), "--rivals", *alone)
        for name in alone[1:] if again else ():
            found[name] |= _process(case, home, allocator, "--warm", "--rivals", name)[name]
    return case, found


def _process(case: Case, home: str, allocator: dict[str, str], *arguments: str) -> dict[str, dict[str, float]]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor", "CSC_CACHE_DIR": f"{home}/csc", "CSC_CACHE": "1"}
    command = [sys.executable, "-m", "benchmarks.step_time.measure", json.dumps(asdict(case)), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT, **allocator, **caches}
    )
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
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
    shown = Table("case", "rival", "cpu ms", "over eager", "peak MB", "first s", "warm s", "difference")
    for case, row in rows:
        for number, (name, one) in enumerate(row.items()):
            warm = f"{one['warm_s']:.1f}" if "warm_s" in one else ""
            shown.add_row(
                "" if number else str(case), name, f"{one['cpu_ms']:.1f}", f"{one['over_eager']:.3f}",
                f"{one['peak_mb']:.0f}", f"{one['first_s']:.1f}", warm, f"{one['difference']:.1e}",
            )  # fmt: skip
    return shown


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
    Console().print(shown)
    for name, figure in found.items():
        Console().print(f"{name}: {figure:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases, two of them small")
    parser.add_argument("--models", nargs="*", default=[], choices=list(MODELS))
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS), help="the first is eager")
    parser.add_argument("--rounds", type=int, default=9)
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
    rivals = [EAGER, *(name for name in arguments.rivals if name != EAGER)]
    rows = []
    for case in select(QUICK if arguments.quick else FULL, arguments.models):
        rows.append(run(case, rivals, arguments.rounds, arguments.warm, arguments.preload))
        if not arguments.json:
            Console().print(table(rows[-1:]))
    if arguments.json:
        listed = [{**asdict(case), "rivals": row} for case, row in rows]
        about = {"torch": torch.__version__, "machine": platform.machine()}
        print(json.dumps({**about, "summary": summary(rows), "rows": listed}, indent=1))
        return
    for name, figure in summary(rows).items():
        Console().print(f"{name}: {figure:.3g}")


if __name__ == "__main__":
    main()
