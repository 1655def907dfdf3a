"""Runs as pictures: one HTML page, one SVG, or Chrome trace events for Perfetto."""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any

from csc.simulation.timeline import Curve, Event, Timeline, Transfer

# --- How runs look in pictures and figures: colours of actions, seconds and bytes as text ----------------------------
#
# Terms: the *level* of a stage is its place among the stages of its rank; later chunks are drawn lighter. The colours
# of F, B, W, BW and REDUCE are those of Okabe and Ito (2008), which readers with any kind of colour vision tell apart;
# they also differ in brightness.


BASE = {
    "F": "#0072b2",
    "B": "#e69f00",
    "W": "#009e73",
    "BW": "#f0e442",
    "REDUCE": "#cc79a7",
    "GATHER": "#56b4e9",
    "FREE": "#9aa1a9",
    "SEND": "#6b747e",
    "RECV": "#9aa1a9",
}
MEANING = {
    "F": "forward",
    "B": "input gradients",
    "W": "weight gradients",
    "BW": "both, region by region",
    "REDUCE": "gradient sum over ranks",
    "GATHER": "starting to make parameters whole",
    "FREE": "dropping whole parameters",
    "SEND": "waiting in a send",
    "RECV": "waiting in a receive",
}
TINTS = (0.0, 0.35, 0.55, 0.7)  # share of white at each level
LIMIT = "#d55e00"
MEMORY = "#8a7fb8"
NUMBER = "number in a bar: its microbatch"
GAP = "no bar: the rank is idle"
NOT_RECORDED = "not recorded"  # of what a measured run does not know


def colour(kind: str, level: int = 0) -> tuple[str, str]:
    """Fill of a box and the ink that can be read on it, black or white."""
    share = TINTS[min(level, len(TINTS) - 1)]
    parts = [int(BASE[kind][i : i + 2], 16) for i in (1, 3, 5)]
    parts = [round(part + (255 - part) * share) for part in parts]
    linear = [(part / 255 / 12.92) if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    brightness = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # WCAG 2 relative luminance
    return "#" + "".join(f"{part:02x}" for part in parts), "#ffffff" if brightness < 0.18 else "#000000"


def levels(timeline: Timeline) -> dict[int, int]:
    """The level of each stage: its place among the stages of its rank."""
    found: dict[int, int] = {}
    for events in timeline.ranks:
        stages = sorted({event.action.stage for event in events if event.action.computes})
        found.update((stage, level) for level, stage in enumerate(stages))
    return found


def top_of(timelines: Sequence[Timeline], limit: float | None) -> float:
    """Bytes at the top of a memory lane: the limit, where what is used is not lost below it, else the largest peak."""
    peak = max((size for one in timelines for size in one.peak_memory), default=0.0) or 1.0
    return max(peak, limit) if limit is not None and limit <= 4 * peak else peak


def unit(span: float) -> tuple[float, str]:
    """The unit in which times up to `span` seconds read well, and its seconds."""
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if span >= 2 * size:
            return size, name
    return 1e-6, "µs"


def seconds_text(seconds: float) -> str:
    """Three digits or more, in s, ms or µs."""
    size, name = unit(seconds)
    return f"{_digits(seconds / size)} {name}"


def bytes_text(size: float) -> str:
    """Three digits or more, in B, KiB, MiB, GiB or TiB."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if name == "B" else f"{_digits(size)} {name}"
        size /= 1024
    return f"{_digits(size)} TiB"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


# --- What a table says about runs: one row each, as text -------------------------------------------------------------


COLUMNS = (
    "run",
    "ranks",
    "makespan",
    "against the first",
    "over the bound",
    "bubble",
    "peak memory",
    "peak activations",
)


def rows(timelines: Sequence[Timeline], bound: float | None = None, limit: float | None = None) -> list[list[str]]:
    """A row per timeline, by COLUMNS. bound: lower bound of the makespan in seconds; limit: bytes of a rank."""
    return [_row(timeline, timelines[0], bound, limit) for timeline in timelines]


def _row(timeline: Timeline, first: Timeline, bound: float | None, limit: float | None) -> list[str]:
    shares = timeline.bubble_share or (0.0,)
    worst = max(range(len(shares)), key=lambda rank: shares[rank])
    return [
        timeline.name,
        str(len(timeline.ranks)),
        seconds_text(timeline.makespan),
        f"{timeline.makespan / first.makespan:.3f} ×" if timeline is not first and first.makespan > 0 else "",
        f"{timeline.makespan / bound:.3f} ×" if bound else "",
        f"mean {sum(shares) / len(shares):.1%}, worst {shares[worst]:.1%} (rank {worst})",
        _peak(timeline.peak_memory, limit) if timeline.records_memory else NOT_RECORDED,
        _peak(timeline.peak_activations, None) if timeline.records_memory else NOT_RECORDED,
    ]


def _peak(sizes: Sequence[float], limit: float | None) -> str:
    if not sizes:
        return ""
    rank = max(range(len(sizes)), key=lambda r: sizes[r])
    over = ", over the limit" if limit is not None and sizes[rank] > limit else ""
    return f"{bytes_text(sizes[rank])} (rank {rank}){over}"


# --- Runs as one HTML page -------------------------------------------------------------------------------------------
#
# It shows every rank's F, B and W, its messages and its memory, on one time scale for all runs or each on its own.
#
# Terms: see csc.simulation.timeline. A *tick* is the page's unit of time; the page holds whole ticks.
#
# The page is self-contained: its script (page.js) draws the data that stands in it to canvas and asks for nothing from
# outside.


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
    body = rows(timelines, bound, limit)
    shown = [i for i in range(len(COLUMNS)) if any(row[i] for row in body)]
    head = "".join(f"<th>{html.escape(COLUMNS[i])}</th>" for i in shown)
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


# --- Runs as one SVG picture -----------------------------------------------------------------------------------------
#
# It shows every rank's F, B and W and its memory, on one time scale for all runs or each on its own.
#
# Terms: see csc.simulation.timeline. A *lane* is the strip of a rank: its boxes and, below them, its memory, of which
# the state (grey) is accounted in the same way in every run.
#
# For documents, where csc.simulation.page, which can be zoomed, has no place. The legend names every colour. The
# picture shrinks with its window; nothing in it is wider than WIDTH, for which letters are taken to be no wider than
# LETTER.


WIDTH, LEFT, RIGHT, TOP = 1000, 84, 16, 52
BOX, CURVE, SPACE, HEAD, AXIS, LINE = 18, 20, 7, 30, 16, 18
LETTER = 0.62  # of the font's size: the mean width of a letter
STYLE = """
svg { max-width: 100%; height: auto; }
text { font: 11px system-ui, sans-serif; fill: #1b1f24; } .head { font-weight: 600; font-size: 12px; }
.title { font-weight: 600; font-size: 14px; } .soft { fill: #59636e; } .state { fill: #c3c9d1; }
.ground { fill: #ffffff; }
.lane { fill: #f3f4f6; } .rule { stroke: #d8dce1; } .ink { stroke: #1b1f24; }
@media (prefers-color-scheme: dark) {
text { fill: #e8eaed; } .soft { fill: #9ba4ae; } .state { fill: #4a515a; } .ground { fill: #14171b; }
.lane { fill: #1d2126; } .rule { stroke: #343a42; } .ink { stroke: #e8eaed; } }
"""


def svg(
    timelines: Sequence[Timeline], title: str, bound: float | None = None, limit: float | None = None,
    own_scale: bool = False,
) -> str:  # fmt: skip
    """The picture. bound: lower bound of the makespan in seconds; limit: bytes that a rank may hold. Curves are drawn
    up to the largest peak, or to the limit if that is at most four times as much; else it stands in the legend alone.
    own_scale: every run is as wide as the picture, on an axis of its own.
    """
    most = top_of(timelines, limit)
    drawn_limit = limit if limit is not None and limit <= most else None
    titles = textwrap.wrap(title, _fitting(14, WIDTH - 24)) or [""]
    longest = max((one.makespan for one in timelines), default=0.0) or 1.0
    parts: list[str] = []
    rules: list[str] = []  # below what else is drawn
    top = y = float(TOP + LINE * (len(titles) - 1) - (AXIS if own_scale else 0))
    for number, one in enumerate(timelines, 1):
        span = max((one.makespan or 1.0) if own_scale else longest, bound or 0.0)
        scale = (WIDTH - LEFT - RIGHT) / span
        parts += _heading(one, y)
        y += HEAD + (AXIS if own_scale else 0)
        start = y if own_scale else top
        for rank in range(len(one.ranks)):
            parts += _lane(one, rank, y, scale, most, drawn_limit)
            y += BOX + (CURVE if one.records_memory else 0) + SPACE
        y += SPACE
        if own_scale or number == len(timelines):
            rules += _axis(span, scale, start, y)
            if bound is not None:
                x = LEFT + bound * scale
                parts.append(_line(x, start, x, y, "ink", ' stroke-dasharray="5 4"'))
    legend, height = _vector_legend(timelines, y + 8, bound, limit, most)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height:.0f}"/>',
            *(_text(12, 20 + LINE * i, line, "title") for i, line in enumerate(titles)),
            *rules,
            *parts,
            *legend,
            "</svg>\n",
        ]
    )


def _heading(one: Timeline, y: float) -> list[str]:
    idle = sum(one.bubble_share) / max(len(one.ranks), 1)
    fullest = f"fullest rank {bytes_text(max(one.peak_memory, default=0.0))}"
    memory = fullest if one.records_memory else f"memory {NOT_RECORDED}"
    note = f"{seconds_text(one.makespan)}, idle {idle:.1%}, {memory}"
    room = _fitting(12, WIDTH - 24) - len(note) - 1
    name = one.name if len(one.name) <= room else one.name[: room - 1] + "…"
    return [f'<text class="head" x="12" y="{y + 18:.1f}">{html.escape(name)} <tspan class="soft" '
            f'font-weight="400">{html.escape(note)}</tspan></text>']  # fmt: skip


def _lane(one: Timeline, rank: int, y: float, scale: float, most: float, limit: float | None) -> Iterator[str]:
    yield _text(12, y + BOX - 5, f"rank {rank}")
    if one.records_memory:
        yield _text(12, y + BOX + CURVE - 6, bytes_text(one.peak_memory[rank]), "soft")
    level = levels(one)
    for event in one.ranks[rank]:
        if event.action.kind in BASE:
            yield from _box(event, level.get(event.action.stage, 0), one.start, y, scale)
    if one.records_memory:
        yield from _memory(one, rank, y + BOX + 1, scale, most, limit)


def _box(event: Event, level: int, start: float, y: float, scale: float) -> Iterator[str]:
    fill, ink = colour(event.action.kind, level)
    x, width = LEFT + (event.start - start) * scale, event.seconds * scale
    drawn = width - 0.4 if width > 2 else max(width, 0.3)
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{drawn:.1f}" height="{BOX}" fill="{fill}"/>'
    number = str(event.action.microbatch)
    if event.action.microbatch >= 0 and width > 6.6 * len(number) + 1:
        style = f'x="{x + width / 2:.1f}" y="{y + 12.5:.1f}" text-anchor="middle" style="fill:{ink};font-size:10px"'
        yield f"<text {style}>{number}</text>"


def _memory(one: Timeline, rank: int, y: float, scale: float, most: float, limit: float | None) -> Iterator[str]:
    """The lane's ground, the state, what is above it, and what of that is above the limit."""
    width, bottom = one.makespan * scale, y + CURVE

    def place(size: float) -> float:
        return bottom - min(size / most, 1.0) * (CURVE - 1)

    yield f'<rect class="lane" x="{LEFT}" y="{y:.1f}" width="{width:.1f}" height="{CURVE}"/>'
    state = one.state[rank]
    yield _area([(0.0, state), (one.makespan, state)], one.makespan, 0.0, state, scale, place, 'class="state"')
    curve = [(time - one.start, size) for time, size in one.memory[rank]]
    yield _area(curve, one.makespan, state, math.inf, scale, place, f'fill="{MEMORY}"')
    if limit is not None:
        if one.peak_memory[rank] > limit:
            yield _area(curve, one.makespan, limit, math.inf, scale, place, f'fill="{LIMIT}"')
        yield _line(LEFT, place(limit), LEFT + width, place(limit), "", f' stroke="{LIMIT}" stroke-dasharray="4 3"')


def _area(
    curve: Sequence[tuple[float, float]], end: float, low: float, high: float, scale: float,
    place: Callable[[float], float], look: str,
) -> str:  # fmt: skip
    """The part of a step curve between two sizes, as a path."""
    base = place(low)
    points = [f"M{LEFT:.1f} {base:.1f}"]
    now = base
    for time, size in curve:
        x, height = LEFT + max(time, 0.0) * scale, place(min(max(size, low), high))
        if abs(height - now) >= 0.1:
            points.append(f"H{x:.1f}V{height:.1f}")
            now = height
    return f'<path d="{"".join(points)}H{LEFT + end * scale:.1f}V{base:.1f}Z" {look}/>'


def _axis(span: float, scale: float, top: float, bottom: float) -> Iterator[str]:
    """Marks above `top`, and a rule from each down to `bottom`."""
    size, name = unit(span)
    rough = span / 8
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    yield _text(12, top - 10, f"time, {name}", "soft")
    for i in range(int(span / step) + 1):
        x = LEFT + i * step * scale
        yield f'<text class="soft" x="{x:.1f}" y="{top - 10:.1f}" text-anchor="middle">{i * step / size:g}</text>'
        yield _line(x, top - 5, x, bottom, "rule", "")


def _vector_legend(
    timelines: Sequence[Timeline], y: float, bound: float | None, limit: float | None, most: float
) -> tuple[list[str], float]:
    """What every colour means, in rows as wide as the picture; (elements, height of the whole picture)."""
    kinds = {event.action.kind for one in timelines for events in one.ranks for event in events}
    entries = [(f'fill="{BASE[kind]}"', f"{kind}: {meaning}") for kind, meaning in MEANING.items() if kind in kinds]
    entries.append(('fill="none" class="rule"', GAP))
    if any(level for one in timelines for level in levels(one).values()):
        entries.append((f'fill="{colour("F", 1)[0]}"', "lighter: a later stage of the same rank"))
    if any(one.records_memory for one in timelines):
        entries.append(('class="state"', "memory: parameters, gradients, optimizer state"))
        entries.append((f'fill="{MEMORY}"', "memory: activations"))
    if limit is not None:
        if any(size > limit for one in timelines for size in one.peak_memory):
            entries.append((f'fill="{LIMIT}"', "memory above the limit"))
        above = "" if limit <= most else ", above the picture"
        entries.append((f'fill="none" stroke="{LIMIT}" stroke-dasharray="3 2"', f"limit: {bytes_text(limit)}{above}"))
    if bound is not None:
        dashed = 'fill="none" class="ink" stroke-dasharray="3 2"'
        entries.append((dashed, f"no such plan is faster: {seconds_text(bound)}"))
    found, x = [], 12.0
    for look, words in (*entries, ("", NUMBER)):
        mark = 16 if look else 0
        width = mark + LETTER * 11 * len(words) + 14
        if x + width > WIDTH and x > 12:
            x, y = 12.0, y + LINE
        if look:
            found.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="11" height="11" {look}/>')
        found.append(_text(x + mark, y + 10, words))
        x += width
    return found, y + 24


def _fitting(size: float, width: float) -> int:
    """How many letters of a font's size fit into a width."""
    return int(width / (LETTER * size))


def _text(x: float, y: float, words: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}">{html.escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str, more: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{more}/>'


# --- Timelines as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing ---------------------------
#
# Terms: a *process* (pid) is a timeline, a *thread* (tid) a rank of it, so that plan, baseline and measured run lie
# one under the other. Phases: "M" names, "X" an event with its duration, "b" and "e" a message on its way, "s" and "f"
# the arrow from the action that made a message to the one that takes it, "C" memory. Times are microseconds. Source:
# "Trace Event Format" of the Chromium project.
#
# It is a view: what reads a run back is `csc.simulation.timeline.from_json`.


COLOURS = {  # names that chrome://tracing knows; Perfetto colours by the name's first word
    "F": "thread_state_running",
    "B": "thread_state_iowait",
    "W": "thread_state_runnable",
    "BW": "thread_state_uninterruptible",
    "REDUCE": "rail_load",
    "GATHER": "rail_response",
    "FREE": "grey",
    "SEND": "grey",
    "RECV": "grey",
}
INSIDE = 1e-3  # an arrow binds to the box that its end lies in, so it starts this far before the box ends

Record = dict[str, Any]


def chrome_trace(timelines: Sequence[Timeline]) -> Record:
    """The trace of these timelines, each a process of its own. Events are sorted by time, names come first."""
    names: list[Record] = []
    records: list[Record] = []
    flow = 1
    for pid, timeline in enumerate(timelines, 1):
        names += _names(pid, timeline)
        for events in timeline.ranks:
            records += (_trace_box(pid, event) for event in events)
        for rank, curve in enumerate(timeline.memory):
            records += (_trace_memory(pid, rank, time, size) for time, size in curve)
        by_action: dict[tuple[str, int, int], Event] = {
            (part.kind, part.stage, part.microbatch): event
            for events in timeline.ranks
            for event in events
            if event.action.computes
            for part in event.action.parts
        }
        for transfer in timeline.transfers:
            maker = by_action.get((transfer.kind, transfer.source, transfer.microbatch))
            taker = by_action.get((transfer.kind, transfer.destination, transfer.microbatch))
            records += _message(pid, flow, transfer)
            if maker is not None and taker is not None:
                records += _arrow(pid, flow, maker, taker)
            flow += 1
    records.sort(key=lambda record: record["ts"])
    return {"traceEvents": names + records, "displayTimeUnit": "ms"}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(pid: int, timeline: Timeline) -> Iterator[Record]:
    def named(what: str, tid: int, **args: Any) -> Record:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}

    yield named("process_name", 0, name=timeline.name)
    yield named("process_sort_index", 0, sort_index=pid)
    for rank in range(len(timeline.ranks)):
        yield named("thread_name", rank, name=f"rank {rank}")
        yield named("thread_sort_index", rank, sort_index=rank)


def _trace_box(pid: int, event: Event) -> Record:
    action = event.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind,
        "cname": COLOURS[action.kind],
        "pid": pid,
        "tid": event.rank,
        "ts": _micro(event.start),
        "dur": round(_micro(event.end) - _micro(event.start), 3),
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _trace_memory(pid: int, rank: int, time: float, size: float) -> Record:
    return {
        "ph": "C",
        "name": f"memory of rank {rank}",
        "pid": pid,
        "tid": rank,
        "ts": _micro(time),
        "args": {"bytes": size},
    }


def _message(pid: int, number: int, transfer: Transfer) -> Iterator[Record]:
    shared = {
        "name": f"{transfer.kind} {transfer.source}>{transfer.destination}",
        "cat": "message",
        "id": number,
        "pid": pid,
        "tid": transfer.source_rank,
    }
    yield {**shared, "ph": "b", "ts": _micro(transfer.start), "args": _about(transfer)}
    yield {**shared, "ph": "e", "ts": _micro(transfer.end), "args": {}}


def _about(transfer: Transfer) -> Record:
    return {
        "microbatch": transfer.microbatch,
        "bytes": transfer.size,
        "to": f"rank {transfer.destination_rank}",
    }


def _arrow(pid: int, number: int, maker: Event, taker: Event) -> Iterator[Record]:
    shared = {"name": "message", "cat": "flow", "id": number, "pid": pid}
    leaves = max(_micro(maker.start), _micro(maker.end) - INSIDE)
    yield {**shared, "ph": "s", "tid": maker.rank, "ts": leaves}
    yield {**shared, "ph": "f", "bp": "e", "tid": taker.rank, "ts": max(_micro(taker.start), leaves)}
