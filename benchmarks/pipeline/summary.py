"""The figures of the whole benchmark, and everything as one JSON object.

    summary(simulated, emulated, real, large, held, published) -> {field: number or None}    None: that part was not run
    details(simulated, emulated) -> {field: number or None}              what the fields above leave out
    document(...) -> dict                                             summary, details, rows, machine, date, versions

Means are geometric. In the summary
  makespan_over_bound                   the best plan found with one stage on each rank, over the lower bound of such
                                        plans, with twice the activations of the frozen-agnostic 1F1B or no more.
                                        Plans with several stages on a rank are faster; how they compare with this
                                        bound and with the weaker one of all plans stands in the details
  worst_speedup_over_any_baseline       of pairs: csc keeps to the activations of the very baseline. Baselines whose
                                        gradients are wrong are no baselines; pairs in which csc does not fit are
                                        counted in the details
  .. own_bytes                          over each rival (benchmarks.pipeline.baselines: fused B and W, every number of
                                        chunks, on three splits) that fits the device, in that rival's own bytes on its
                                        fullest rank, everything counted: parameters, gradients, optimizer state, what
                                        regions work with, activations, messages that wait, the process' own
  speedup_over_best_rival               csc keeps to the activations of the rival itself. No plan could gain more than
                                        what the rival is over the bound of all plans:
  best_rival_over_bound_trained         the fastest rival, whatever it holds, over that bound, where all is trained;
  .. frozen                             where something is frozen
  peak_memory_error                     of ranks that compute, benchmarks.pipeline.memory
  published_error                       of what others measured, benchmarks.pipeline.published
  speedup_over_unaware                  equal memory, cases with something frozen; heavy: see cases.py
  paced_error                           of csc's runs as emulated ranks, of the fastest step of each
  paced_speedup_over_torch              by case the fastest of torch's schedules with right gradients, over csc's plan
                                        within the memory of the frozen-agnostic 1F1B, both measured
"""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from benchmarks.pipeline.baselines import AGNOSTIC, NAMES, TEMPLATE
from benchmarks.pipeline.baselines import EQUAL as LAYERS
from benchmarks.pipeline.emulated_ranks import EQUAL, Measured
from benchmarks.pipeline.memory import Held, largest
from benchmarks.pipeline.published import Row as Published
from benchmarks.pipeline.published import error
from benchmarks.pipeline.real import Real
from benchmarks.pipeline.rows_file import without_stages
from benchmarks.pipeline.simulated import Row
from benchmarks.pipeline.torch_schedules import TORCH
from csc.simulation.pipeline import Link

Figures = dict[str, float | None]
PACKAGES = ("torch", "transformers", "numpy")


def summary(
    simulated: Sequence[Row],
    emulated: Sequence[Measured],
    real: Real | None,
    large: float | None = None,
    held: Sequence[Held] = (),
    published: Sequence[Published] = (),
) -> Figures:
    """The fields that the benchmark is judged by. large: seconds of a plan, see benchmarks.pipeline.large."""
    frozen = [row for row in simulated if row.case.frozen != "all trainable"]
    agnostic = {row.case: row.pair(AGNOSTIC).baseline.seconds for row in frozen}
    gains = {row.case: (agnostic[row.case] or math.nan) / row.plans["equal"].makespan for row in frozen}
    pairs = [pair for row in simulated for pair in row.pairs if pair.speedup is not None and not pair.baseline.wrong]
    errors = [abs(each.error) for each in emulated if each.run not in TORCH and each.error is not None]
    return {
        "makespan_over_bound_geomean": geomean(row.plans["double, one stage"].over_bound for row in simulated),
        "makespan_over_bound_equal_memory_geomean": geomean(
            row.plans["equal, one stage"].over_bound for row in simulated
        ),
        "worst_speedup_over_any_baseline": min((pair.speedup or 0.0 for pair in pairs), default=None),
        "worst_speedup_over_any_baseline_own_bytes": min(
            (speedup for row in simulated for speedup in row.own_bytes.values()), default=None
        ),
        "peak_memory_error_max": largest(held),
        "published_error_geomean": error(published),
        "speedup_over_best_rival_geomean": geomean(best for row in simulated if (best := _over_best_rival(row))),
        **{
            f"best_rival_over_bound_{short}_geomean": geomean(
                seconds / row.shared_bound for row in rows if (seconds := _best_rival(row))
            )
            for short, rows in _by_frozen(simulated).items()
        },
        "speedup_over_unaware_heavy_encoder_geomean": geomean(gains[row.case] for row in frozen if row.heavy),
        "speedup_over_unaware_geomean": geomean(gains.values()),
        "paced_error_max": max(errors, default=None),
        "real_error": abs(real.error) if real is not None else None,
        "paced_speedup_over_torch": geomean(over_torch(emulated).values()),
        "plan_seconds_max": max((row.plan_seconds for row in simulated), default=None),
        "plan_seconds_64x256": large,
    }


def details(simulated: Sequence[Row], emulated: Sequence[Measured]) -> Figures:
    """Counts and means beside the summary. over_one_stage_bound: over the bound of plans with one stage on each rank,
    whatever the plan: how near csc comes to the best that such plans could be.
    """
    single = [row for row in simulated if row.plans["double"].chunks == 1]
    return {
        "cases": len(simulated),
        "cases_with_several_stages_on_a_rank": len(simulated) - len(single),
        "any_plan_over_the_bound_of_all_plans_geomean": geomean(
            row.plans["double"].makespan / row.shared_bound for row in simulated
        ),
        "any_plan_over_the_bound_of_all_plans_equal_memory_geomean": geomean(
            row.plans["equal"].makespan / row.shared_bound for row in simulated
        ),
        "any_plan_over_one_stage_bound_geomean": geomean(row.plans["double"].over_single for row in simulated),
        "any_plan_over_one_stage_bound_equal_memory_geomean": geomean(
            row.plans["equal"].over_single for row in simulated
        ),
        **{f"worst_speedup_over {name}": _worst(simulated, name) for name in (LAYERS, AGNOSTIC, TEMPLATE, *TORCH)},
        "pairs": sum(pair.speedup is not None for row in simulated for pair in row.pairs),
        "pairs_slower": sum(
            pair.speedup is not None and pair.speedup < 1 - 1e-9 and not pair.baseline.wrong
            for row in simulated
            for pair in row.pairs
        ),
        "pairs_without_a_plan_that_fits": sum(not pair.fits for row in simulated for pair in row.pairs),
        "baselines_with_wrong_gradients": sum(bool(pair.baseline.wrong) for row in simulated for pair in row.pairs),
        "emulated_torch_error_max": max(
            (abs(each.error) for each in emulated if each.run in TORCH and each.error is not None and not each.wrong),
            default=None,
        ),
        "emulated_speedup_over_every_torch_schedule": geomean(
            each.measured / own
            for each in emulated
            if each.run in TORCH
            and each.measured is not None
            and not each.wrong
            and (own := _of(emulated, each, EQUAL))
        ),
    }


def _worst(rows: Sequence[Row], name: str) -> float | None:
    """The least speedup over the baseline of that name, where its gradients are right."""
    pairs = [row.pair(name) for row in rows]
    return min((p.speedup for p in pairs if p.speedup is not None and not p.baseline.wrong), default=None)


def _over_best_rival(row: Row) -> float | None:
    """csc's plan in the memory of the fastest rival, against that rival; None if there is none that csc fits into."""
    found = [pair for pair in row.pairs if pair.baseline.name in NAMES and pair.baseline.seconds]
    return min(found, key=lambda pair: pair.baseline.seconds or math.inf).speedup if found else None


def _best_rival(row: Row) -> float | None:
    """Seconds of the fastest rival, whatever it holds."""
    seconds = [pair.baseline.seconds for pair in row.pairs if pair.baseline.name in NAMES and pair.baseline.seconds]
    return min(seconds, default=None)


def _by_frozen(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The cases that the aims tell apart."""
    trained = [row for row in rows if row.case.frozen == "all trainable"]
    return {"trained": trained, "frozen": [row for row in rows if row not in trained]}


def over_torch(emulated: Sequence[Measured]) -> dict[str, float]:
    """By case: seconds of the fastest of torch's schedules with right gradients over those of csc at equal memory."""
    found = {}
    for each in emulated:
        if each.run == EQUAL and each.measured is not None:
            theirs = [
                other.measured
                for other in emulated
                if other.case == each.case and other.run in TORCH and other.measured is not None and not other.wrong
            ]
            if theirs:
                found[each.case.name] = min(theirs) / each.measured
    return found


def _of(emulated: Sequence[Measured], other: Measured, run: str) -> float | None:
    return next((each.measured for each in emulated if each.case == other.case and each.run == run), None)


def geomean(numbers: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(number) for number in numbers]
    return math.exp(sum(logs) / len(logs)) if logs else None


def document(
    simulated: Sequence[Row],
    emulated: tuple[Link | None, Sequence[Measured], Sequence[dict[str, Any]]],
    real: Real | None,
    notes: dict[str, Sequence[str]],
    large: float | None = None,
    held: Sequence[Held] = (),
    published: Sequence[Published] = (),
) -> dict[str, Any]:
    """Everything as JSON would have it. emulated: the link, the runs, and torch's gradients behind a frozen prefix;
    notes: of the configurations.
    """
    link, runs, gradients = emulated
    return {
        "summary": summary(simulated, runs, real, large, held, published),
        "details": details(simulated, runs),
        "simulated": [without_stages(row) for row in simulated],
        "emulated": [asdict(each) | {"error": each.error} for each in runs],
        "emulated_over_torch": over_torch(runs),
        "loopback": asdict(link) if link is not None else None,
        "torch_gradients_behind_a_frozen_prefix": list(gradients),
        "real": asdict(real) | {"error": real.error} if real is not None else None,
        "memory": [asdict(one) | {"errors": one.errors} for one in held],
        "published": [asdict(one) | {"error": one.error} for one in published],
        "notes": {name: list(lines) for name, lines in notes.items()},
        "machine": {"processor": platform.processor() or platform.machine(), "system": platform.platform()},
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
