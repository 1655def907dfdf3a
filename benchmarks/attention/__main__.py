"""python -m benchmarks.attention: see benchmarks.attention."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from rich.console import Console

PARTS = ("gpu", "cpu")
GPU_SECONDS = 400.0  # after that no new case begins: the whole stays under eight minutes
WIDTH = 150


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description="Benchmark csc's attention.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="four masks, one length")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--tune", type=int, metavar="HEAD_DIM", help="only try kernel configurations on the GPU")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU part (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = run(arguments.part or PARTS, arguments.quick, arguments.tune)
    from benchmarks.attention.report import document, show

    if arguments.json:
        print(json.dumps(document(**found), indent=1))
        return
    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), **found)


def run(parts: Any, quick: bool, tune_for: int | None) -> dict[str, Any]:
    """The arguments of `document`."""
    found: dict[str, Any] = {"gpu": None, "cpu": [], "tuned": []}
    if tune_for is not None:
        if not torch.cuda.is_available():
            raise SystemExit("--tune times kernels on a GPU, and none is at hand.")
        from benchmarks.attention.tune import tune

        found["tuned"] = tune(tune_for, 16384, _progress)
        return found
    if "gpu" in parts and torch.cuda.is_available():
        from benchmarks.attention import gpu

        found["gpu"] = gpu.measure(gpu.cases(quick), GPU_SECONDS, _progress)
    elif "gpu" in parts:
        print("no GPU at hand: its part is left out", file=sys.stderr)
    # Beside a GPU the comparison of CPUs is only made when asked for.
    if "cpu" in parts and (len(parts) == 1 or not torch.cuda.is_available()):
        from benchmarks.attention import cpu
        from benchmarks.attention.gpu import TELLING
        from benchmarks.attention.masks import NAMES

        names, lengths = (TELLING, (2048,)) if quick else (NAMES, (2048, 4096))
        found["cpu"] = cpu.measure(names, lengths, 2 if quick else 3, _progress)
    return found


def _progress(what: str, done: int, all_: int) -> None:
    print(f"{what}: {done} of {all_}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
