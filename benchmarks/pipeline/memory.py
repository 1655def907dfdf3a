"""The memory part: what two ranks hold at their fullest, beside what the plan says (benchmarks.pipeline.memory_worker).

    measure(runs, progress) -> [Held]

Each run is a schedule and a choice of recomputation. *system* has what the process takes besides tensors, which the
hardware profile calls `reserved`; *allocator* is of tensors alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipeline.real import together, torchrun
from csc.analysis.hardware import hardware

RUNS = (("1f1b", "none"), ("auto", "full"), ("zb-h1", "none"))
# glibc gives back at once what is freed: what is resident is what is held.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Held:
    """Bytes of one rank of a run."""

    run: str
    rank: int
    predicted: float
    reserved: float
    system: float
    allocator: float

    @property
    def errors(self) -> tuple[float, float]:
        """What the system and the allocator saw over what was predicted, minus 1."""
        return self.system / (self.predicted + self.reserved) - 1, self.allocator / self.predicted - 1


def measure(runs: int, progress: Callable[[str, int, int], None]) -> list[Held]:
    """The first of RUNS. CscError if a command fails."""
    from safetensors.torch import save_file

    from benchmarks.pipeline.real_model import build

    reserved = hardware("cpu").reserved
    found: list[Held] = []
    with tempfile.TemporaryDirectory() as name:
        weights = Path(name, "weights.safetensors")
        save_file({name: one.detach().clone() for name, one in build().named_parameters()}, weights)
        for number, (schedule, recompute) in enumerate(RUNS[:runs]):
            worker = "benchmarks.pipeline.memory_worker"
            together([torchrun("-m", worker, str(weights), schedule, recompute, name)], RETURNED)
            for path in sorted(Path(name).glob("[01].json")):
                row = json.loads(path.read_text())
                found.append(Held(f"{schedule}, recompute {recompute}", reserved=reserved, **row))
            progress("looking at memory", number + 1, runs)
    return found


def largest(found: Sequence[Held]) -> float | None:
    """The largest error of any rank, as system or allocator saw it; None of nothing."""
    return max((abs(error) for one in found for error in one.errors), default=None)


if __name__ == "__main__":
    for one in measure(len(RUNS), lambda *_: None):
        print(one, one.errors, file=sys.stderr)
