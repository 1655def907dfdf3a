"""python -m benchmarks.compile_time: see benchmarks.compile_time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from csc import cores

RIVALS = ("torch.export", "aot_export_joint", "torch.compile aot_eager", "torch pipelining")
CSC, SEARCHED = "csc", "auto"
WHOLE, DEPTHS, RANKS = 80, (2, 8, 20, 40, 80), (1, 16, 128, 1024)
WIDTH = 150


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description="Time compilations.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="2 and 4 layers, up to 16 ranks")
    parser.add_argument("--limit", type=int, default=600, help="seconds after which a rival is stopped")
    arguments = parser.parse_args()
    depths, ranks = ((2, 4), (1, 16)) if arguments.quick else (DEPTHS, RANKS)
    rows = run(depths, ranks, arguments.limit)
    if arguments.json:
        print(json.dumps({"rows": rows, "summary": summary(rows)}, indent=1))
        return
    console = Console()
    for table in tables(rows):
        (console if console.is_terminal else Console(width=WIDTH)).print(table)
    print(json.dumps(summary(rows), indent=1))


def run(
    depths: tuple[int, ...], ranks: tuple[int, ...], limit: int, rivals: tuple[str, ...] = RIVALS
) -> list[dict[str, Any]]:
    """A row for csc and each rival at every depth; for csc at the largest depth over ever more ranks, and with a plan
    whose order of work is searched.
    """
    wanted = [(name, layers, max(ranks), "1f1b") for layers in depths for name in (CSC, *rivals)]
    wanted += [(CSC, max(depths), count, "1f1b") for count in ranks if count != max(ranks)]
    wanted.append((CSC, max(depths), max(ranks), SEARCHED))
    rows = []
    for number, (name, layers, count, schedule) in enumerate(wanted, 1):
        print(f"{number}/{len(wanted)} {name}, {layers} layers, {count} ranks, {schedule}", file=sys.stderr)
        found = _measured(name, layers, count, schedule, limit)
        rows.append({"name": name, "layers": layers, "ranks": count, "schedule": schedule, **found})
    return rows


def _measured(name: str, layers: int, ranks: int, schedule: str, limit: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.compile_time.measure", name, str(layers), str(ranks), schedule]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=cores.environment())
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit} s"}
    if ended.returncode:
        return {"failed": (ended.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The figures of the whole 70B over 1,024 ranks; None for what was not measured."""
    whole = [row for row in rows if row["layers"] == WHOLE and row["ranks"] == max(RANKS)]
    named = {row["name"]: row for row in whole if row["schedule"] != SEARCHED}
    own, rival = named.get(CSC, {}), named.get("torch.export", {})
    searched = next((row for row in whole if row["schedule"] == SEARCHED), {})
    ratio = own["seconds"] / rival["seconds"] if "seconds" in own and "seconds" in rival else None
    return {
        "seconds_70b": own.get("seconds"),
        "seconds_70b_over_torch_export": ratio,
        "seconds_after_capture_70b": own.get("after"),
        "rss_gb_70b": own.get("rss_gb"),
        "refreeze_seconds_70b": own.get("refreeze"),
        "emit_1024_ranks_seconds": own.get("emit"),
        "plan_seconds_70b": own.get("plan"),
        "plan_auto_seconds_70b": searched.get("plan"),
    }


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Against depth, all names; against ranks, csc by parts."""
    most = max(row["ranks"] for row in rows)
    depth = Table("layers", "name", "seconds", "over torch.export", "peak GB", title=f"by depth (csc: {most} ranks)")
    exports = {row["layers"]: row.get("seconds") for row in rows if row["name"] == "torch.export"}
    for row in (row for row in rows if row["ranks"] == most and row["schedule"] != SEARCHED):
        export = exports.get(row["layers"])
        ratio = f"{row['seconds'] / export:.2f}" if export and "seconds" in row else "-"
        depth.add_row(str(row["layers"]), row["name"], _seconds(row), ratio, f"{row.get('rss_gb', float('nan')):.2f}")
    parts = Table(
        "layers", "ranks", "schedule", "capture", "after it", "of which plan", "emission", "refreeze", "lines a rank",
        "MB of code",
        title="csc by parts, seconds",
    )  # fmt: skip
    for row in (row for row in rows if row["name"] == CSC and "seconds" in row):
        parts.add_row(
            str(row["layers"]), str(row["ranks"]), row["schedule"],
            *(f"{row[part]:.2f}" for part in ("capture", "after", "plan", "emit", "refreeze")),
            str(row["lines"]), f"{row['bytes'] / 1e6:.1f}",
        )  # fmt: skip
    return [depth, parts]


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.1f}" if "seconds" in row else f"failed: {row['failed']}"


if __name__ == "__main__":
    main()
