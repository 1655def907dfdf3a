"""Products of float32 matrices on this CPU: those of PyTorch (MKL) beside oneDNN's, which compiled functions take.

    python -m benchmarks.products [--json] [--threads 1] [--tokens 512] [--widths 128 512 1024 2048]

Of a linear layer from a width to four times it: forward (x W^T), gradient of the activations (d W) and of the weight
(d^T x, with the copy of d^T in it). Seconds are medians of turns; the library that csc.kernels.onednn chooses on this
machine, and whether a size is worth it to it, stand in the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from csc.kernels.onednn import PRODUCT, is_worth, least_multiplications
from rich.console import Console
from rich.table import Table

ENOUGH = 0.6  # seconds for one row
WIDTH = 120  # of what is no terminal
Pair = tuple[torch.Tensor, torch.Tensor]


def operands(tokens: int, width: int) -> dict[str, Pair]:
    """By part of a training step: the two matrices."""
    x, weight, d = (torch.randn(sizes) for sizes in ((tokens, width), (4 * width, width), (tokens, 4 * width)))
    return {"forward": (x, weight.t()), "activations": (d, weight), "weight": (d.t(), x)}


def measure(tokens: int, width: int) -> list[dict[str, object]]:
    """A row for each part."""
    rows: list[dict[str, object]] = []
    for part, (a, b) in operands(tokens, width).items():
        libraries: list[Callable[[], torch.Tensor]] = [lambda a=a, b=b: torch.mm(a, b), lambda a=a, b=b: PRODUCT(a, b)]  # type: ignore[misc]
        exact = a.double() @ b.double()
        errors = [float((run().double() - exact).norm() / exact.norm()) for run in libraries]
        turns: list[list[float]] = []
        start = time.perf_counter()
        while len(turns) < 3 or time.perf_counter() - start < ENOUGH:
            turns.append([_seconds(run) for run in libraries])
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        own, onednn = (median(turn[place] for turn in turns) for place in range(2))
        rows.append({
            "tokens": tokens, "width": width, "part": part, "worth_it": is_worth(*a.shape, b.shape[1]),
            "torch_gflops": flops / own / 1e9, "onednn_gflops": flops / onednn / 1e9,
            "onednn_over_torch": median(turn[1] / turn[0] for turn in turns),
            "torch_error": errors[0], "onednn_error": errors[1],
        })  # fmt: skip
    return rows


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object, and nothing else")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512, 1024, 2048])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    rows = [row for width in given.widths for row in measure(given.tokens, width)]
    if given.json:
        print(json.dumps({"least_multiplications": least_multiplications(), "rows": rows}, indent=1))
        return
    columns = ("width", "part", "torch, GFLOP/s", "oneDNN", "oneDNN over torch", "errors", "worth it")
    least = least_multiplications()
    taken = f"oneDNN's products of at least {least / 1e6:.0f} million multiplications" if least else "torch's products"
    shown = Table(*columns, title=f"compiled functions take {taken} here")
    for row in rows:
        errors = f"{row['torch_error']:.1e}, {row['onednn_error']:.1e}"
        shown.add_row(
            str(row["width"]), str(row["part"]), f"{row['torch_gflops']:.0f}", f"{row['onednn_gflops']:.0f}",
            f"{row['onednn_over_torch']:.2f}", errors, "yes" if row["worth_it"] else "no",
        )  # fmt: skip
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(shown)


if __name__ == "__main__":
    main()
