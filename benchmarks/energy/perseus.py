"""The 16 published cells of Perseus (arXiv 2312.06902): two models, two devices, four numbers of microbatches.

Terms: eight stages under 1F1B whose messages take no time, as Perseus emulates them. The *usual* step is at the highest
clock. Perseus' times are rounded to its unit, so its fastest points are a little shorter than any choice of measured
clocks; they are compared with the fastest measured step, and multiples of the one with the same multiples of the other.

    CELLS        cell(name) -> EnergyProblem        published(name) -> [(seconds, joules)]
    measured_cell(name) -> CellRow
"""

from __future__ import annotations

import csv
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from csc.analysis.clocks import ClockCurve, Setting, measured
from csc.planning.energy.frontier import EnergyProblem, frontier, point
from csc.planning.schedules import SCHEDULES
from csc.simulation.pipeline import Pipeline, StageWork

DATA = Path(__file__).parent / "data"
STAGES = 8
WAITING = {"a100_sxm": 83.64, "a40": 70.38}  # watts
FACTORS = (1.0, 1.02, 1.05, 1.10)


class Cell(NamedTuple):
    """One published frontier."""

    model: str
    device: str
    microbatches: int


CELLS = tuple(Cell(m, d, n) for m in ("gpt3-175b", "bloom") for d in WAITING for n in (12, 24, 48, 96))
QUICK = tuple(cell for cell in CELLS if cell.microbatches in (12, 96))


@dataclass(frozen=True)
class FactorRow:
    """At so many times the fastest step. saved: joules, as a share of the usual step's; possible: what no clocks save;
    perseus: what its published point of this multiple of its own fastest saves. over_promised: simulated seconds over
    those that were asked for.
    """

    factor: float
    saved: float
    possible: float
    perseus: float
    over_promised: float
    changes: int

    @property
    def ahead(self) -> bool:
        return self.saved > self.perseus

    @property
    def below_bound(self) -> float:
        """Percentage points."""
        return 100 * (self.possible - self.saved)


@dataclass(frozen=True)
class CellRow:
    """frontier_seconds: CPU seconds of the whole frontier (`points` points), the graph included; point_seconds: of the
    point at the fastest step.
    """

    cell: Cell
    rows: tuple[FactorRow, ...]
    points: int
    frontier_seconds: float
    point_seconds: float
    worst_promise: float
    worst_below_bound: float

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ahead": row.ahead, "below_bound": row.below_bound} for row in self.rows]
        return {**asdict(self), "cell": list(self.cell), "rows": rows}


@cache
def curves(model: str, device: str) -> dict[tuple[int, str], ClockCurve]:
    """By stage and instruction (forward, backward)."""
    found: dict[tuple[int, str], list[Setting]] = {}
    with (DATA / "profiles.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["model"], row["device"]) == (model, device):
                key = (int(row["stage"]), row["instruction"])
                setting = Setting(int(row["mhz"]), float(row["seconds"]), float(row["joules"]))
                found.setdefault(key, []).append(setting)
    return {key: measured(settings, f"{model} on {device}, stage {key[0]}") for key, settings in found.items()}


def published(cell: Cell) -> list[tuple[float, float]]:
    """Seconds and joules of Perseus' own frontier, the fastest first."""
    with (DATA / "frontiers.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == cell.model and row["device"] == cell.device]
    chosen = [row for row in rows if int(row["microbatches"]) == cell.microbatches]
    return sorted((float(row["seconds"]), float(row["joules"])) for row in chosen)


def problem_of(cell: Cell) -> EnergyProblem:
    """The cell's step."""
    known = curves(cell.model, cell.device)
    stages = tuple(
        StageWork(known[s, "forward"].highest.seconds, known[s, "backward"].highest.seconds) for s in range(STAGES)
    )
    messages = {("F", s, s + 1): 0.0 for s in range(STAGES - 1)} | {("B", s + 1, s): 0.0 for s in range(STAGES - 1)}
    pipeline = Pipeline(stages, messages)
    schedule = SCHEDULES["1f1b"](pipeline, list(range(STAGES)), cell.microbatches)
    listed = tuple(
        tuple(
            known[action.stage, "forward" if action.kind == "F" else "backward"]
            for action in actions
            if action.computes
        )
        for actions in schedule.ranks
    )
    return EnergyProblem(pipeline, schedule, listed, (WAITING[cell.device],) * STAGES)


def measured_cell(cell: Cell) -> CellRow:
    """csc's points beside the published ones."""
    theirs = published(cell)
    began = time.process_time()
    problem = problem_of(cell)
    found = frontier(problem)
    frontier_seconds = time.process_time() - began
    usual, fastest = problem.usual, problem.fastest.seconds
    rows, point_seconds = [], 0.0
    for factor in FACTORS:
        began = time.process_time()
        own = point(problem, fastest * factor)
        point_seconds = point_seconds or time.process_time() - began
        least = min(joules for seconds, joules in theirs if seconds <= theirs[0][0] * factor * (1 + 1e-9))
        rows.append(
            FactorRow(
                factor, 1 - own.joules / usual.joules, 1 - own.bound / usual.joules, 1 - least / usual.joules,
                own.seconds / (fastest * factor), sum(own.changes),
            )
        )  # fmt: skip
    every = found.points
    return CellRow(
        cell, tuple(rows), len(every), frontier_seconds, point_seconds,
        max([each.seconds / each.promised for each in every] + [row.over_promised for row in rows]),
        max([100 * (each.joules - each.bound) / usual.joules for each in every] + [row.below_bound for row in rows]),
    )  # fmt: skip
