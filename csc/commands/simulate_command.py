"""`csc simulate` and `csc timeline`: what a plan expects, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from csc.commands.model_options import Opening, PipelineOption, on_target, over
from csc.commands.printing import Column, DebugOption, JsonOption, console, print_json, table
from csc.commands.tables import bound_text, memory_table, show_forecast, show_limits, step_text
from csc.errors import InputError
from csc.simulation.page import bytes_text, chrome_trace, seconds_text
from csc.simulation.page import page as page_text
from csc.simulation.page import svg as svg_text
from csc.simulation.timeline import Timeline, to_json

if TYPE_CHECKING:
    from csc.reports.forecast import Forecast, JitteredSchedule


# --- Timelines as the files that commands write: JSON, a page, a picture, a trace for Perfetto -----------------------


class Scale(StrEnum):
    """How wide timelines are drawn."""

    common = "common"
    own = "own"


ScaleOption = Annotated[
    Scale, typer.Option("--scale", help="of --page and --svg: one for all timelines, or each as wide as the picture")
]
OutputOption = Annotated[Path | None, typer.Option("-o", "--output", help="write the plan's timeline, as JSON")]
PageOption = Annotated[Path | None, typer.Option("--page", help="write a page that shows the timelines")]
SvgOption = Annotated[Path | None, typer.Option("--svg", help="write them as one picture, for a document")]
ChromeOption = Annotated[Path | None, typer.Option("--chrome", help="write a Chrome trace, for Perfetto")]


def write_timelines(
    timelines: Sequence[Timeline], title: str, output: Path | None, page: Path | None, chrome: Path | None,
    svg: Path | None, bound: float | None = None, limit: float | None = None, scale: Scale = Scale.common,
    note: str = "",
) -> None:  # fmt: skip
    """Each of the files that has a path; `output` gets the first timeline alone. note: a sentence for the page."""
    if output is not None:
        output.write_text(json.dumps(to_json(timelines[0])))
    if page is not None:
        page.write_text(page_text(timelines, title, bound, limit, scale is Scale.own, note))
    if svg is not None:
        svg.write_text(svg_text(timelines, title, bound, limit, scale is Scale.own))
    if chrome is not None:
        chrome.write_text(json.dumps(chrome_trace(timelines)))


# --- `csc simulate` and `csc timeline`: what a plan expects, and what was measured -----------------------------------


class JitterLevel(StrEnum):
    """J0: none."""

    J0 = "J0"
    J1 = "J1"
    J2 = "J2"
    J3 = "J3"


@on_target
def simulate(
    opening: Opening,
    pp: PipelineOption = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="schedule of the split to compare with, or none")
    ] = "1f1b",
    jitter: Annotated[
        JitterLevel | None,
        typer.Option(
            "--jitter", help="delay computes and messages as a busy cluster does (levels of arXiv 2605.18750)"
        ),
    ] = None,
    robust: Annotated[
        Path | None,
        typer.Option("--robust", help="write the order that is fastest on average under --jitter, for --schedule"),
    ] = None,
    output: OutputOption = None,
    page: PageOption = None,
    svg: SvgOption = None,
    chrome: ChromeOption = None,
    json_output: JsonOption = False,
) -> None:
    """Simulate the plan: makespan, bubble and memory by rank, a lower bound, and a frozen-agnostic baseline."""
    from csc.reports.forecast import forecast, jittered, memory_forecast
    from csc.simulation.simulate import level

    if robust is not None and jitter is None:
        raise InputError(
            "an order for jitter depends on how much there is", "--robust", "Give --jitter J1, J2 or J3 too"
        )
    delays = None if jitter is None else level(jitter)
    with opening as compiled:
        compiled = over(pp, compiled)
        prediction = forecast(compiled, None if baseline == "none" else baseline, delays)
        held = memory_forecast(compiled.program, compiled.options)
        rows, order = jittered(compiled, delays) if delays is not None else ((), None)
    if robust is not None:
        robust.write_text(str(order))
    timelines = [prediction.plan, *([prediction.baseline] if prediction.baseline is not None else [])]
    title = f"{compiled.program.name}: {prediction.layout}"
    write_timelines(timelines, title, output, page, chrome, svg, prediction.bound, prediction.memory)
    if json_output:
        orders = {} if jitter is None else {"jitter": {"level": jitter, "schedules": [vars(row) for row in rows]}}
        print_json({**prediction.as_dict(), "memory": [row.as_dict() for row in held], **orders})
        return
    show_forecast(prediction)
    console.print(memory_table(held, prediction.memory, prediction.devices))
    show_limits(prediction.limits)
    console.print(escape(step_text(prediction)), highlight=False)
    console.print(bound_text(prediction), highlight=False)
    if prediction.baseline is not None:
        console.print(_baseline_text(prediction), highlight=False)
    if jitter is not None:
        _show_orders(rows, jitter)


def _baseline_text(prediction: Forecast) -> str:
    """The baseline beside the plan."""
    assert prediction.baseline is not None
    peak = bytes_text(max(prediction.baseline.peak_memory))
    seconds = seconds_text(prediction.baseline.makespan)
    return f"{prediction.baseline.name}: {seconds}, peak memory {peak}; the plan is {prediction.speedup:.2f} x as fast"


def _show_orders(rows: Sequence[JitteredSchedule], jitter: str) -> None:
    """What jitter does to each order, beside its memory."""
    means = table("schedule", f"mean at {jitter}", "without", "peak memory", title="orders of these stages by jitter")
    for row in rows:
        means.add_row(escape(row.name), *map(seconds_text, (row.mean, row.calm)), bytes_text(row.peak_memory))
    console.print(means)


def timeline(
    sources: Annotated[
        list[Path],
        typer.Argument(help="timeline files, and directories of compiled programs (what their plan expects)"),
    ],
    page: PageOption = None,
    svg: SvgOption = None,
    scale: ScaleOption = Scale.common,
    chrome: ChromeOption = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare timelines: what a plan expects, and what `csc.run --timeline` measured."""
    from csc.reports.forecast import comparison, cost_note, read

    timelines = [read(source) for source in sources]
    names = [timeline.name for timeline in timelines]
    timelines = [
        replace(timeline, name=f"{timeline.name} ({source.name})") if names.count(timeline.name) > 1 else timeline
        for timeline, source in zip(timelines, sources)
    ]
    note = cost_note(sources, timelines)
    title = f"timelines: {', '.join(source.resolve().name for source in sources)}"
    write_timelines(timelines, title, None, page, chrome, svg, scale=scale, note=note)
    rows = comparison(timelines)
    if json_output:
        print_json({"timelines": [vars(row) for row in rows], "note": note})
        return
    means = [Column("mean F", 1), Column("mean B", 2), Column("mean W", 4), Column("mean BW", 3)]
    means_of = table("timeline", "makespan", "over the first", Column("bubble", 5), *means)
    for row in rows:
        parts = [seconds_text(row.seconds[kind]) if kind in row.seconds else "" for kind in ("F", "B", "W", "BW")]
        means_of.add_row(
            escape(row.name), seconds_text(row.makespan), f"{row.over_first:.3f}", f"{row.bubble_share:.1%}", *parts
        )
    console.print(means_of)
    if note:
        console.print(escape(note), highlight=False)
