"""Runs as one SVG picture: every rank's F, B and W and its memory, on one time scale for all runs or each on its own.

Terms: see csc.simulation.timeline. A *lane* is the strip of a rank: its boxes and, below them, its memory, of which the
state (grey) is accounted in the same way in every run.

    svg(timelines, title, bound, limit, own_scale) -> str

For documents, where csc.simulation.page, which can be zoomed, has no place. The legend names every colour. The picture
shrinks with its window; nothing in it is wider than WIDTH, for which letters are taken to be no wider than LETTER.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence

from csc.simulation.look import (
    BASE,
    GAP,
    LIMIT,
    MEANING,
    MEMORY,
    NOT_RECORDED,
    NUMBER,
    bytes_text,
    colour,
    levels,
    seconds_text,
    top_of,
    unit,
)  # fmt: skip
from csc.simulation.timeline import Event, Timeline

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
    legend, height = _legend(timelines, y + 8, bound, limit, most)
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


def _legend(
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
