"""Steps of a real model on two ranks that compute, balanced and at random: predicted beside measured seconds.

    measured(names, steps, repeats, budget, progress) -> [RealStep]

F, B and W are profiled first, at the sizes that csc.balanced fits its costs to, by two processes at once with one
thread each, as the ranks of a step are. A step's samples are divided by csc and at random, and both divisions run in
turns on the same two processes (gloo). Seconds run from the first action's start to the last one's end. Other work on
the machine only adds: of the turns the shortest counts. Beside it stands the step whose actions each take what they
took of the processor, which other work holds up less (undisturbed).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipeline.real import together, torchrun

SETS = ("AI2D", "mixture", "tail")


@dataclass(frozen=True)
class RealStep:
    """runs: seconds of each time that the step was made in this way. undisturbed: if each action had taken the
    processor's time alone.
    """

    lengths: str
    step: int
    way: str
    predicted: float
    runs: tuple[float, ...]
    undisturbed: float

    @property
    def measured(self) -> float:
        return min(self.runs)

    @property
    def error(self) -> float:
        """Of the undisturbed step, relative to what was predicted."""
        return self.undisturbed / self.predicted - 1


def measured(
    names: Sequence[str], steps: int, repeats: int, budget: float, progress: Callable[[str], None]
) -> list[RealStep]:
    """Of each set so many steps in both ways. budget: seconds for a profile. CscError if a process fails."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            progress(f"profiling, {name}")
            tables = [f"{folder}/{name}{core}.toml" for core in range(2)]
            model = [sys.executable, "-m", "benchmarks.balance.real_model"]
            together([[*model, name, table, str(budget)] for table in tables])
            progress(f"computing, {name}")
            result = Path(folder, f"{name}.json")
            worker = ("-m", "benchmarks.balance.real_worker", name, tables[0], str(steps), str(repeats), str(result))
            together([torchrun(*worker)])
            found += [RealStep(**{**row, "runs": tuple(row["runs"])}) for row in json.loads(result.read_text())]
    return found


def gains(steps: Sequence[RealStep]) -> list[tuple[float, float, float]]:
    """Random over balanced of each step: predicted, undisturbed, measured."""
    of = {(one.lengths, one.step, one.way): one for one in steps}
    pairs = [(of[*key, "random"], of[*key, "csc"]) for key in dict.fromkeys((one.lengths, one.step) for one in steps)]
    return [
        (other.predicted / own.predicted, other.undisturbed / own.undisturbed, other.measured / own.measured)
        for other, own in pairs
    ]


def figures(steps: Sequence[RealStep]) -> dict[str, float]:
    """For the summary: the largest error, and the gain over random microbatches."""
    if not steps:
        return {}
    predicted, undisturbed, seen = (statistics.geometric_mean(side) for side in zip(*gains(steps)))
    return {
        "real_error_max": max(abs(one.error) for one in steps),
        "real_error_mean": statistics.fmean(abs(one.error) for one in steps),
        "real_speedup_over_random_geomean": seen,
        "real_speedup_over_random_undisturbed": undisturbed,
        "real_speedup_over_random_predicted": predicted,
    }
