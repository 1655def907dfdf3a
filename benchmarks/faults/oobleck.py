"""Oobleck's traces of failures, replayed with its own samples/s and what a recovery of csc loses.

Terms
  cell      a model on a trace: in five of these a node of 30 fails each so often, two are of spot instances
  ideal     average samples/s of the node counts alone: nothing is lost when they change
  recovery  seconds without work each time that nodes go or come

    cells(recovery, quick) -> [TraceCell]

When nodes go, the step in flight is finished: gradients of finished microbatches are kept, and one microbatch of one
replica is computed again. A replica is taken to have a fifth of a job's nodes, a microbatch MICROBATCH samples. When
nodes come, they join behind a step: the recovery is paid, and nothing again. Oobleck's figures are those of its
simulator on the same traces.
"""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
FREQUENT, SPOT = ("6h", "3h", "1h", "30m", "10m"), ("spot_gcp", "spot_p3")
REPLICAS = 5
MICROBATCH = 2  # samples
PUBLISHED = {  # average samples/s of Oobleck by trace
    "BERT-large": {"6h": 287.1, "1h": 286.3, "30m": 285.2, "10m": 282.1, "spot_gcp": 244, "spot_p3": 221},
    "GPT-2": {"6h": 85.6, "1h": 85.4, "30m": 85.2, "10m": 84.8, "spot_gcp": 73.1, "spot_p3": 66.8},
    "GPT-3-medium": {"6h": 29.3, "1h": 29.2, "30m": 29.1, "10m": 28.7},
    "GPT-3-2.7B": {"6h": 7.29, "1h": 7.23, "30m": 7.18, "10m": 6.89, "spot_gcp": 6.13, "spot_p3": 5.42},
    "GPT-3-6.7B": {"6h": 4.33, "1h": 4.22, "30m": 4.11, "10m": 3.55, "spot_gcp": 2.92, "spot_p3": 2.68},
}


@dataclass(frozen=True)
class TraceCell:
    """Average samples/s. steady: if ranks to spare are left idle where more nodes are slower in Oobleck's table."""

    model: str
    trace: str
    changes: int
    ideal: float
    csc: float
    steady: float
    oobleck: float | None

    @property
    def over_ideal(self) -> float:
        return self.csc / self.ideal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"over_ideal": self.over_ideal}


def cells(recovery: float, quick: bool = False) -> list[TraceCell]:
    """All 35; quick: the 10 minutes' trace and the spot ones."""
    table, batch = _throughput()
    traces = ("10m", *SPOT) if quick else FREQUENT + SPOT
    return [_cell(model, trace, table[model], batch[model], recovery) for trace in traces for model in table]


def _throughput() -> tuple[dict[str, dict[int, float]], dict[str, int]]:
    table: dict[str, dict[int, float]] = {}
    batch: dict[str, int] = {}
    with (DATA / "samples_per_second.csv").open() as file:
        for row in csv.DictReader(file):
            table.setdefault(row["model"], {})[int(row["nodes"])] = float(row["samples_per_second"])
            batch[row["model"]] = int(row["batch"])
    return table, batch


def counts(trace: str) -> list[tuple[float, int, int]]:
    """(seconds, nodes from then on, nodes that went) at each change; the first is the job's start."""
    events: dict[float, list[int]] = {}
    for line in (DATA / f"trace_{trace}.csv").read_text().split():
        milliseconds, kind, _ = line.split(",")
        events.setdefault(int(milliseconds) / 1000, [0, 0])[kind == "remove"] += 1
    found, nodes = [], 0
    for at, (came, went) in sorted(events.items()):
        nodes += came - went
        found.append((at, nodes, went))
    return found


def _cell(model: str, trace: str, table: dict[int, float], batch: int, recovery: float) -> TraceCell:
    listed = counts(trace)
    start, end = listed[0][0], listed[-1][0]
    best = {n: max(rate for m, rate in table.items() if m <= n) for n in table}
    ideal = csc = steady = 0.0
    for number, ((at, nodes, went), (until, _, _)) in enumerate(pairwise(listed)):
        ideal += table[nodes] * (until - at)
        for rates in (table, best):
            lost = 0.0
            if number:  # the job's start is no change
                lost = recovery
                if went and rates[nodes]:
                    lost += REPLICAS * MICROBATCH / rates[nodes]  # one microbatch of one of the replicas, at its pace
            done = rates[nodes] * max(0.0, until - at - lost)
            if rates is table:
                csc += done
            else:
                steady += done
    span = end - start
    known = PUBLISHED[model].get(trace)
    return TraceCell(model, trace, len(listed) - 2, ideal / span, csc / span, steady / span, known)
