"""Runs as one HTML page: every rank's F, B and W, its messages and its memory, on one time scale for all runs or each
on its own.

Terms: see csc.simulation.timeline. A *tick* is the page's unit of time; the page holds whole ticks.

    page(timelines, title, bound, limit, own_scale, note) -> str

The page is self-contained: its script (page.js) draws the data that stands in it to canvas and asks for nothing from
outside.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from csc.simulation import summary
from csc.simulation.look import (
    BASE,
    GAP,
    LIMIT,
    MEANING,
    MEMORY,
    NUMBER,
    TINTS,
    bytes_text,
    colour,
    levels,
    seconds_text,
    top_of,
)  # fmt: skip
from csc.simulation.timeline import Curve, Event, Timeline

TICKS = 10**8  # in the longest run: a pixel is still a thousand ticks when zoomed in a hundredfold
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    timelines: Sequence[Timeline], title: str, bound: float | None = None, limit: float | None = None,
    own_scale: bool = False, note: str = "",
) -> str:  # fmt: skip
    """The page's HTML. bound: lower bound of the makespan in seconds; limit: bytes that a rank may hold. own_scale: the
    page opens with every run as wide as the page, which a checkbox changes. note: a line below the table.

    Times are shown from each run's own start. Names and the note may hold any text.
    """
    here = files("csc.simulation")
    data = json.dumps(_data(timelines, bound, limit), separators=(",", ":"), allow_nan=False)
    kinds = [kind for kind in BASE if kind in {e.action.kind for t in timelines for ranks in t.ranks for e in ranks}]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>\n{here.joinpath('page.css').read_text('utf-8')}</style></head><body>",
            f"<header><h1>{html.escape(title)}</h1>",
            _table(timelines, bound, limit),
            *([f"<p>{html.escape(note)}</p>"] if note else []),
            "</header>",
            '<div class="bar"><div class="tools">',
            _legend(kinds, timelines, limit, bound),
            '<span class="buttons">',
            '<label><input type="checkbox" id="messages" checked> messages</label>',
            '<label><input type="checkbox" id="memory" checked> memory</label>',
            f'<label{"" if len(timelines) > 1 else " hidden"}><input type="checkbox" id="own"'
            f"{' checked' if own_scale else ''}> each run on its own scale</label>",
            '<button id="out" title="zoom out (-)">−</button><button id="in" title="zoom in (+)">+</button>',
            '<button id="fit" title="whole run (0)">fit</button></span></div>',
            '<canvas id="axis"></canvas></div>',
            "<noscript><p>The picture needs JavaScript; the table above does not.</p></noscript>",
            '<main id="runs"></main>',
            "<footer>Drag, or <kbd>←</kbd> <kbd>→</kbd>, to move; <kbd>Ctrl</kbd> and the wheel, or <kbd>+</kbd> "
            "<kbd>−</kbd>, to zoom; <kbd>0</kbd> shows the whole run, <kbd>M</kbd> the messages, "
            "<kbd>S</kbd> each run on its own scale. Click a bar to follow "
            "its microbatch, <kbd>Esc</kbd> to let go.</footer>",
            '<div id="tip" role="status"></div>',
            f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>',
            f"<script>\n{here.joinpath('page.js').read_text('utf-8')}</script></body></html>\n",
        ]
    )


def _table(timelines: Sequence[Timeline], bound: float | None, limit: float | None) -> str:
    body = summary.rows(timelines, bound, limit)
    shown = [i for i in range(len(summary.COLUMNS)) if any(row[i] for row in body)]
    head = "".join(f"<th>{html.escape(summary.COLUMNS[i])}</th>" for i in shown)
    lines = ["<tr>" + "".join(f"<td>{_cell(row[i], i > 0)}</td>" for i in shown) + "</tr>" for row in body]
    notes = []
    if bound is not None:
        notes.append(f"Lower bound of the makespan: {seconds_text(bound)}.")
    if limit is not None:
        notes.append(f"Memory limit of a rank: {bytes_text(limit)}.")
    drawn = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="table">{drawn}</div>' + (f"<p>{' '.join(notes)}</p>" if notes else "")


def _cell(text: str, figures: bool) -> str:
    """A cell's text. figures: a line is not broken between a number and its unit, nor between rank and number."""
    return html.escape(re.sub(r"(?<=\d) (?=\S)|(?<=rank) ", "\u00a0", text) if figures else text)


def _legend(kinds: Sequence[str], timelines: Sequence[Timeline], limit: float | None, bound: float | None) -> str:
    """Every colour that page.js draws with, what a number in a bar is, and what a gap is."""
    parts = [f'<i style="background:{BASE[kind]}"></i>{kind} {MEANING[kind]}' for kind in kinds]
    parts.append(f'<i class="number">0</i>{NUMBER}')
    parts.append(f'<i class="idle"></i>{GAP}')
    if any(level for timeline in timelines for level in levels(timeline).values()):
        parts.append(f'<i style="background:{colour("F", 1)[0]}"></i>lighter: a later stage of the same rank')
    moved = {move.kind for timeline in timelines for move in timeline.transfers}
    named = {"F": "message with activations", "B": "message with gradients"}
    parts += [f'<i class="line" style="border-color:{BASE[kind]};border-top-style:solid"></i>{name}'
              for kind, name in named.items() if kind in moved]  # fmt: skip
    if any(timeline.records_memory for timeline in timelines):
        parts.append(f'<i style="background:{MEMORY}"></i>memory: activations')
        parts.append('<i class="held"></i>memory: parameters, gradients, optimizer state')
    if limit is not None:
        if any(size > limit for timeline in timelines for size in timeline.peak_memory):
            parts.append(f'<i style="background:{LIMIT}"></i>memory above the limit')
        above = "" if limit <= top_of(timelines, limit) else ", above the picture"
        parts.append(f'<i class="line" style="border-color:{LIMIT}"></i>memory limit{above}')
    if bound is not None:
        parts.append('<i class="line upright"></i>lower bound')
    return '<span class="legend">' + "".join(f"<span>{part}</span>" for part in parts) + "</span>"


def _data(timelines: Sequence[Timeline], bound: float | None, limit: float | None) -> dict[str, Any]:
    """What page.js draws. Times are ticks since the run's start, each written as its distance from the one before."""
    span = max((timeline.makespan for timeline in timelines), default=0.0) or 1.0
    tick = span / TICKS
    return {
        "tick": tick,
        "bound": None if bound is None else round(bound / tick),
        "limit": limit,
        "top": top_of(timelines, limit),
        "kinds": list(BASE),
        "meaning": list(MEANING.values()),
        "colours": [[colour(kind, level) for level in range(len(TINTS))] for kind in BASE],
        "memory": MEMORY,
        "limitColour": LIMIT,
        "runs": [_run(timeline, tick) for timeline in timelines],
    }


def _run(timeline: Timeline, tick: float) -> dict[str, Any]:
    level = levels(timeline)
    start = timeline.start
    moves = sorted(timeline.transfers, key=lambda transfer: transfer.start)
    spans = [(round((move.start - start) / tick), round((move.end - start) / tick)) for move in moves]
    return {
        "name": timeline.name,
        "makespan": round(timeline.makespan / tick),
        "bubble": [round(share, 4) for share in timeline.bubble_share],
        "state": [round(size) for size in timeline.state],
        "levels": {str(stage): min(place, len(TINTS) - 1) for stage, place in level.items()},
        "ranks": [_events(events, start, tick) for events in timeline.ranks],
        "recorded": timeline.records_memory,
        "memory": [_curve(curve, start, tick) for curve in timeline.memory],
        "moves": {
            "kind": [move.kind for move in moves],
            "source": [move.source for move in moves],
            "destination": [move.destination for move in moves],
            "microbatch": [move.microbatch for move in moves],
            "from": [move.source_rank for move in moves],
            "to": [move.destination_rank for move in moves],
            "size": [round(move.size) for move in moves],
            "start": _steps([first for first, _ in spans]),
            "length": [last - first for first, last in spans],
        },
    }


def _events(events: Sequence[Event], start: float, tick: float) -> dict[str, Any]:
    number = {kind: i for i, kind in enumerate(BASE)}
    times = [round((time - start) / tick) for event in events for time in (event.start, event.end)]
    return {
        "kind": [number[event.action.kind] for event in events],
        "stage": [event.action.stage for event in events],
        "microbatch": [event.action.microbatch for event in events],
        "times": _steps(times),  # start and end of each in turn
    }


def _curve(curve: Curve, start: float, tick: float) -> dict[str, Any]:
    return {"times": _steps([round((time - start) / tick) for time, _ in curve]), "sizes": [round(s) for _, s in curve]}


def _steps(times: Sequence[int]) -> list[int]:
    return [time - before for before, time in zip([0, *times], times)]
