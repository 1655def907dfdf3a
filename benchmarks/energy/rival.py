"""`lowtime` (PyPI), Perseus' own solver, beside csc on one cell: its plans replayed with measured clocks.

Terms: lowtime counts durations in whole units, rounded down, and fits a curve to the joules of each kind of action.
What it chooses is a clock for every action; csc's simulator runs those with their measured seconds, as it does its own.

    run(cell, limit) -> RivalRow | None        None: lowtime is not installed, or does not end within `limit` seconds
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.energy.perseus import Cell, problem_of
from csc import cores
from csc.planning.energy.frontier import EnergyProblem, frontier, point

UNIT = 0.001  # second: that of Perseus' artifact
KEPT = 8  # of its plans that are replayed, evenly over its frontier


@dataclass(frozen=True)
class RivalRow:
    """Of one cell. lowtime_seconds, csc_seconds: CPU of the whole frontier. ahead: of how many replayed plans csc has
    fewer joules, in the seconds that the replayed plan takes. gained: percentage points of the usual step's joules, on
    average. over_claimed: the most that a replayed step takes, as a multiple of what lowtime said.
    """

    cell: Cell
    lowtime_seconds: float
    csc_seconds: float
    plans: int
    ahead: int
    gained: float
    over_claimed: float

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cell": list(self.cell), "ratio": self.csc_seconds / self.lowtime_seconds}


def run(cell: Cell, limit: float) -> RivalRow | None:
    """In a process of its own, which is ended after `limit` seconds of wall clock."""
    if find_spec("lowtime") is None:
        return None
    call = [sys.executable, "-m", "benchmarks.energy.rival", json.dumps(list(cell))]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=limit, check=True, env=cores.environment())
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    answer = json.loads(done.stdout.splitlines()[-1])
    began = time.process_time()
    problem = problem_of(cell)
    frontier(problem)
    own_seconds = time.process_time() - began
    plans = [(claimed, *_replayed(problem, clocks)) for claimed, clocks in answer["plans"]]
    usual = problem.usual.joules
    gains = [100 * (joules - point(problem, seconds).joules) / usual for _, seconds, joules in plans]
    return RivalRow(
        cell, answer["seconds"], own_seconds, len(plans), sum(gain > 0 for gain in gains), sum(gains) / len(gains),
        max(seconds / claimed for claimed, seconds, _ in plans),
    )  # fmt: skip


def _replayed(problem: EnergyProblem, clocks: list[int]) -> tuple[float, float]:
    """Simulated seconds and joules of a clock for each compute."""
    settings = [curve.at(clock) for curve, clock in zip(problem.flat, clocks)]
    found = problem.point(settings, 0.0, float("inf"), None)
    return found.seconds, found.joules


def solved(problem: EnergyProblem) -> dict[str, Any]:
    """lowtime's frontier: CPU seconds, and of some of its plans the claimed seconds and the clock of each compute."""
    import networkx as nx
    from lowtime.cost_model import ExponentialModel
    from lowtime.operation import (
        CandidateExecutionOptions,
        DummyOperation,
        ExecutionOption,
        Operation,
        OperationSpec,
    )
    from lowtime.solver import PhillipsDessouky

    began = time.process_time()
    graph, watts = problem.waits, problem.watts[0]
    specs: dict[int, Any] = {}
    for curve in problem.flat:
        if id(curve) not in specs:
            options = CandidateExecutionOptions(
                [ExecutionOption(s.seconds, UNIT, s.joules - watts * s.seconds, s.clock) for s in curve.settings]
            )
            specs[id(curve)] = OperationSpec(options, ExponentialModel(options, search_strategy="best"))
    operations = [Operation(specs[id(curve)]) for curve in problem.flat]
    dag = nx.DiGraph()
    count = len(operations)
    dag.add_node(count, op=DummyOperation())
    dag.add_node(count + 1, op=DummyOperation())
    dag.graph["source_node"], dag.graph["sink_node"] = count, count + 1
    for node, operation in enumerate(operations):
        dag.add_node(node, op=operation)
    dag.add_edges_from((before, after) for before, after, _ in graph.edges)
    for node in range(count):
        if not graph.before[node]:
            dag.add_edge(count, node)
        if not graph.after[node]:
            dag.add_edge(node, count + 1)
    plans = [
        (result.real_time, [operation.assigned_knob for operation in operations])
        for result in PhillipsDessouky(dag).run()
    ]
    seconds = time.process_time() - began
    step = max(1, (len(plans) - 1) // (KEPT - 1))
    return {"seconds": seconds, "iterations": len(plans), "plans": [*plans[::-1][::step]][:KEPT]}


if __name__ == "__main__":
    model, device, microbatches = json.loads(sys.argv[1])
    print(json.dumps(solved(problem_of(Cell(model, device, microbatches)))))
