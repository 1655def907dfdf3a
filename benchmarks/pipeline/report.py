"""The tables that people read, 160 columns wide.

show(console, simulated, link, emulated, gradients, real, large)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pipeline.baselines import AGNOSTIC, TEMPLATE
from benchmarks.pipeline.baselines import EQUAL as LAYERS
from benchmarks.pipeline.emulated_ranks import DOUBLE, Measured
from benchmarks.pipeline.memory import Held
from benchmarks.pipeline.published import Row as Published
from benchmarks.pipeline.real import Real
from benchmarks.pipeline.simulated import Pair, Planned, Row
from benchmarks.pipeline.summary import Figures, details, over_torch, summary
from benchmarks.pipeline.torch_schedules import TORCH
from csc.simulation.pipeline import Link

SHORT = {"all trainable": "all", "encoder frozen": "enc", "projector only": "proj"}
SHORT_TORCH = {"torch interleaved 1F1B": "int 1F1B", "torch interleaved ZB": "int ZB"}
AIMS = {
    "makespan_over_bound_geomean": "at most 1.05",
    "makespan_over_bound_equal_memory_geomean": "at most 1.15",
    "worst_speedup_over_any_baseline": "at least 1",
    "speedup_over_unaware_heavy_encoder_geomean": "at least 1.3",
    "paced_error_max": "at most 0.05",
    "real_error": "at most 0.10",
    "plan_seconds_max": "under 10",
    "peak_memory_error_max": "at most 0.05",
    "published_error_geomean": "at most 0.15",
    "plan_seconds_64x256": "under 10",
    "worst_speedup_over_any_baseline_own_bytes": "at least 1",
    "speedup_over_best_rival_geomean": "1.10 frozen, 1.03 all trained",
}
NOTES = (
    "Cases: frozen are nothing (all), the encoders (enc), all but the projectors (proj); ranks; hardware; +: "
    "heavy, frozen encoders hold a third or more of the forward FLOPs; n too large: rivals that do not fit the device.",
    "GiB: activations, the most that a rank keeps for B and W, on the fullest rank. Equal: no more than the "
    "frozen-agnostic split (b) under 1F1B; double: twice that. State: with parameters, gradients and AdamW's moments, "
    "of the device's memory.",
    "x bound: over the lower bound of plans with one stage on each rank; *: the plan has two on a rank, that "
    "bound does not hold for it, and the weaker one of all plans is used.",
    "Speedups over a (equal layers), b (balanced forward time, frozen-agnostic), c (the best template),"
    " all under 1F1B with B and W apart, which sends an input's gradient right after B, and over torch's schedules on "
    "b's split, which send it after both, at no more activations than the baseline's own. !: torch gives no "
    "gradients to the weights of the first trained stage behind a frozen prefix. -: torch cannot express the case"
    " (no chain of stages, too few regions). none: no plan fits into the baseline's activations (a fused backward"
    " holds what W needs of one unit at a time).",
    "An encoder with a table of positions sees the image as tiles; InternVL-like ones give 256 positions a tile. "
    "Tensor parallelism (2 in the evaluation that the configurations come from) is not modelled: a rank is one "
    "device.",
)


def show(
    console: Console,
    simulated: Sequence[Row],
    link: Link | None,
    emulated: Sequence[Measured],
    gradients: Sequence[dict[str, Any]],
    real: Real | None,
    large: float | None = None,
    held: Sequence[Held] = (),
    published: Sequence[Published] = (),
) -> None:
    """Print what was run."""
    if simulated:
        console.print(_simulated(simulated))
        for note in NOTES:
            console.print(note, highlight=False)
        console.print()
    if emulated and link is not None:
        console.print(_emulated(emulated, link))
        console.print(_gradients(gradients))
    if real is not None:
        console.print(_real(real))
    if held:
        console.print(_held(held))
    if published:
        console.print(_published(published))
    console.print(_summary(summary(simulated, emulated, real, large, held, published), details(simulated, emulated)))


def _table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _simulated(rows: Sequence[Row]) -> Table:
    names = [SHORT_TORCH.get(name, name.removeprefix("torch ")) for name in TORCH]
    figures = ["bound s", "equal s", "x bound", "GiB", "double s", "x bound", "GiB", "state", "a", "b", "c", *names]
    table = _table("Simulated: makespans of one step, 24 microbatches", ["case"], figures)
    before = None
    for row in rows:
        case = row.case
        if before is not None and before != (case.configuration, case.frozen):
            table.add_section()
        before = (case.configuration, case.frozen)
        equal, double = row.plans["equal"], row.plans["double"]
        heavy = " +" if row.heavy else ""
        heavy += f" {len(row.not_fitting)} too large" if row.not_fitting else ""
        table.add_row(
            f"{case.configuration} {SHORT[case.frozen]} {case.ranks} {case.hardware}{heavy}",
            f"{row.bound:.3g}",
            *_plan(equal),
            *_plan(double),
            f"{double.memory / row.device:.0%}",
            *(_speedup(row.pair(name)) for name in (LAYERS, AGNOSTIC, TEMPLATE, *TORCH)),
        )
    return table


def _plan(plan: Planned) -> tuple[str, str, str]:
    mark = "*" if plan.chunks > 1 else " "
    return f"{plan.makespan:.3g}", f"{plan.over_bound:.3f}{mark}", f"{plan.activations / 2**30:.2f}"


def _speedup(pair: Pair) -> str:
    if pair.baseline.seconds is None:
        return "-"
    mark = "!" if pair.baseline.wrong else ""
    return f"none{mark}" if pair.speedup is None else f"{pair.speedup:.2f}{mark}"


def _emulated(runs: Sequence[Measured], link: Link) -> Table:
    table = _table(
        f"Emulated ranks over gloo: compute is a wait. Loopback: {1e6 * link.latency:.0f} us, "
        f"{link.bandwidth / 1e9:.2f} GB/s; ms: what the runtime takes for an action and for an end of a message",
        ["case", "run"],
        ["predicted s", "measured s", "error"],
    )
    table.add_column("steps s")
    table.add_column("note")
    gains = over_torch(runs)
    before = None
    for each in runs:
        first = each.case != before
        if first and before is not None:
            table.add_section()
        before = each.case
        gain = gains.get(each.case.name) if first else None
        table.add_row(
            each.case.name if first else "",
            each.run,
            f"{each.predicted:.3f}" if each.predicted else "-",
            f"{each.measured:.3f}" if each.measured is not None else "-",
            f"{each.error:+.1%}" if each.error is not None else "-",
            " ".join(f"{seconds:.3f}" for seconds in each.steps),
            each.note or (f"{gain:.3f} x over torch's best" if gain is not None else _scale(each)),
        )
    return table


def _scale(each: Measured) -> str:
    """Beside the second run of a case, what holds for all of them."""
    if each.run != DOUBLE or each.host is None:
        return ""
    return f"times x {each.stretch:.2g}, {1e3 * each.host.action:.2g} + {1e3 * each.host.handling:.2g} ms"


def _gradients(found: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "torch behind a frozen prefix, for real: a small model's gradients against one process",
        ["schedule", "stages without weight gradients", "largest relative error of the others"],
    )
    for each in found:
        if "missing" in each:
            table.add_row(each["name"], ", ".join(map(str, each["missing"])) or "none", f"{each['error']:.0e}")
        else:
            table.add_row(each["name"], f"fails: {each['error']}", "")
    return table


def _real(real: Real) -> Table:
    table = _table(
        f"Two ranks that compute, on two cores (schedule {real.schedule}, regions by stage {list(real.stages)})",
        ["seconds of a step"],
        ["predicted", "measured", "error"],
    )
    table.add_row("makespan", f"{real.predicted:.3f}", f"{real.measured:.3f}", f"{real.error:+.1%}")
    for name, expected in real.predicted_work.items():
        kind, rank = name.split()
        measured = real.measured_work.get(name, 0.0)
        error = f"{measured / expected - 1:+.1%}" if expected else ""
        table.add_row(f"all {kind} of rank {rank}", f"{expected:.3f}", f"{measured:.3f}", error)
    return table


def _held(held: Sequence[Held]) -> Table:
    table = _table(
        "Memory of two ranks at their fullest, MB: torch's allocator has tensors, the system the process",
        ["run", "rank"],
        ["predicted", "allocator", "error", "with the process' own", "system", "error"],
    )
    for one in held:
        system, allocator = one.errors
        table.add_row(
            one.run, str(one.rank), f"{one.predicted / 1e6:.1f}", f"{one.allocator / 1e6:.1f}", f"{allocator:+.1%}",
            f"{(one.predicted + one.reserved) / 1e6:.1f}", f"{one.system / 1e6:.1f}", f"{system:+.1%}",
        )  # fmt: skip
    return table


def _published(rows: Sequence[Published]) -> Table:
    table = _table("What others measured, of a GPU", ["settings", "unit"], ["published", "predicted", "error"])
    for row in rows:
        table.add_row(row.name, row.unit, f"{row.published:,.0f}", f"{row.predicted:,.0f}", f"{row.error:+.1%}")
    return table


def _summary(figures: Figures, more: Figures) -> Table:
    table = _table("Summary", ["figure"], ["value"])
    table.add_column("aim")
    for name, value in figures.items():
        table.add_row(name, "not run" if value is None else f"{value:.4g}", AIMS.get(name, ""))
    table.add_section()
    for name, value in more.items():
        if value is not None:
            table.add_row(name, f"{value:.4g}", "")
    return table
