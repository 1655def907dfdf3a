"""The real part: two ranks that compute, on two cores; the simulator's makespan beside the measured one.

    measure(runs, steps, budget, progress) -> Real

The model's F, B and W are profiled first, by two processes at once with one thread each: they share caches and memory
bandwidth as the ranks of a step do. csc plans from that profile, and torchrun runs the program; the last step of each
run is recorded (`csc.run --timeline`). Seconds run from the first compute's start to the last one's end.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csc import cores
from csc.errors import CscError
from csc.reports.forecast import read
from csc.simulation.timeline import Timeline

LIMIT = 600  # seconds for one command
# glibc would hand freed memory back to the system and take it anew page by page: with several
# microbatches in flight F takes 10 % longer than in the profile, where one is. So it keeps what it once had.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}

Work = dict[str, float]  # "F 0": seconds of all F on rank 0


@dataclass(frozen=True)
class Real:
    """predicted, measured: seconds of a step; measured is the median of `runs`. work: F, B and W by rank. schedule and
    stages: what csc chose, stages as the number of regions in each.
    """

    predicted: float
    measured: float
    runs: tuple[float, ...]
    predicted_work: Work
    measured_work: Work
    schedule: str
    stages: tuple[int, ...]

    @property
    def error(self) -> float:
        """measured / predicted - 1."""
        return self.measured / self.predicted - 1


def measure(runs: int, steps: int, budget: float, progress: Callable[[str, int, int], None]) -> Real:
    """Profile for `budget` seconds, compile, and run `steps` steps `runs` times. CscError if a command fails."""
    from benchmarks.pipeline.real_model import compiled  # transformers takes seconds to import

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("profiling", 0, runs + 1)
        tables = [folder / f"core{core}.toml" for core in range(2)]
        together([[sys.executable, "-m", "benchmarks.pipeline.real_model", str(t), str(budget)] for t in tables])
        model = compiled(hardware=tables[0])
        program = model.write(folder / "program")
        expected = read(program)
        found = []
        for number in range(runs):
            progress("computing", number + 1, runs + 1)
            table = folder / f"measured{number}.json"
            together([torchrun("-m", "csc.run", str(program), "--steps", str(steps), "--timeline", str(table))])
            found.append(read(table))
        progress("computing", runs + 1, runs + 1)
        seconds = [makespan(each) for each in found]
        middle = found[seconds.index(statistics.median_low(seconds))]
        return Real(
            predicted=expected.makespan,
            measured=makespan(middle),
            runs=tuple(seconds),
            predicted_work=_work(expected),
            measured_work=_work(middle),
            schedule=model.program.schedule.name,
            stages=tuple(len(stage.regions) for stage in model.program.stages),
        )


def torchrun(*command: str) -> list[str]:
    """A command for two ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]


def together(commands: Sequence[list[str]], own: Mapping[str, str] = ENVIRONMENT) -> None:
    """Run commands beside each other, with one thread each and `own` in the environment. CscError with what one said if
    it fails.
    """
    environment = cores.environment() | own
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text, command in zip(running, said, commands):
        if process.returncode:
            raise CscError(
                f"it failed: {text.strip().splitlines()[-1] if text.strip() else 'nothing said'}",
                " ".join(command[1:5]),
                "Run it by hand to see all of its output",
            )


def makespan(timeline: Timeline) -> float:
    """Seconds from the first start to the last end of F, B and W."""
    events = [event for events in timeline.ranks for event in events if event.action.computes]
    return max(event.end for event in events) - min(event.start for event in events)


def _work(timeline: Timeline) -> Work:
    found: Work = {}
    for rank, events in enumerate(timeline.ranks):
        for event in events:
            if event.action.computes:
                name = f"{event.action.kind} {rank}"
                found[name] = found.get(name, 0.0) + event.seconds
    return dict(sorted(found.items()))
