"""The simulated part: csc's plans and the baselines of every case, on the same costs.

Terms
  activations  the most bytes that a rank keeps for B and W at any time (Timeline.peak_activations), of the fullest rank
  equal        a plan whose activations are no more than those of the frozen-agnostic split under 1F1B
  double       the same with twice as much
  one stage    a plan with one stage on each rank; without it, csc gives a rank several where that is faster
  pair         a baseline and the fastest plan found whose activations are no more than the baseline's own
  own bytes    all that the fullest rank of a rival holds: state, what regions work with, activations, messages that
               wait, what the process takes for itself

    evaluate(case, numbers) -> Row                            seconds of work: plans are searched for
    run(cases, processes, progress, known, keep) -> [Row]

Limits are one number for all ranks, and hold for activations alone: parameters, gradients and optimizer state are left
out of the problem, and stand beside the result. A pair may come from any of the case's plans; where those are too large
or too slow for a baseline, one more is made within the baseline's activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.pipeline.baselines import AGNOSTIC, NAMES, Baseline, baselines, schedule_of
from benchmarks.pipeline.cases import HARDWARE, Case, Numbers, numbers, of_case
from csc.errors import InputError
from csc.planning.partition_bound import lower_bound, shared_lower_bound
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem, pipeline
from csc.simulation.pipeline import peak_memory, peaks
from csc.simulation.simulate import simulate

LIMITS = {"equal": (1, None), "double": (2, None), "equal, one stage": (1, 1), "double, one stage": (2, 1)}
SAME = 1 + 1e-9  # floats that differ by less are equal


@dataclass(frozen=True)
class Planned:
    """A plan in numbers. Times are seconds, sizes bytes of the fullest rank; memory: with the state of its units.

    chunks: stages on a rank. over_single: makespan over the lower bound of plans with one stage on each rank.
    over_bound: over the one that holds for this plan: the same, or with more chunks the weaker one of all plans.
    """

    makespan: float
    over_bound: float
    over_single: float
    activations: float
    memory: float
    chunks: int
    layout: str
    plan_seconds: float


@dataclass(frozen=True)
class Pair:
    """speedup: seconds of the baseline over those of csc within its activations; None if there is nothing to compare.
    fits: False if csc finds no plan within them.
    """

    baseline: Baseline
    speedup: float | None
    fits: bool = True


@dataclass(frozen=True)
class Row:
    """Everything about one case. bound, shared_bound: seconds, for one stage on each rank and for all plans; device:
    bytes of its memory. plans: by the names of LIMITS. plan_seconds: of the slowest plan, those for pairs included, in
    processor time: a plan is made by one thread, and others may run beside it. own_bytes: of each rival that fits the
    device, its seconds over those of csc in as many bytes; 0: csc finds no plan. not_fitting: the others.
    """

    case: Case
    heavy: bool
    encoders: float
    bound: float
    shared_bound: float
    device: float
    plans: dict[str, Planned]
    pairs: tuple[Pair, ...]
    plan_seconds: float
    own_bytes: dict[str, float]
    not_fitting: tuple[str, ...]

    def pair(self, name: str) -> Pair:
        """The pair with the baseline of that name."""
        return next(pair for pair in self.pairs if pair.baseline.name == name)


def evaluate(case: Case, found: Numbers) -> Row:
    """Plans, baselines, bounds and pairs of one case."""
    whole = of_case(found, case)
    single, shared = lower_bound(whole).seconds, shared_lower_bound(whole).seconds
    others = baselines(whole, found.layers)
    reference = next(each.activations for each in others if each.name == AGNOSTIC)
    stated = replace(found.problem, ranks=case.ranks)

    def planned(limit: float, chunks: int | None = None) -> Planned:
        start = time.process_time()
        made = plan(replace(whole, memory=limit), chunks=chunks)
        seconds = time.process_time() - start
        return Planned(
            makespan=made.makespan,
            over_bound=made.gap + 1,
            over_single=made.makespan / single,
            activations=max(made.peak_memory),
            memory=_with_state(stated, made),
            chunks=-(-len(made.stages) // case.ranks),
            layout=made.layout,
            plan_seconds=seconds,
        )

    plans = {name: planned(factor * reference, chunks) for name, (factor, chunks) in LIMITS.items()}
    made = list(plans.values())
    pairs = _pairs(others, made, planned)
    longest = max(each.plan_seconds for each in made)
    own, outside = _own_bytes(stated, others, found.device - found.reserved)
    return Row(
        case, found.heavy, found.encoders, single, shared, found.device, plans, pairs, longest, own, outside
    )  # fmt: skip


def _own_bytes(stated: Problem, others: Sequence[Baseline], device: float) -> tuple[dict[str, float], tuple[str, ...]]:
    """csc against every rival in the rival's own bytes. A plan for one serves those that take more bytes and time."""
    rivals = []
    for other in others:
        if other.name in NAMES and other.seconds:
            numbers = pipeline(stated, other.stages)
            schedule = schedule_of(other.name, numbers, stated.ranks, stated.microbatches)
            held = max(peaks(numbers, schedule, simulate(numbers, schedule)))
            rivals.append((held, other))
    outside = tuple(other.name for held, other in rivals if held > device)
    made: list[tuple[float, float]] = []  # bytes, seconds
    found: dict[str, float] = {}
    for held, other in sorted(((held, other) for held, other in rivals if held <= device), key=lambda each: each[0]):
        assert other.seconds is not None
        best = min((seconds for size, seconds in made if size <= held * SAME), default=float("inf"))
        if best > other.seconds:
            with suppress(InputError):
                planned = plan(replace(stated, memory=held))
                made.append((max(planned.peak_memory), planned.makespan))
                best = min(best, planned.makespan)
        found[other.name] = other.seconds / best
    return found, outside


def _with_state(stated: Problem, made: PipelinePlan) -> float:
    """Bytes of the fullest rank with parameters, gradients and optimizer state."""
    return max(peak_memory(pipeline(stated, made.stages), made.schedule))


def _pairs(others: Sequence[Baseline], made: list[Planned], planned: Callable[[float], Planned]) -> tuple[Pair, ...]:
    """A pair for every baseline; what is planned for one of them is appended to `made` and serves the others too."""
    too_small: set[str] = set()

    def within(other: Baseline) -> float:
        return min((p.makespan for p in made if p.activations <= other.activations * SAME), default=float("inf"))

    while True:
        open_ = [o for o in others if o.seconds and not o.wrong and o.name not in too_small and within(o) > o.seconds]
        if not open_:
            break
        least = min(open_, key=lambda each: each.activations)
        with suppress(InputError):
            made.append(planned(least.activations))
        too_small.add(least.name)  # asked once; what came of it is in `made`
    pairs = []
    for other in others:
        fastest = within(other)
        fits = fastest < float("inf")
        speedup = other.seconds / fastest if other.seconds and fits else None
        pairs.append(Pair(other, speedup, fits or other.seconds is None or bool(other.wrong)))
    return tuple(pairs)


def run(
    cases: Sequence[Case],
    processes: int,
    progress: Callable[[str, int, int], None],
    known: Mapping[Case, Row] = MappingProxyType({}),
    keep: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """All cases in a pool of processes, in the order given. progress(what, done, all) is called as they are done.

    known: rows of an earlier run, which are not made again; keep(row) is called with each new one.
    """
    open_ = [case for case in cases if case not in known]
    names = list(dict.fromkeys(case.configuration for case in open_))
    devices = [device for device in HARDWARE if any(case.hardware == device for case in open_)]
    with ProcessPoolExecutor(processes) as pool:
        tracing = {pool.submit(numbers, name, devices): name for name in names}
        found: dict[tuple[str, str, str], Numbers] = {}
        for done, traced in enumerate(as_completed(tracing), 1):
            found |= {(tracing[traced], *key): each for key, each in traced.result().items()}
            progress("tracing configurations", done, len(names))
        by_case = {case: found[case.configuration, case.hardware, case.frozen] for case in open_}
        longest_first = sorted(open_, key=lambda case: -case.ranks * len(by_case[case].layers))
        futures = [pool.submit(evaluate, case, by_case[case]) for case in longest_first]
        rows = dict(known)
        for done, future in enumerate(as_completed(futures), len(cases) - len(open_) + 1):
            row = future.result()
            keep(row)
            rows[row.case] = row
            progress("planning and simulating", done, len(cases))
    return [rows[case] for case in cases]
