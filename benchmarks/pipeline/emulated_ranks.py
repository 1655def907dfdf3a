"""The measured part: csc and torch.distributed.pipelining side by side as emulated ranks, real processes over gloo.

Terms
  emulated  compute is a wait of the modelled time; processes, messages and order are real (csc.runtime.emulated)
  stretch   what modelled times are multiplied by, so that the least that a step could take is TARGET seconds
  host      what csc's runtime takes for an action and at each end of a message, measured on as many such ranks before
            (csc.reports.host_time); plans count it, and predictions do, torch's too, whose runtime takes its own
  run       a runtime, a split and a schedule on a case

    measure(cases, numbers, steps, progress) -> (link, [Measured])

Messages are made as large as it takes for them to need, on this machine's loopback, their modelled time, stretched as
well; predictions use the loopback's latency and bandwidth, measured between two processes. Seconds run from the first
compute's start to the last one's end on any rank, the median of some steps after one that is not counted. All runs of
as many ranks share their processes, csc and torch in turn.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.pipeline.baselines import Split, balanced, torch_split
from benchmarks.pipeline.cases import Case, Numbers, of_case
from benchmarks.pipeline.torch_schedules import TORCH, chain, modelled, placement, without_gradients
from csc.ir.schedule import Schedule
from csc.planning.partition_bound import shared_lower_bound
from csc.planning.plan import plan
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules import SCHEDULES
from csc.reports.host_time import HostTime
from csc.simulation.memory import peak_memory
from csc.simulation.pipeline import Link, Network, Pipeline, hosted, slower
from csc.simulation.pipeline_file import to_json
from csc.simulation.simulate import makespan

TARGET = 2.5  # seconds of a step; the largest of waits' and dispatch's 0.1 ms each is then 1 or 2 %
PLANNERS = 2  # processes that plan, before anything is emulated
PATIENCE = 300.0  # seconds without a result after which the processes are stopped
CASES = (
    Case("VLM-S", "all trainable", 4, "a40"),
    Case("VLM-M", "encoder frozen", 4, "a40"),
    Case("VLM-M", "encoder frozen", 8, "a40"),
    Case("VLM-L", "projector only", 8, "a40"),
    Case("VLM-L", "encoder frozen", 12, "a40"),
    Case("VALM-M", "encoder frozen", 12, "a40"),
)
QUICK = (Case("VLM-S", "all trainable", 4, "a40"), Case("VLM-S", "encoder frozen", 8, "a40"))
EQUAL, DOUBLE, NAMED = "csc, equal memory", "csc, double memory", "csc's 1F1B, frozen-agnostic split"


@dataclass(frozen=True)
class Measured:
    """One run. Seconds are of a step: predicted by the simulator, and the median measured; None if it failed, with the
    reason in note. wrong: stages whose weights get no gradient. stretch: of the case.
    """

    case: Case
    run: str
    predicted: float
    measured: float | None
    steps: tuple[float, ...]
    stretch: float
    wrong: tuple[int, ...] = ()
    note: str = ""

    @property
    def error(self) -> float | None:
        """measured / predicted - 1."""
        return None if self.measured is None else self.measured / self.predicted - 1


@dataclass(frozen=True)
class _Run:
    """A run before it is measured. job: for the worker; None if there is nothing to run."""

    case: Case
    name: str
    predicted: float
    stretch: float
    job: dict[str, Any] | None
    wrong: tuple[int, ...] = ()
    note: str = ""


def measure(
    cases: Sequence[Case],
    found: dict[Case, Numbers],
    steps: int,
    progress: Callable[[str, int, int], None],
) -> tuple[Link, list[Measured]]:
    """The loopback link of this machine, and every run of the cases."""
    (answer,) = work([{"kind": "link"}], 2)
    link = Link(answer["latency"], answer["bandwidth"])
    host = {case: _host(case, found[case], link) for case in cases}
    with ProcessPoolExecutor(PLANNERS) as pool:
        planning = {case: pool.submit(runs_of, case, found[case], link, host[case], steps) for case in cases}
        planned = {case: future.result() for case, future in planning.items()}
    measured = []
    done = 0
    for ranks in sorted({case.ranks for case in cases}):
        runs = [run for case in cases if case.ranks == ranks for run in planned[case]]
        jobs = [run.job for run in runs if run.job is not None]
        answers = iter(work(jobs, ranks))
        for run in runs:
            measured.append(_measured(run, next(answers) if run.job is not None else None))
        done += sum(case.ranks == ranks for case in cases)
        progress("emulating ranks", done, len(cases))
    return link, measured


def _measured(run: _Run, answer: dict[str, Any] | None) -> Measured:
    steps = tuple(answer["makespans"]) if answer is not None and "makespans" in answer else ()
    note = run.note if answer is None or steps else f"fails: {answer['error']}"
    seconds = statistics.median(steps) if steps else None
    return Measured(run.case, run.name, run.predicted, seconds, steps, run.stretch, run.wrong, note)


def _host(case: Case, found: Numbers, link: Link) -> HostTime:
    """With messages of the size that the case's have: a sender of gloo copies them to the socket itself."""
    whole = of_case(found, case)
    slow = stretched(pipeline(whole, balanced(whole, case.ranks)), range(case.ranks), _stretch(whole), link)
    size = statistics.median(slow.messages.values())
    (answer,) = work([{"kind": "host", "size": size}], case.ranks)
    return HostTime(answer["action"], answer["handling"])


def _stretch(whole: Problem) -> float:
    return TARGET / shared_lower_bound(whole).seconds


def runs_of(case: Case, found: Numbers, link: Link, host: HostTime, steps: int) -> list[_Run]:
    """csc's plans under both memory limits, its 1F1B on the unaware split, and torch's schedules on the same split."""
    whole = of_case(found, case)
    split = balanced(whole, case.ranks)
    blind = pipeline(whole, split)
    home = tuple(range(case.ranks))
    schedule = SCHEDULES["1f1b"](blind, home, whole.microbatches)
    limit = max(peak_memory(blind, schedule))
    stretch = _stretch(whole)
    runs = _Runs(case, whole, stretch, link, host, steps)
    told = replace(whole, action=host.action / stretch, handling=host.handling / stretch)
    plans = {name: plan(replace(told, memory=limit * factor)) for name, factor in ((EQUAL, 1), (DOUBLE, 2))}
    rows = [runs.csc(name, made.stages, made.schedule, made.placement) for name, made in plans.items()]
    rows.append(runs.csc(NAMED, split, schedule, home))
    return rows + [runs.torch(name) for name in TORCH]


@dataclass(frozen=True)
class _Runs:
    """The emulated runs of a case."""

    case: Case
    whole: Problem
    stretch: float
    link: Link
    host: HostTime
    steps: int

    def csc(self, name: str, stages: Split, schedule: Schedule, home: Sequence[int]) -> _Run:
        slow = stretched(pipeline(self.whole, stages), home, self.stretch, self.link)
        job = {"kind": "csc", "pipeline": to_json(slow), "schedule": str(schedule), "steps": self.steps}
        return _Run(self.case, name, makespan(hosted(slow, *self.host, home), schedule), self.stretch, job)

    def torch(self, name: str) -> _Run:
        case, count = self.case, self.whole.microbatches
        _, numbers = torch_split(name, self.whole)
        if not chain(numbers):
            return _Run(case, name, 0.0, self.stretch, None, note="not a chain of stages")
        home = placement(name, case.ranks)
        slow = stretched(numbers, home, self.stretch, self.link)
        try:
            schedule = modelled(name, slow, case.ranks, count)
        except ValueError as error:
            return _Run(case, name, 0.0, self.stretch, None, note=str(error))
        wrong = tuple(without_gradients(name, numbers))
        if wrong:  # no baseline: what it takes says nothing
            note = f"no weight gradients on stage {', '.join(map(str, wrong))}"
            return _Run(case, name, makespan(slow, schedule), self.stretch, None, wrong, note)
        job = {"kind": "torch", "name": name, "pipeline": to_json(slow), "microbatches": count, "steps": self.steps}
        predicted = makespan(hosted(slow, *self.host, home), schedule)
        return _Run(case, name, predicted, self.stretch, job)


def stretched(numbers: Pipeline, home: Sequence[int], factor: float, link: Link) -> Pipeline:
    """The pipeline with all times `factor` times as long, on `link`: a message between two ranks becomes so large that
    its bytes take as long there as on the link they were planned for, stretched.
    """
    slow = slower(numbers, factor)
    more = {}
    for kind, source, destination in numbers.messages:
        planned = numbers.network.link(home[source], home[destination])
        more[kind, source, destination] = factor / planned.bandwidth * link.bandwidth
    sizes = {channel: size * more[channel] for channel, size in numbers.messages.items()}
    loads = slow.loads
    if loads is not None:
        rates = {channel: tuple(rate * more[channel] for rate in own) for channel, own in loads.messages.items()}
        loads = replace(loads, messages=rates)
    return Pipeline(slow.stages, sizes, Network(link, link), loads)


def work(jobs: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Run the jobs in processes of their own, one for each rank; for each its result, or {"error": sentence}.

    A job that fails takes the processes with it: new ones go on with the next.
    """
    answers: list[dict[str, Any]] = []
    while len(answers) < len(jobs):
        with tempfile.TemporaryDirectory() as folder:
            answers += _some(jobs[len(answers) :], ranks, Path(folder))
    return answers


def _some(jobs: Sequence[dict[str, Any]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """The results of the first jobs, up to and with the first that fails."""
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    command = [sys.executable, "-m", "benchmarks.pipeline.worker", str(folder / "jobs.json"), str(ranks), str(folder)]
    silent = "it did not answer in time"
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.wait(PATIENCE * len(jobs))
        except subprocess.TimeoutExpired:
            (folder / "error_late.txt").write_text(f"inf\n{silent}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: list[dict[str, Any]] = []
    for number in range(len(jobs)):
        path = folder / f"result_{number}.json"
        if not path.exists():
            return [*found, {"error": _reason(folder)}]
        found.append(json.loads(path.read_text()))
    return found


def _reason(folder: Path) -> str:
    """The last line of the error that came first: the others follow from it."""
    errors = [path.read_text() for path in folder.glob("error_*.txt")]
    if not errors:
        return "the processes ended without a word: " + (folder / "output.txt").read_text()[-300:]
    first = min(errors, key=lambda text: float(text.partition("\n")[0]))
    return first.strip().splitlines()[-1][:300]
