"""All that runs on a machine with a GPU: tests, kernels, NCCL, gradients, step times, memory; one report.

    python -m benchmarks.gpu [--output build/gpu] [--only step attention] [--again]

Each piece is a process of its own, stopped after its minutes. What went well is not run again on the same device and
torch (--again: all of it), so an interrupted run goes on where it ended. Without a GPU the pieces are listed. Exit
code 1 if a piece failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.pieces import PIECES, Piece
from benchmarks.gpu.report import report
from benchmarks.gpu.running import outcomes, run
from csc import devices

console = Console(width=140)


def listed(pieces: list[Piece]) -> Table:
    """What would be run."""
    table = Table("piece", "shows", "GPUs", "minutes at most")
    for piece in pieces:
        table.add_row(piece.name, piece.shows, str(piece.devices), f"{piece.minutes:g}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="outcomes and report.md")
    parser.add_argument("--only", nargs="*", metavar="PIECE", choices=[piece.name for piece in PIECES])
    parser.add_argument("--again", action="store_true", help="also what went well before")
    arguments = parser.parse_args()
    chosen = [piece for piece in PIECES if arguments.only is None or piece.name in arguments.only]
    device = devices.default()
    if device.type == "cpu":
        console.print("There is no GPU here. On a machine with one these pieces run:")
        console.print(listed(chosen))
        return
    title, count = devices.title(device), devices.count(device)
    done = outcomes(arguments.output, title)
    for number, piece in enumerate(chosen, 1):
        before = done.get(piece.name)
        if piece.devices > count or (before is not None and before.is_good and not arguments.again):
            continue
        console.print(f"{number} of {len(chosen)}: {piece.name} ({piece.shows}), {piece.minutes:g} minutes at most")
        done[piece.name] = run(piece, arguments.output, title)
        (arguments.output / "report.md").write_text(report(PIECES, done, title, count))
        console.print(f"  {done[piece.name].verdict}, {done[piece.name].seconds:.0f} s")
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "report.md").write_text(report(PIECES, done, title, count))
    failed = [piece.name for piece in chosen if piece.name in done and not done[piece.name].is_good]
    console.print(f"wrote {arguments.output / 'report.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
