"""python -m benchmarks.faults: see benchmarks.faults and docs/survive.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

AIMS = {
    "coverage_cases": 13_314,
    "oobleck_cells_over_ideal_min": 0.99,
    "step_after_loss_over_ideal": 1.03,
    "throughput_after_over_fresh_plan": 0.97,
    "plan_seconds_64x48": 10.0,
    "jitter_j3_over_readiness_equal_memory_min": 0.98,
    "j0_to_j3_slowdown": 0.08,
    "faults_tried": 300,
    "lost_steps": 0,
    "wrong_losses": 0,
    "hangs": 0,
    "microbatches_repeated_max": 1,
    "detect_seconds_p95": 0.5,
    "recover_seconds_p95": 3.0,
    "frozen_without_a_sentence": 0,
}
PARTS = ("processes", "simulated", "jitter", "rrfp")  # the first one forks, before there are threads
RECOVERY = 3.0  # seconds from a loss until all ranks work again


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description="Benchmark failures and jitter.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="fewer cells of each kind")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument(
        "--recovery", type=float, default=RECOVERY, help="seconds from a loss until all work again (default: 3)"
    )
    parser.add_argument("--faults", type=int, help="how many ranks are killed (default: 300, with --quick 40)")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    faults = given.faults or (40 if given.quick else 300)

    def tell(what: str) -> None:
        print(f"faults: {what}", file=sys.stderr, flush=True)

    found = document(given.part or PARTS, given.quick, given.recovery, tell, faults)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for part, rows in found["rows"].items():
        for row in rows:
            text = ", ".join(f"{name} {_text(value)}" for name, value in row.items())
            print(f"{part}: {text}")
    for name, value in found["summary"].items():
        aim = f"   (aim {AIMS[name]:g})" if name in AIMS else ""
        print(f"{name}: {_text(value)}{aim}")


def document(
    parts: Sequence[str], quick: bool, recovery: float, tell: Callable[[str], None], faults: int
) -> dict[str, Any]:
    """`summary`, the aims beside it, and every row. What was not run is not there."""
    summary: dict[str, Any] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    if "processes" in parts:
        killed(faults, quick, tell, summary, rows)
    if "simulated" in parts:
        simulated(quick, recovery, tell, summary, rows)
    if "jitter" in parts:
        jitter(quick, tell, summary, rows)
    if "rrfp" in parts:
        rrfp(quick, tell, summary, rows)
    return {"summary": summary, "aims": AIMS, "recovery": recovery, "rows": rows}


def killed(
    faults: int,
    quick: bool,
    tell: Callable[[str], None],
    summary: dict[str, Any],
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    """Real processes."""
    from benchmarks.faults import processes

    found = processes.measured(faults, 2 if quick else 6, processes.SETTINGS, tell)
    rows["processes"] = [{"not survived": text} for text in found.pop("failed")]
    summary.update(found)
    prices = processes.price_of_copies()
    summary["copies_bytes_a_microbatch"], summary["copies_slowdown"] = prices


def simulated(
    quick: bool, recovery: float, tell: Callable[[str], None], summary: dict[str, Any],
    rows: dict[str, list[dict[str, Any]]],
) -> None:  # fmt: skip
    """Coverage, Oobleck's traces, and losses in simulated jobs."""
    from benchmarks.faults import losses, oobleck

    tell("coverage")
    good, cases = losses.coverage()
    summary["coverage_cases"] = good
    summary["coverage_cases_of"] = cases
    summary["plan_seconds_16x12" if quick else "plan_seconds_64x48"] = losses.plan_seconds(quick)
    cells = oobleck.cells(recovery, quick)
    summary["oobleck_cells"] = len(cells)
    summary["oobleck_cells_over_ideal_min"] = min(cell.over_ideal for cell in cells)
    frequent = [cell.over_ideal for cell in cells if cell.trace in oobleck.FREQUENT]
    summary["oobleck_frequent_over_ideal_min"] = min(frequent)
    summary["oobleck_spare_over_ideal_min"] = min(cell.steady / cell.ideal for cell in cells)
    summary["oobleck_own_over_ideal_min"] = min(cell.oobleck / cell.ideal for cell in cells if cell.oobleck)
    rows["oobleck"] = [cell.as_dict() for cell in cells]
    tell("lost ranks whose work is rerouted")
    lost = losses.rerouted_steps(quick)
    summary["step_after_loss_over_ideal"] = max(cell.after / cell.ideal for cell in lost if cell.fits)
    rows["rerouted"] = [cell.as_dict() for cell in lost]
    tell("ways back")
    ways = losses.ways(quick)
    summary["throughput_after_over_fresh_plan"] = min(cell.over_fresh for cell in ways)
    summary["ways_chosen"] = {
        kind: sum(cell.chosen == kind for cell in ways) for kind in sorted({c.chosen for c in ways})
    }
    rows["ways"] = [cell.as_dict() for cell in ways]


def jitter(
    quick: bool, tell: Callable[[str], None], summary: dict[str, Any], rows: dict[str, list[dict[str, Any]]]
) -> None:  # fmt: skip
    """csc's orders against readiness, and what jitter costs them."""
    from benchmarks.faults import rrfp as cases

    tell("orders against readiness")
    cells = cases.readiness_cells(quick)
    busy = [cell for cell in cells if cell.level == "J3"]
    summary["jitter_j3_over_readiness_equal_memory_min"] = min(cell.readiness / cell.csc for cell in busy)
    summary["jitter_j3_over_readiness_w_apart_min"] = min(cell.apart / cell.csc for cell in busy)
    rows["readiness"] = [cell.as_dict() for cell in cells]
    tell("from J0 to J3")
    slower = cases.slowdowns(quick)
    worst = [cell for cell in slower if cell.level == "J3" and cell.delays == "messages"]
    summary["j0_to_j3_slowdown"] = worst[0].slowdown
    summary["j0_to_j3_slowdown_1f1b"] = worst[1].slowdown
    rows["slowdowns"] = [cell.as_dict() for cell in slower]


def rrfp(
    quick: bool, tell: Callable[[str], None], summary: dict[str, Any], rows: dict[str, list[dict[str, Any]]]
) -> None:  # fmt: skip
    """RRFP's configurations."""
    from benchmarks.faults import rrfp as cases

    listed = []
    for cell in cases.cells(quick):
        tell(f"{cell.model} {cell.mesh} {cell.level}")
        listed.append(cell)
    rows["rrfp"] = [cell.as_dict() for cell in listed]
    summary["rrfp_cells"] = {
        f"{cell.model} {cell.mesh} {cell.level}": {
            **{f"csc {times} ({cell.held[times]:.2g}x held)": ratio for times, ratio in cell.csc.items()},
            "rrfp": cell.rrfp,
            "rrfp with W": cell.rrfp_w,
        }
        for cell in listed
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_text(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
