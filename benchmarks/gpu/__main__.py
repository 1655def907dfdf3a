"""All that runs on a machine with a GPU: tests, kernels, NCCL, gradients, step times, memory; one report.

    python -m benchmarks.gpu [--output build/gpu] [--only step attention] [--again] [--jobs 8]

Each piece is a process of its own, stopped after its minutes. What went well is not run again on the same device and
torch (--again: all of it), so an interrupted run goes on where it ended. With --jobs pieces that take no times run side
by side; the others come after them, each alone. Without a GPU the pieces are listed. Exit code 1 if a piece failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

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
    parser.add_argument("--jobs", type=int, default=1, help="pieces side by side, of those that take no times")
    arguments = parser.parse_args()
    chosen = [piece for piece in PIECES if arguments.only is None or piece.name in arguments.only]
    device = devices.default()
    if device.type == "cpu":
        console.print("There is no GPU here. On a machine with one these pieces run:")
        console.print(listed(chosen))
        return
    title, count = devices.title(device), devices.count(device)
    done = outcomes(arguments.output, title)
    kept = set() if arguments.again else {name for name, one in done.items() if one.is_good}
    asked = [piece for piece in chosen if piece.devices <= count and piece.name not in kept]

    def write() -> None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "report.md").write_text(report(PIECES, done, title, count))

    def one(piece: Piece, given_up: Event) -> None:
        console.print(f"{piece.name} ({piece.shows}), {piece.minutes:g} minutes at most")
        done[piece.name] = run(piece, arguments.output, title, given_up)
        console.print(f"  {piece.name}: {done[piece.name].verdict}, {done[piece.name].seconds:.0f} s")
        write()

    side_by_side(one, [piece for piece in asked if not piece.takes_times], arguments.jobs)
    side_by_side(one, [piece for piece in asked if piece.takes_times], 1)
    write()
    failed = [piece.name for piece in chosen if piece.name in done and not done[piece.name].is_good]
    console.print(f"wrote {arguments.output / 'report.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


def side_by_side(work: Callable[[Piece, Event], None], pieces: Sequence[Piece], jobs: int) -> None:
    """All of them, so many at once. Who interrupts it gives up those that run, and no other begins."""
    given_up = Event()
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(work, piece, given_up) for piece in pieces]
        try:
            for one in running:
                one.result()
        except BaseException:
            given_up.set()
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
