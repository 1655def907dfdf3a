"""Timelines as the files that commands write: JSON, a page, a picture, a trace for Perfetto.

write_timelines(timelines, title, output, page, chrome, svg, bound, limit, scale, note)      of paths that options give
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from csc.simulation.page import chrome_trace
from csc.simulation.page import page as page_text
from csc.simulation.page import svg as svg_text
from csc.simulation.timeline import Timeline, to_json


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
