"""How long a plan takes where it is large: 80 layers and three frozen encoders on 64 ranks, 256 microbatches.

problem(layers, encoders, ranks, microbatches) -> Problem       round numbers: what matters is how much there is
plan_seconds() -> seconds of processor time for one plan
python -m benchmarks.pipeline.large        these and larger ones, with their bounds
"""

from __future__ import annotations

import time

from csc.planning.plan import plan
from csc.planning.problem import Problem, Unit, Value
from csc.simulation.pipeline import Link, Network

SIZES: tuple[tuple[int, tuple[int, ...], int, int], ...] = (
    (80, (32, 24, 40), 64, 256), (160, (50, 40, 60), 128, 512), (400, (100, 80, 60), 512, 1024),
)  # fmt: skip
NETWORK = Network(Link(5e-6, 300e9), Link(1e-5, 25e9), 8)


def problem(
    layers: int = 80, encoders: tuple[int, ...] = (32, 24, 40), ranks: int = 64, microbatches: int = 256
) -> Problem:
    """Encoders beside each other, each with a trained projector, ahead of a trained language model."""
    units: list[Unit] = []
    values: list[Value] = []

    def add(component: str, seconds: float, trained: bool, reads: list[int]) -> int:
        back = seconds if trained else 0.0
        units.append(Unit(f"{component} {len(units)}", component, seconds, back, back, trained, trained, 1e8, 4e8, 1e9))
        values.extend(Value(maker, (len(units) - 1,), (units[maker].has_b,), 3e7, 3e7) for maker in reads)
        return len(units) - 1

    features = []
    for number, depth in enumerate(encoders):
        reads: list[int] = []
        for _ in range(depth):
            reads = [add(f"encoder {number}", 0.004 + 0.002 * number, False, reads)]
        features.append(add(f"projector {number}", 0.001, True, reads))
    last = add("llm", 0.001, True, features)
    for seconds in [0.010] * layers + [0.012]:
        last = add("llm", seconds, True, [last])
    return Problem(tuple(units), tuple(values), ranks, microbatches, None, NETWORK)


def plan_seconds() -> float:
    """Of one thread, whatever else runs beside it."""
    whole = problem()
    start = time.process_time()
    plan(whole)
    return time.process_time() - start


def main() -> None:
    """Each row as soon as it is there."""
    print("layers + encoders, ranks x microbatches: seconds of processor time, of the step, of its lower bound")
    for layers, encoders, ranks, microbatches in SIZES:
        whole = problem(layers, encoders, ranks, microbatches)
        start = time.process_time()
        found = plan(whole)
        seconds = time.process_time() - start
        row = f"{layers} + {', '.join(map(str, encoders))}, {ranks} x {microbatches:,}: {seconds:.1f}"
        print(f"{row}, {found.makespan:.2f}, {found.makespan / (1 + found.gap):.2f}", flush=True)


if __name__ == "__main__":
    main()
