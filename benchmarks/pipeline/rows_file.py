"""Rows of the simulated part in a file, one JSON object a line: a run of hours goes on where the last one ended.

    append(path, row)               as soon as the row is there
    read(path) -> {Case: Row}       {} without the file; without the stages of baselines, which are long

A line that was cut off by the end of a run is not a row: its case is evaluated again.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pipeline.baselines import Baseline
from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.simulated import Pair, Planned, Row


def append(path: Path, row: Row) -> None:
    """The row as the last line of the file."""
    with path.open("a") as file:
        print(json.dumps(without_stages(row)), file=file, flush=True)


def read(path: Path) -> dict[Case, Row]:
    """The rows of the file by their cases."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = _row(json.loads(line))
        except json.JSONDecodeError:
            continue
        found[row.case] = row
    return found


def without_stages(row: Row) -> dict[str, Any]:
    """A row as JSON has it, without the stages of baselines."""
    found = asdict(row)
    for pair in found["pairs"]:
        del pair["baseline"]["stages"]
    return found


def _row(stored: dict[str, Any]) -> Row:
    pairs = (
        Pair(Baseline(**{**each["baseline"], "wrong": tuple(each["baseline"]["wrong"])}), each["speedup"], each["fits"])
        for each in stored["pairs"]
    )
    plans = {name: Planned(**each) for name, each in stored["plans"].items()}
    return Row(
        **{
            **stored,
            "case": Case(**stored["case"]),
            "plans": plans,
            "pairs": tuple(pairs),
            "not_fitting": tuple(stored["not_fitting"]),
        }
    )
