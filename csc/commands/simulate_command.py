"""`csc simulate` and `csc timeline`: what a plan expects, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from csc.commands.memory_table import memory_table
from csc.commands.options import Opening, on_target
from csc.commands.printing import DebugOption, JsonOption, console, print_json, table
from csc.simulation.look import bytes_text, seconds_text


@on_target
def simulate(
    opening: Opening,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="pipeline ranks, instead of the mesh's pp")
    ] = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="schedule of the split to compare with, or none")
    ] = "1f1b",
    jitter: Annotated[
        bool, typer.Option("--jitter", help="disturb every action as a busy cluster does (J3 of arXiv 2605.18750)")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the plan's timeline, as JSON")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="write a page that shows both timelines")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="write them as one picture, for a document")] = None,
    chrome: Annotated[Path | None, typer.Option("--chrome", help="write a Chrome trace, for Perfetto")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What the plan will take: makespan, bubble and memory by rank, the lower bound, and a frozen-unaware baseline."""
    from dataclasses import replace

    from csc.reports.forecast import forecast
    from csc.reports.memory import memory_forecast
    from csc.simulation.jitter import J3

    with opening as compiled:
        if ranks is not None:
            compiled = compiled.with_options(mesh=replace(compiled.options.mesh, pp=ranks))
        found = forecast(compiled, None if baseline == "none" else baseline, J3 if jitter else None)
        held = memory_forecast(compiled.program, compiled.options)
    timelines = [found.plan, *([found.baseline] if found.baseline is not None else [])]
    _write_timelines(
        timelines, f"{compiled.program.name}: {found.layout}", output, page, chrome, svg, found.bound, found.memory
    )
    if json_output:
        print_json({**found.as_dict(), "memory": [row.as_dict() for row in held]})
        return
    shares = table(
        "rank", "holds", "busy", "bubble", "peak memory", "of it activations", title=f"{found.schedule}, {found.layout}"
    )
    for rank in found.as_dict()["ranks"]:
        shares.add_row(
            str(rank["rank"]), escape(rank["holds"]), seconds_text(rank["busy"]), f"{rank['bubble_share']:.1%}",
            bytes_text(rank["peak_memory"]), bytes_text(rank["peak_activations"]),
        )  # fmt: skip
    console.print(shares)
    console.print(memory_table(held, found.memory))
    console.print(f"makespan {seconds_text(found.plan.makespan)}; costs: {escape(found.costs)}", highlight=False)
    kind = "plans with any number of stages on a rank" if found.shared else "partitions into one stage a rank"
    console.print(
        f"lower bound {seconds_text(found.bound)}, over all {kind}: the plan is {found.gap:.1%} above it",
        highlight=False,
    )
    if found.baseline is not None:
        console.print(
            f"{found.baseline.name}: {seconds_text(found.baseline.makespan)}, peak memory "
            f"{bytes_text(max(found.baseline.peak_memory))}; the plan is {found.speedup:.2f} x as fast",
            highlight=False,
        )


def timeline(
    sources: Annotated[
        list[Path],
        typer.Argument(help="timeline files, and directories of compiled programs (what their plan expects)"),
    ],
    page: Annotated[Path | None, typer.Option("--page", help="write a page that shows them under each other")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="write them as one picture, for a document")] = None,
    chrome: Annotated[Path | None, typer.Option("--chrome", help="write a Chrome trace, for Perfetto")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Lay timelines on top of each other: what a plan expects, and what `csc.run --timeline` measured."""
    from csc.reports.forecast import comparison, read

    timelines = [read(source) for source in sources]
    _write_timelines(timelines, "timelines", None, page, chrome, svg)
    rows = comparison(timelines)
    if json_output:
        print_json({"timelines": [vars(row) for row in rows]})
        return
    means_of = table("timeline", "makespan", "over the first", "bubble", "mean F", "mean B", "mean W", "mean BW")
    for row in rows:
        means = [seconds_text(row.seconds[kind]) if kind in row.seconds else "" for kind in ("F", "B", "W", "BW")]
        means_of.add_row(
            escape(row.name), seconds_text(row.makespan), f"{row.over_first:.3f}", f"{row.bubble_share:.1%}", *means
        )
    console.print(means_of)


def _write_timelines(
    timelines: list[Any], title: str, output: Path | None, page: Path | None, chrome: Path | None,
    svg: Path | None, bound: float | None = None, limit: float | None = None,
) -> None:  # fmt: skip
    from csc.simulation.chrome import chrome_trace
    from csc.simulation.page import page as page_text
    from csc.simulation.timeline import to_json
    from csc.simulation.vector import svg as svg_text

    if output is not None:
        output.write_text(json.dumps(to_json(timelines[0])))
    if page is not None:
        page.write_text(page_text(timelines, title, bound, limit))
    if svg is not None:
        svg.write_text(svg_text(timelines, title, bound, limit))
    if chrome is not None:
        chrome.write_text(json.dumps(chrome_trace(timelines)))
