"""python -m benchmarks.energy: see benchmarks.energy and docs/energy.md."""

from __future__ import annotations

import argparse
import json
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energy", description="Benchmark csc's clocks.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="half of the cells, two plans, lowtime for two minutes")
    parser.add_argument("--no-lowtime", action="store_true", help="without lowtime, which takes minutes")
    parser.add_argument("--no-plans", action="store_true", help="without plans of multimodal LLMs")
    parser.add_argument("--no-cells", action="store_true", help="without the published cells")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks.energy import perseus, plans, rival
    from benchmarks.energy.summary import document

    def tell(what: str) -> None:
        print(f"energy: {what}", file=sys.stderr, flush=True)

    cells = []
    for cell in () if given.no_cells else perseus.QUICK if given.quick else perseus.CELLS:
        tell(f"{cell.model} on {cell.device}, {cell.microbatches} microbatches")
        cells.append(perseus.measured_cell(cell))
    rivals = []
    for cell in () if given.no_lowtime else [each for each in perseus.CELLS if each.microbatches == 12]:
        tell(f"lowtime: {cell.model} on {cell.device}, {cell.microbatches} microbatches")
        row = rival.run(cell, 120.0 if given.quick else 1200.0)
        rivals += [] if row is None else [row]
    planned = [] if given.no_plans else plans.run(plans.QUICK if given.quick else plans.CASES, tell)
    found = document(cells, rivals, planned)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for each in cells:
        for row in each.rows:
            print(
                f"{each.cell.model:10} {each.cell.device:9} {each.cell.microbatches:3} microbatches, "
                f"{row.factor:.2f} times the fastest: saved {row.saved:.2%}, Perseus {row.perseus:.2%}, "
                f"no clocks {row.possible:.2%}"
            )
    for each in rivals:
        print(
            f"lowtime, {each.cell.model} {each.cell.device}: {each.lowtime_seconds:.0f} s of CPU, csc "
            f"{each.csc_seconds:.2f} s; csc ahead of {each.ahead} of {each.plans} replayed plans, by "
            f"{each.gained:.2f} points on average"
        )
    for each in planned:
        print(
            f"{each.configuration}, {each.frozen}: 1F1B saves {each.own.same_time:.2%} at its time, "
            f"{each.best.schedule} {each.best.saved or 0:.2%} in the same time and memory"
        )
    for name, value in found["summary"].items():
        print(f"{name}: {value if not isinstance(value, float) else format(value, '.4g')}")


if __name__ == "__main__":
    main()
