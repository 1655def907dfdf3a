"""`csc energy`: the energy frontier of a planned step, and the clocks of one of its points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from csc.commands.model_options import Opening, PipelineOption, on_target, over
from csc.commands.printing import Column, JsonOption, console, print_json, table
from csc.simulation.page import bytes_text, seconds_text

if TYPE_CHECKING:
    from csc.reports.energy_report import EnergyReport


@on_target
def energy(
    opening: Opening,
    pp: PipelineOption = None,
    slack: Annotated[
        str, typer.Option("--slack", help="how much longer the step of the chosen clocks may be: 5% or 0.05")
    ] = "0%",
    changes: Annotated[
        int | None, typer.Option("--changes", help="most changes of clock on a rank in a step; else any number")
    ] = None,
    straggler: Annotated[
        float | None, typer.Option("--straggler", help="how many times this step another pipeline takes: 1.1")
    ] = None,
    orders: Annotated[
        bool, typer.Option("--orders", help="also compare the energy of other schedules and recomputations")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the clocks, for csc.run --clocks")
    ] = None,
    page: Annotated[Path | None, typer.Option("--page", help="write a page with the frontier and the clocks")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="write its picture, for a document")] = None,
    json_output: JsonOption = False,
) -> None:
    """Find the clocks of the fewest joules at each step time, beside a proven lower bound."""
    from csc.reports.energy_page import energy_page, energy_picture
    from csc.reports.energy_report import energy as report_of
    from csc.reports.energy_report import slack_of

    slack_of(slack)  # said before the model is traced
    with opening as compiled:
        report = report_of(over(pp, compiled), slack, changes, straggler, orders)
    if output is not None:
        output.write_text(json.dumps(report.clocks_file()))
    if page is not None:
        page.write_text(energy_page(report), encoding="utf-8")
    if svg is not None:
        svg.write_text(energy_picture(report), encoding="utf-8")
    if json_output:
        print_json(report.as_dict())
        return
    _show(report)
    if output is not None:
        console.print(f"wrote {escape(str(output))}", soft_wrap=True)


def _show(report: EnergyReport) -> None:
    from csc.reports.energy_page import joules_text, watts_text

    found = report.frontier
    columns: list[str | Column] = [
        "step",
        Column("over the plan", 3),
        "energy",
        Column("power", 2),
        "saved",
        "saved at most",
    ]
    shown = table(*columns, Column("changes of clock", 1), title=f"{report.schedule}, {report.layout}")
    usual = found.usual
    shown.add_row(
        seconds_text(usual.seconds), "", joules_text(usual.joules), watts_text(usual.watts), "", "", "highest clocks"
    )  # fmt: skip
    for point in report.points:
        mark = " *" if point is report.chosen else ""
        over_usual = f"{point.seconds / usual.seconds - 1:+.1%}"
        shown.add_row(
            seconds_text(point.seconds) + mark, over_usual, joules_text(point.joules), watts_text(point.watts),
            f"{found.saved(point):.1%}", f"{found.possible(point):.1%}", str(sum(point.changes)),
        )  # fmt: skip
    console.print(shown)
    count = sum(report.devices)
    console.print(
        f"energy: of {count} {'device' if count == 1 else 'devices'} from the first action to the last; gradients "
        "added over replicas and the optimizer's step are not in it",
        highlight=False,
    )
    console.print(
        "saved at most: no choice of clocks saves more with this order of actions (the program's dual bound)",
        highlight=False,
    )  # fmt: skip
    for source in report.sources:
        console.print(f"curves: {escape(source)}", highlight=False)
    charge = report.problem.change_seconds
    charge_text = (
        f"takes {seconds_text(charge)} of its rank" if charge else "is charged nothing: the profile knows no seconds"
    )
    console.print(f"a change of clock {charge_text}", highlight=False)
    if sum(report.chosen.changes):
        console.print(
            f"*: a clock is held for {seconds_text(report.shortest_hold)} at least; where setting one takes about as "
            "long, plan with clock_change_seconds in the profile, or with --changes",
            highlight=False,
        )
    _show_clocks(report)
    _show_orders(report)


def _show_clocks(report: EnergyReport) -> None:
    """Per rank what the chosen point runs at."""
    chosen = report.chosen
    columns: list[str | Column] = ["rank", "lowest clock", "highest clock", Column("mean", 1), "changes"]
    shown = table(*columns, title=f"* clocks at {seconds_text(chosen.seconds)} a step, in MHz")
    for rank, clocks in enumerate(chosen.clocks):
        if clocks:
            mean = sum(clocks) / len(clocks)
            shown.add_row(str(rank), str(min(clocks)), str(max(clocks)), f"{mean:.0f}", str(chosen.changes[rank]))
    console.print(shown)


def _show_orders(report: EnergyReport) -> None:
    from csc.reports.energy_page import joules_text

    if not report.orders:
        return
    title = f"order and clocks together, in at most {seconds_text(report.chosen.promised)}"
    shown = table("plan", "energy", "saved", Column("shortest", 1), Column("peak memory", 2), title=title)
    for row in report.orders:
        if row.joules is not None and row.saved is not None:
            shown.add_row(
                escape(row.name), joules_text(row.joules), f"{row.saved:.1%}", seconds_text(row.seconds),
                bytes_text(row.peak_memory),
            )  # fmt: skip
    console.print(shown)
    for row in report.orders:
        if row.joules is None:
            console.print(f"{escape(row.name)}: {escape(row.why)}", highlight=False)
