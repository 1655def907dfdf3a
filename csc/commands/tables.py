"""What commands show, as tables."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from csc.commands.printing import Column, Rows, console, table
from csc.simulation.idle import CAUSES
from csc.simulation.page import bytes_text, seconds_text, unit

if TYPE_CHECKING:
    from csc.analysis.hardware import Wire
    from csc.analysis.unfit_parts import UnfitPart
    from csc.driver.mesh_candidates import MeshChoice
    from csc.reports.cost_report import CostReport, CostRow
    from csc.reports.forecast import Forecast, Limits, RankMemory
    from csc.reports.profiling import Profile
    from csc.runtime.fusing import FusedRow


# --- `csc cost` and `csc profile` on a terminal: rich tables of csc.reports.cost_report and csc.reports.profiling ----
#
# Regions of one template variant cost the same; they share a row.


HELD = (
    Column("saved"), Column("stashed", 5), Column("rematerialised", 7), Column("parameters"), Column("gradients", 2),
    Column("optimizer", 1), Column("messages", 4), Column("gradient messages", 6),
)  # fmt: skip


def cost_tables(report: CostReport) -> Iterator[Rows]:
    """Work and bytes of the components and of the regions; expressions if there are any."""
    for title, rows in (("components", report.components), ("regions", report.regions)):
        yield _work_table(f"{title}: work of one microbatch", rows, report.basis)
        yield _bytes_table(f"{title}: bytes", rows)
        if rows and rows[0].expressions:
            yield _expression_table(f"{title}: expressions", rows)


def _work_table(title: str, rows: Sequence[CostRow], basis: str) -> Rows:
    printed = table("name", "", "MFLOPs", "moved", "kernels", *([f"seconds ({basis})"] if basis else []), title=title)
    for name, row in _distinct(rows):
        parts = [part for part in "FBW" if row.figures[f"{part} kernels"]] or ["F"]
        for part in parts:
            cells = [
                name if part == parts[0] else "",
                part,
                f"{row.figures[f'{part} flops'] / 1e6:,.3f}",
                bytes_text(row.figures[f"{part} bytes"]),
                str(row.figures[f"{part} kernels"]),
            ]
            if row.seconds is not None:
                cells.append(seconds_text(row.seconds["FBW".index(part)]))
            printed.add_row(*cells, end_section=part == parts[-1])
    return printed


def _bytes_table(title: str, rows: Sequence[CostRow]) -> Rows:
    printed = table("name", *HELD, title=title)
    for name, row in _distinct(rows):
        printed.add_row(name, *(bytes_text(row.figures[column.heading]) for column in HELD))
    return printed


def _expression_table(title: str, rows: Sequence[CostRow]) -> Rows:
    """One figure a line; those that are always 0 are left out."""
    printed = table("name", "figure", "expression", title=title)
    for name, row in _distinct(rows):
        lines = [(figure, str(e)) for figure, e in row.expressions.items() if e != 0]
        for position, (figure, text) in enumerate(lines):
            printed.add_row("" if position else name, figure, text, end_section=position == len(lines) - 1)
    return printed


def _distinct(rows: Sequence[CostRow]) -> Iterator[tuple[str, CostRow]]:
    """(name, row) of the first row of each variant, its name with the number of the others."""
    members: dict[str, list[CostRow]] = {}
    for row in rows:
        members.setdefault(row.template if row.name != row.component else row.name, []).append(row)
    for variants in members.values():
        suffix = f" and {len(variants) - 1} more {variants[0].template}" if len(variants) > 1 else ""
        yield escape(f"{variants[0].name}{suffix}"), variants[0]


def profile_table(found: Profile) -> Rows:
    """Measured against modelled seconds, a variant a row."""
    seconds = ("measured F/B/W", "modelled F/B/W")
    printed = table("template", Column("regions", 1), *seconds, "error", title=found.hardware.measured_on)
    for row in found.rows:
        printed.add_row(
            escape(row.variant), str(row.regions), " / ".join(map(seconds_text, row.measured)),
            " / ".join(map(seconds_text, row.modelled)), f"{row.error:+.1%}",
        )  # fmt: skip
    return printed


def wire_text(wire: Wire) -> str:
    """Its latency and bandwidth."""
    return f"{seconds_text(wire.latency)} and {bytes_text(wire.bandwidth)}/s"


def profile_summary(found: Profile) -> str:
    """What was fitted, and how near the model comes."""
    fitted = found.hardware
    return (
        f"fitted: matmuls {fitted.matmul_efficiency:.1%} of the peak, memory {bytes_text(fitted.reached_bandwidth)}/s, "
        f"{seconds_text(fitted.launch)} a kernel\n"
        f"a message {wire_text(fitted.within)}, a collective {wire_text(fitted.collective or fitted.within)}, "
        f"an action {seconds_text(fitted.action)} beside its kernels, a message "
        f"{seconds_text(fitted.handling)} of each of its two ranks\n"
        f"model against measured: {found.error:+.1%} of a microbatch, {found.mean_error:.1%} on average over all parts"
    )


# --- What a plan expects of its step: the ranks as a table, the makespan and its lower bound as sentences ------------


def show_forecast(found: Forecast) -> None:
    """A row for each rank."""
    device = ["device"] if found.devices else []
    optional = [Column("peak memory", 2), Column("of it activations", 3)]
    columns: tuple[str | Column, ...] = (
        "rank",
        *(Column(name, 4) for name in device),
        "holds",
        "busy",
        Column("bubble", 1),
        *optional,
    )
    shares = table(*columns, title=f"{found.schedule}, {found.layout}")
    for rank in found.as_dict()["ranks"]:
        shares.add_row(
            str(rank["rank"]), *(escape(rank[name]) for name in device), escape(rank["holds"]),
            seconds_text(rank["busy"]), f"{rank['bubble_share']:.1%}",
            bytes_text(rank["peak_memory"]), bytes_text(rank["peak_activations"]),
        )  # fmt: skip
    console.print(shares)


def step_text(found: Forecast) -> str:
    """The makespan, what follows it if it can be seen, and where the seconds come from."""
    most = max(found.ends, key=lambda end: end.seconds)
    parts = [f"{seconds_text(most.reduce)} to add gradients"] if most.reduce else []
    parts += [f"{seconds_text(most.optimizer)} for AdamW"] if most.optimizer else []
    makespan, step = seconds_text(found.plan.makespan), seconds_text(found.step)
    behind = f", {step} with {' and '.join(parts)}" if step != makespan else ""
    return f"makespan {makespan}{behind}; costs: {found.costs}"


def bound_text(found: Forecast) -> str:
    """The lower bound, what it holds for, how far the plan is above it, and what sets it."""
    kind = "any number of stages" if found.shared else "one stage"
    least = f"lower bound {seconds_text(found.bound)}: no plan with {kind} on a rank takes less"
    return f"{least}, and this one takes {max(0.0, found.gap):.1%} more; what sets the bound: {found.limits.term}"


# --- What Inductor has made of a program's functions -----------------------------------------------------------------


NONE_YET = "no step has run with its functions compiled on this machine: the first one compiles them"


def fused_functions(directory: Path) -> list[FusedRow]:
    """Of the program in a directory; none if it has not made a step, or nothing is kept."""
    from csc.cache.inductor_folder import inductor_folder
    from csc.cache.store import store
    from csc.runtime.fusing import rows_of

    folder = inductor_folder(store())
    fingerprint: str = json.loads((directory / "program.json").read_text())["fingerprint"]
    return rows_of(folder, fingerprint) if folder is not None else []


def fused_table(rows: list[FusedRow]) -> Rows:
    """A row for each function; seconds are those of its compilation, which later starts do not spend. Products by
    oneDNN where it computes some.
    """
    from csc.runtime.fusing import AS_IT_IS

    by_onednn = any(row.products for row in rows)
    columns: tuple[str | Column, ...] = (
        "function",
        "seconds",
        *([Column("products by oneDNN", 1)] if by_onednn else []),
        "",
        "why",
    )
    rows_table = table(*columns, title="functions that Inductor compiles")
    for row in rows:
        seconds = "" if row.how == AS_IT_IS else f"{row.seconds:.2f}"
        products = [str(row.products or "")] if by_onednn else []
        rows_table.add_row(row.name, seconds, *products, row.how, escape(row.why))
    rows_table.add_section()
    products = [str(sum(row.products for row in rows))] if by_onednn else []
    rows_table.add_row("all", f"{sum(row.seconds for row in rows):.2f}", *products, "", "of processes side by side")
    return rows_table


# --- The tables of `csc plan --lengths` ------------------------------------------------------------------------------


def show_lengths_plan(found: Any, batch_size: int, batches: int) -> None:
    """Print it."""
    title = f"{batches} random steps of {batch_size} samples, by what they take"
    optional = (Column("with mean microbatches", 2), Column("peak memory", 1))
    rows_table = table("mesh", "microbatches", "step", "+-", *optional, title=title)
    for alternative in found.ways:
        if alternative.mean is not None:
            tried = (
                ["", ""]
                if alternative.step is None
                else [seconds_text(alternative.step), seconds_text(alternative.spread or 0.0)]
            )
            rows_table.add_row(
                alternative.mesh,
                str(alternative.microbatches),
                *tried,
                seconds_text(alternative.mean),
                bytes_text(alternative.peak or 0.0),
            )
    console.print(rows_table)
    for alternative in found.ways:
        if alternative.why:
            console.print(
                f"{alternative.mesh}, microbatches={alternative.microbatches}: {escape(alternative.why)}",
                highlight=False,
            )
    _show_chosen(found, batch_size)


def _show_chosen(report: Any, batch_size: int) -> None:
    """The stages, and what the choice is worth."""
    first = report.ways[0]
    console.print(
        f"chosen: {first.mesh}, microbatches={first.microbatches}, {escape(report.schedule)}, the best of "
        f"{report.partitions} partitions: {escape(first.layout)}",
        highlight=False,
    )
    for number, (regions, rank) in enumerate(zip(report.stages, report.placement)):
        console.print(
            f"stage {number}, rank {rank}: {escape(regions[0])} ... {escape(regions[-1])} ({len(regions)} regions)",
            highlight=False,
        )
    console.print(
        f"a step takes {seconds_text(report.static)}; with a plan for each batch {seconds_text(report.replanned)}: the "
        f"one plan loses {report.loss:.2%}",
        highlight=False,
    )
    shares = ", ".join(f"{count} of 59 at {size}" for size, count in report.alike.items())
    console.print(f"batches that choose these stages, by batch size: {shares}", highlight=False)
    if report.enough is None:
        console.print("the choice depends on the batch at all of these sizes", highlight=False)
    elif report.enough <= batch_size:
        console.print(f"the choice is stable from {report.enough} samples on", highlight=False)
    else:
        console.print(
            f"the choice is stable from {report.enough} samples on: steps of {batch_size} choose otherwise at times",
            highlight=False,
        )
    console.print(f"costs of samples are off by {report.error:.1%}", highlight=False)


# --- What limits a step, as a table of idle time by cause and a few sentences ----------------------------------------


MOST = 3  # ranks of the longest path that are named
LEAST = 1e-3  # of the step: a shorter idle time of the busiest rank is not named
MEANING = {  # of an idle rank
    "ramp": "it has not started yet, or is done",
    "message": "its next input is being sent",
    "gather": "its stage's parameters are being gathered",
    "imbalance": "the busiest rank has more work",
    "memory": "it has work that is ready but would not fit in memory",
    "order": "it has work that is ready but comes later in the schedule",
    "way": "it has no work that is ready: other ranks have its microbatches",
}


def show_limits(limits: Limits) -> None:
    """Print them. Causes of which no rank has anything have no column."""
    size, name = unit(limits.makespan)
    causes = [cause for cause in CAUSES if limits.causes[cause] > 1e-6 * limits.makespan]
    rows = table("rank", "work", "idle", *causes, title=f"work and idle time by cause, in {name}")
    for rank, (work, idle) in enumerate(zip(limits.work, limits.idle)):
        figures = (work, limits.makespan - work, *(idle[cause] for cause in causes))
        rows.add_row(str(rank), *(_number(seconds / size) for seconds in figures))
    console.print(rows)
    if causes:
        meanings = Table.grid("cause", "meaning", padding=(0, 2, 0, 0))
        for cause in causes:
            meanings.add_row(cause, MEANING[cause])
        console.print("why a rank is idle:")
        console.print(Padding(meanings, (0, 0, 0, 2)))
    for line in sentences(limits):
        console.print(line, highlight=False)


def sentences(limits: Limits) -> list[str]:
    """The step as the work of its busiest rank and its idle time by cause; what the longest path goes through."""
    size, name = unit(limits.makespan)
    rank = limits.busiest
    own = limits.idle[rank]
    parts = [f"{cause} {_number(own[cause] / size)}" for cause in CAUSES if own[cause] > LEAST * limits.makespan]
    idle = f"is idle for the rest ({', '.join(parts)})" if parts else "is hardly idle"
    lines = [f"rank {rank} is the busiest: it works for {_number(limits.work[rank] / size)} {name} and {idle}"]
    ranked = sorted(limits.path.work.items(), key=lambda item: -item[1])
    shares = [(f"rank {r}", seconds) for r, seconds in ranked[:MOST]]
    shares.append(("other ranks", sum(seconds for _, seconds in ranked[MOST:])))
    shares += [("messages", limits.path.messages), ("gathers", limits.path.gathers)]
    named = [
        f"{cause} {seconds / limits.makespan:.1%}" for cause, seconds in shares if seconds > LEAST * limits.makespan
    ]
    return [*lines, f"the longest path through the step spends its time on {', '.join(named)}"] if named else lines


def _number(value: float) -> str:
    """Three digits or more; nothing for 0."""
    return "" if value < 5e-4 else f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


# --- The memory that a plan expects of each rank, as a table ---------------------------------------------------------


KINDS = ("parameters", "gradients", "optimizer", "activations", "working", "messages")
OPTIONAL = {"messages": 6, "working": 5, "gradients": 4, "recorded": 3, "parameters": 2, "optimizer": 1}


def memory_table(rows: Sequence[RankMemory], limit: float | None, devices: Sequence[str] = ()) -> Rows:
    """A row for each pipeline rank; equal neighbours share one. limit: bytes that a rank may hold; devices: what each
    rank is and may hold, where they differ.
    """
    above = "" if limit is None else f", limit {bytes_text(limit)}"
    if devices:
        above = f", limits: {'; '.join(dict.fromkeys(devices))}"
    kinds = [*KINDS, *(["recorded"] if any(row.recorded for row in rows) else [])]
    columns = [Column(kind, OPTIONAL.get(kind, 0)) for kind in kinds]
    rows_table = table("rank", *columns, "all", title=f"memory of a rank at its fullest, as planned{above}")
    position = 0
    while position < len(rows):
        end = position
        while end + 1 < len(rows) and _sizes(rows[end + 1], kinds) == _sizes(rows[position], kinds):
            end += 1
        named = str(position) if end == position else f"{position} to {end}"
        rows_table.add_row(named, *map(bytes_text, (*_sizes(rows[position], kinds), rows[position].total)))
        position = end + 1
    return rows_table


def _sizes(row: RankMemory, kinds: Sequence[str]) -> tuple[int, ...]:
    return tuple(getattr(row, kind) for kind in kinds)


# --- Meshes beside each other, the fastest first, and why others are not among them ----------------------------------


MOST_MESHES = 12  # rows


def show_meshes(choice: MeshChoice, seconds: float) -> None:
    """Print them. seconds: that were allowed."""
    limit = "" if choice.memory is None else f", memory limit {bytes_text(choice.memory)}"
    title = f"{choice.step} samples a step on {choice.devices} devices{limit}"
    split = ("mesh", "microbatches", Column("of", 4), Column("zero", 1), Column("recompute", 2))
    rows_table = table(*split, "step", Column("samples/s", 5), Column("idle", 3), "peak memory", title=title)
    for row in choice.rows[:MOST_MESHES]:
        peak = bytes_text(row.peak_memory) + ("" if row.fits else ", above the limit")
        mesh = "".join([row.mesh, *(f", context {name}={ranks}" for name, ranks in row.context.items())])
        mesh += ", sequence parallel" * row.sequence_parallel
        rows_table.add_row(
            mesh, str(row.microbatches), str(row.samples), str(row.zero), row.recompute, seconds_text(row.seconds),
            f"{choice.step / row.seconds:.3g}", f"{max(0.0, row.idle):.1%}", peak,
        )  # fmt: skip
    console.print(rows_table)
    if len(choice.rows) > MOST_MESHES:
        console.print(f"and {len(choice.rows) - MOST_MESHES} that take longer", highlight=False)
    if choice.slower:
        console.print(f"{_meshes(choice.slower)} not planned: no plan for them can be faster", highlight=False)
    if choice.far:
        console.print(f"{_meshes(choice.far)} not planned: expected to take at least 15% longer", highlight=False)
    if choice.large:
        console.print(
            f"{_meshes(choice.large)} too large: they do not fit even with all sharding and recomputation",
            highlight=False,
        )
    for mesh, why in choice.refused.items():
        console.print(f"no {escape(mesh)}: {escape(why)}", highlight=False)
    if choice.left:
        least = f", which take at least {seconds_text(choice.left_seconds)}" * bool(choice.left_seconds)
        gain = f" (at most {choice.gap:.0%} less than the best)" * bool(choice.left_seconds)
        console.print(f"--limit {seconds:g} left no time for {choice.left} more{least}{gain}", highlight=False)
    best = choice.rows[0]
    if best.fits:
        flags = f" --zero {best.zero}" * bool(best.zero) + f" --recompute {best.recompute}" * (best.recompute != "none")
        flags += " --sequence-parallel" * best.sequence_parallel
        flags += "".join(f" --context {name}={ranks}" for name, ranks in best.context.items())
        console.print(f"best: --mesh {best.mesh} --microbatches {best.microbatches}{flags}", highlight=False)
        for other in choice.room:
            needs = f"with at least {bytes_text(other.peak_memory)} on a device"
            text = f"{other.mesh} with {other.how}"
            console.print(f"{needs}: {escape(text)}, at least {seconds_text(other.seconds)}", highlight=False)
    else:
        console.print("none of them fits: use more devices, or a smaller step", highlight=False)


def _meshes(number: int) -> str:
    return f"{number} mesh was" if number == 1 else f"{number} meshes were"


# --- What each step of a compilation took ----------------------------------------------------------------------------


PARTS = {  # of the way, by the first step of each
    "capture": "capture", "normalise": "normalise", "shapes": "passes", "differentiate": "differentiation",
    "partition": "planning", "emission": "emission",
}  # fmt: skip
ALL, MOST_MEMORY = "total", "peak_memory"


def compile_times(directory: Path) -> dict[str, float]:
    """Seconds of every step that is in a program's program.json, of all of them, and this process' peak memory."""
    spent: dict[str, float] = json.loads((directory / "program.json").read_text())["timings"]
    return {**spent, ALL: round(sum(spent.values()), 4), MOST_MEMORY: peak_memory()}


def peak_memory() -> int:
    """The most bytes of memory that this process has had.

    Where there is /proc, from there: getrusage also counts what the process that started this one had at that moment.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def timings_table(name: str, spent: Mapping[str, float], summaries: Mapping[str, str]) -> Rows:
    """A row for every step, under the part of the way that it belongs to. summaries: what a step leaves."""
    printed = table("part", "step", "seconds", Column("share", 1), "leaves", title=f"the compilation of {name}")
    for step in (step for step in spent if step not in (ALL, MOST_MEMORY)):
        if step in PARTS:
            printed.add_section()
        share = spent[step] / (spent[ALL] or 1.0)
        printed.add_row(PARTS.get(step, ""), step, f"{spent[step]:.3f}", f"{share:.0%}", summaries.get(step, ""))
    printed.add_section()
    printed.add_row("all", "", f"{spent[ALL]:.3f}", "100%", f"{bytes_text(spent[MOST_MEMORY])} of memory at its peak")
    return printed


# --- Which stages a GPU does not record, as far as a program's graphs tell -------------------------------------------


def unfit_table(parts: list[UnfitPart], stages: int) -> Rows | str:
    """stages: how many there are. A stage whose F is not recorded has no other part that is."""
    if not parts:
        return (
            f"cuda_graphs: nothing speaks against recording the {stages} stages"
            if stages > 1
            else ("cuda_graphs: nothing speaks against recording the stage")
        )
    rows_table = table("stage", "part", "why", title="what cuda_graphs leaves as it is")
    for row in parts:
        rows_table.add_row(str(row.stage), "all" if row.part == "F" else row.part, escape(row.why))
    return rows_table
