"""The measured part: csc and torch.distributed.pipelining side by side as emulated ranks, real processes over gloo.

Terms
  emulated  compute is a wait of the modelled time; processes, messages and order are real (csc.runtime.emulated)
  stretch   what modelled times are multiplied by. The least that a step could take is then TARGET seconds, or so many
            more that the runtimes of all ranks together leave the cores idle but for a part BUSY: many ranks share few
            cores here, and one that has to wait for a core is late, which no rank with cores of its own is
  host      what csc's runtime takes for an action and at each end of a message, measured on as many such ranks, with
            messages of the case's size, before anything of the case is run (csc.reports.part_times); predictions count
            it, torch's too, whose runtime takes its own. Plans are made for the modelled hardware, without it
  run       a runtime, a split and a schedule on a case

    measure(cases, numbers, steps, progress) -> (link, [Measured])

Messages are made as large as it takes for them to need, on this machine's loopback, their modelled time, stretched as
well, but no larger than LARGEST; predictions use these sizes, and the loopback's latency and bandwidth, measured
between two processes. Seconds run from the first compute's start to the last one's end on any rank, the median of some
steps after a short one that is not counted. All runs of as many ranks share their processes, csc and torch in turn.
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
from csc import cores
from csc.ir.schedule import Schedule
from csc.planning.partition_bound import shared_lower_bound
from csc.planning.plan import plan
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules import SCHEDULES
from csc.reports.part_times import HostTime
from csc.simulation.pipeline import Link, Network, Pipeline, hosted, peak_memory, slower, to_json
from csc.simulation.simulate import makespan

TARGET = 2.5  # seconds of a step, at least
BUSY = 0.12  # of the cores' time, at most, for the runtimes of all ranks; at .3 ranks are late by a sixth of the step
LONG = 0.012  # seconds of a wait after which the runtime is as slow as it gets, its code and data gone from the caches
LARGEST = 65536.0  # bytes of a message: on one machine they are copied by the cores that the ranks share
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
    reason in note. wrong: stages whose weights get no gradient. stretch: of the case; host: its HostTime.
    """

    case: Case
    run: str
    predicted: float
    measured: float | None
    steps: tuple[float, ...]
    stretch: float
    wrong: tuple[int, ...] = ()
    note: str = ""
    host: HostTime | None = None

    @property
    def error(self) -> float | None:
        """Of the fastest step, as what else the machine does only ever adds: measured / predicted - 1."""
        return min(self.steps) / self.predicted - 1 if self.steps else None


@dataclass(frozen=True)
class _Run:
    """A run before it is measured: `schedule` on `home`; None if there is none. job: for the worker; None if there is
    nothing to run.
    """

    case: Case
    name: str
    stretch: float
    numbers: Pipeline | None = None
    home: tuple[int, ...] = ()
    schedule: Schedule | None = None
    job: dict[str, Any] | None = None
    wrong: tuple[int, ...] = ()
    note: str = ""

    def predicted(self, host: HostTime) -> float:
        """Seconds of a step by the simulator."""
        if self.numbers is None or self.schedule is None:
            return 0.0
        return makespan(hosted(self.numbers, *host, self.home), self.schedule)


def measure(
    cases: Sequence[Case],
    found: dict[Case, Numbers],
    steps: tuple[int, int],
    progress: Callable[[str, int, int], None],
) -> tuple[Link, list[Measured]]:
    """The loopback link of this machine, and every run of the cases. steps: of csc's runs, and of torch's."""
    first: list[dict[str, Any]] = [{"kind": "link"}, {"kind": "host", "size": LARGEST, "wait": LONG}]
    answer, taken = work(first, max(case.ranks for case in cases))
    link = Link(answer["latency"], answer["bandwidth"])
    with ProcessPoolExecutor(PLANNERS) as pool:
        planning = {case: pool.submit(runs_of, case, found[case], link, taken["processor"], steps) for case in cases}
        planned = {case: future.result() for case, future in planning.items()}
    measured = []
    for ranks in sorted({case.ranks for case in cases}):
        own = [case for case in cases if case.ranks == ranks]
        jobs = [job for case in own for job in _jobs(planned[case])]
        answers = iter(work(jobs, ranks))
        for case in own:
            taken = next(answers)
            host = HostTime(taken["action"], taken["handling"])
            for run in planned[case]:
                measured.append(_measured(run, host, next(answers) if run.job is not None else None))
        progress("emulating ranks", len({each.case for each in measured}), len(cases))
    return link, measured


def _jobs(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    """Of a case: what the runtime takes with waits and messages as large as the case's, as a sender of gloo copies them
    to the socket itself; then all runs.
    """
    pipelines = [run.numbers for run in runs if run.numbers is not None]
    size = statistics.median(size for one in pipelines for size in one.messages.values())
    stages = [stage for one in pipelines for stage in one.stages]
    wait = statistics.median(stage.seconds(kind) for stage in stages for kind in "FBW" if stage.seconds(kind))
    host = {"kind": "host", "size": size, "wait": min(wait, LONG)}
    return [host, *(run.job for run in runs if run.job is not None)]


def _measured(run: _Run, host: HostTime, answer: dict[str, Any] | None) -> Measured:
    steps = tuple(answer["makespans"]) if answer is not None and "makespans" in answer else ()
    note = run.note if answer is None or steps else f"fails: {answer['error']}"
    seconds = statistics.median(steps) if steps else None
    return Measured(run.case, run.name, run.predicted(host), seconds, steps, run.stretch, run.wrong, note, host)


def seconds_of(schedules: Sequence[Schedule], processor: float) -> float:
    """Of a step, see the module's *stretch*. processor: seconds that a rank's process computes for an action of a
    schedule, messages among them.
    """
    actions = max(sum(map(len, schedule.ranks)) for schedule in schedules)
    return max(TARGET, actions * processor / (len(os.sched_getaffinity(0)) * BUSY))


def runs_of(case: Case, found: Numbers, link: Link, processor: float, steps: tuple[int, int]) -> list[_Run]:
    """csc's plans under both memory limits, its 1F1B on the unaware split, and torch's schedules on the same split."""
    whole = of_case(found, case)
    split = balanced(whole, case.ranks)
    blind = pipeline(whole, split)
    home = tuple(range(case.ranks))
    schedule = SCHEDULES["1f1b"](blind, home, whole.microbatches)
    limit = max(peak_memory(blind, schedule))
    plans = {name: plan(replace(whole, memory=limit * factor)) for name, factor in ((EQUAL, 1), (DOUBLE, 2))}
    target = seconds_of([made.schedule for made in plans.values()], processor)
    runs = _Runs(case, whole, target / shared_lower_bound(whole).seconds, link, steps)
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
    steps: tuple[int, int]

    def csc(self, name: str, stages: Split, schedule: Schedule, home: Sequence[int]) -> _Run:
        slow = stretched(pipeline(self.whole, stages), home, self.stretch, self.link)
        job = {"kind": "csc", "pipeline": to_json(slow), "schedule": str(schedule), "steps": self.steps[0]}
        return _Run(self.case, name, self.stretch, slow, tuple(home), schedule, job)

    def torch(self, name: str) -> _Run:
        case, count = self.case, self.whole.microbatches
        _, numbers = torch_split(name, self.whole)
        if not chain(numbers):
            return _Run(case, name, self.stretch, note="not a chain of stages")
        home = tuple(placement(name, case.ranks))
        slow = stretched(numbers, home, self.stretch, self.link)
        try:
            schedule = modelled(name, slow, case.ranks, count)
        except ValueError as error:
            return _Run(case, name, self.stretch, note=str(error))
        run = _Run(case, name, self.stretch, slow, home, schedule)
        wrong = tuple(without_gradients(name, numbers))
        if wrong:  # no baseline: what it takes says nothing
            return replace(run, wrong=wrong, note=f"no weight gradients on stage {', '.join(map(str, wrong))}")
        job = {"kind": "torch", "name": name, "pipeline": to_json(slow), "microbatches": count}
        return replace(run, job=job | {"steps": self.steps[1]})


def stretched(numbers: Pipeline, home: Sequence[int], factor: float, link: Link) -> Pipeline:
    """The pipeline with all times `factor` times as long, on `link`: a message between two ranks becomes so large that
    its bytes take as long there as on the link they were planned for, stretched, or LARGEST.
    """
    slow = slower(numbers, factor)
    more = {}
    for (kind, source, destination), size in numbers.messages.items():
        planned = numbers.network.link(home[source], home[destination])
        as_long = factor / planned.bandwidth * link.bandwidth
        more[kind, source, destination] = min(as_long, LARGEST / size) if size else as_long
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
            env=cores.environment(),
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
