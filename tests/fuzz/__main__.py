"""python -m tests.fuzz: random models against eager PyTorch. See --help."""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

from tests.fuzz.campaign import FAILED, read, run
from tests.fuzz.report import report
from tests.fuzz.running import load, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Random models, compiled in random ways and compared with eager PyTorch.",
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the models; the same seed gives the same ones")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="where rows and failures are kept")
    parser.add_argument("--resume", action="store_true", help="go on with the rows in the folder")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--without", default="", help="globs over names of kinds to leave out, with commas between")
    parser.add_argument("--favour", default="", help="globs over names of kinds that every second choice is made of")
    parser.add_argument(
        "--each", action="store_true", help="every kind of layer, loss and use alone, instead of at random"
    )
    parser.add_argument("--report", action="store_true", help="show what the folder has, and run nothing")
    parser.add_argument("--file", type=Path, help="judge this file, and print eager's and csc's numbers")
    given = parser.parse_args()
    if given.file is not None:
        return show(given.file)
    if not given.report:
        if not given.resume:
            for rows in given.folder.glob("rows-*.jsonl"):
                rows.unlink()
        without, favour = ([name for name in text.split(",") if name] for text in (given.without, given.favour))
        jobs = [
            (given.seed, given.seconds, given.folder, without, given.each, job, given.jobs, favour)
            for job in range(given.jobs)
        ]
        processes = [multiprocessing.get_context("spawn").Process(target=run, args=job) for job in jobs[1:]]
        for process in processes:
            process.start()
        run(*jobs[0])
        for process in processes:
            process.join()
    rows = read(given.folder)
    print(report(rows))
    return int(any(row["kind"] in FAILED for row in rows))


def show(path: Path) -> int:
    """Judge a file's settings in this process; 1 if one fails."""
    found = outcomes(path)
    for setting, outcome in zip(load(path).SETTINGS, found):
        print(f"{outcome.kind}: {outcome.reason or 'all gradients'}  ({setting})")
        for name, (eager, csc, difference) in outcome.differences.items():
            print(f"  {name:40} eager {eager:.6g}  csc {csc:.6g}  (norms)  {difference:.2g} apart")
    return int(any(outcome.kind in FAILED for outcome in found))


if __name__ == "__main__":
    raise SystemExit(main())
