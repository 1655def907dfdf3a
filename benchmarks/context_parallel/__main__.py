"""python -m benchmarks.context_parallel: see benchmarks.context_parallel and docs/dispatch.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: a planner's time is that of one thread
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

WIDTH = 160


def main() -> None:
    from benchmarks.context_parallel.cases import DEFAULT, HARDWARE, cases
    from benchmarks.context_parallel.measure import run
    from benchmarks.context_parallel.summary import document

    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_parallel", description="Benchmark dispatch.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="one seed, two lengths, two numbers of ranks")
    parser.add_argument("--hardware", choices=HARDWARE, default=DEFAULT, help=f"of the model (default: {DEFAULT})")
    parser.add_argument("--partial", type=float, default=1.0, help="cost of a partial tile (default: 1 full one)")
    arguments = parser.parse_args()
    rows = run(cases(arguments.quick), HARDWARE[arguments.hardware], arguments.partial, progress())
    if arguments.json:
        print(json.dumps(document(rows, arguments.hardware, arguments.partial), indent=1))
        return
    from rich.console import Console

    from benchmarks.context_parallel.report import show

    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), rows)


def progress() -> Callable[[str, int, int], None]:
    """A line on stderr for every tenth of the work."""

    def told(what: str, done: int, all_: int) -> None:
        if done * 10 // all_ > (done - 1) * 10 // all_:
            print(f"{what}: {done} of {all_}", file=sys.stderr, flush=True)

    return told


if __name__ == "__main__":
    main()
