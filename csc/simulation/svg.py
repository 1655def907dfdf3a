"""Runs as one static picture: every rank's boxes, messages and memory, on one time scale for all runs.

Terms: see csc.simulation.timeline and csc.simulation.look.

    svg(timelines, title, bound, limit, width, messages) -> str

For documents and small cases: each box is an element. `csc.simulation.page` draws large runs and can be zoomed.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence

from csc.simulation.look import (
    BASE,
    LIMIT,
    MEANING,
    MEMORY,
    bytes_text,
    colour,
    levels,
    seconds_text,
    ticks,
    unit,
)
from csc.simulation.timeline import Timeline

GUTTER, RIGHT, HEAD = 64, 14, 24  # left of the rows, right of them, and above each run
BOX, CURVE, GAP = 20, 16, 8
ROW = BOX + CURVE + GAP
DIGIT = 6.6  # width of a digit in a box

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1b1f24; } .head { font-weight: 600; font-size: 12px; }
.soft { fill: #59636e; } .state { fill: #dcdfe5; } .ground { fill: #ffffff; }
.rule { stroke: #d8dce1; } .ink { stroke: #1b1f24; }
@media (prefers-color-scheme: dark) {
text { fill: #e8eaed; } .soft { fill: #9ba4ae; } .state { fill: #33383f; } .ground { fill: #14171b; }
.rule { stroke: #343a42; } .ink { stroke: #e8eaed; } }
"""


def svg(
    timelines: Sequence[Timeline],
    title: str = "",
    bound: float | None = None,
    limit: float | None = None,
    width: int = 1000,
    messages: bool = True,
) -> str:
    """The picture's SVG text, `width` pixels wide. bound: seconds; limit: bytes of a rank. Names may hold any text."""
    span = max([timeline.makespan for timeline in timelines] + [bound or 0.0], default=0.0) or 1.0
    largest = max([size for t in timelines for size in t.peak_memory] + [limit or 0.0], default=0.0) or 1.0
    scale = (width - GUTTER - RIGHT) / span
    head = 30 if title else 10
    tops, top = [], head + 22
    for timeline in timelines:
        tops.append(top)
        top += HEAD + ROW * len(timeline.ranks) + 6
    height = top + 30

    def x(time: float) -> float:
        return GUTTER + time * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        f"<title>{html.escape(title or ', '.join(timeline.name for timeline in timelines))}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    if title:
        parts.append(f'<text class="head" x="12" y="20" style="font-size:14px">{html.escape(title)}</text>')
    parts += _axis(span, x, head, top, width)
    for timeline, place in zip(timelines, tops):
        parts += _run(timeline, x, place, largest, bound, limit, width, messages)
    parts += _legend(timelines, top + 14, bound, limit)
    return "\n".join([*parts, "</svg>", ""])


def _axis(span: float, x: Callable[[float], float], top: float, bottom: float, width: int) -> Iterator[str]:
    size, name = unit(span)
    step = ticks(span, max(width // 110, 2))
    yield f'<text class="soft" x="12" y="{top + 12}">{name}</text>'
    for i in range(int(span / step + 1e-9) + 1):
        at = f"{x(i * step):.1f}"
        yield f'<text class="soft" x="{at}" y="{top + 12}" text-anchor="middle">{i * step / size:.10g}</text>'
        yield f'<line class="rule" x1="{at}" x2="{at}" y1="{top + 18}" y2="{bottom}"/>'


def _run(
    timeline: Timeline,
    x: Callable[[float], float],
    top: float,
    largest: float,
    bound: float | None,
    limit: float | None,
    width: int,
    messages: bool,
) -> Iterator[str]:
    first = timeline.start
    share = sum(timeline.bubble_share) / max(len(timeline.ranks), 1)
    about = f"{seconds_text(timeline.makespan)}, bubble {share:.1%}"
    yield (
        f'<text class="head" x="12" y="{top + 15}">{html.escape(timeline.name)} '
        f'<tspan class="soft" font-weight="normal">{about}</tspan></text>'
    )
    top += HEAD
    for rank in range(len(timeline.ranks)):
        row = top + rank * ROW
        yield f'<text x="12" y="{row + BOX / 2 + 4}">rank {rank}</text>'
        yield from _memory(timeline, rank, x, row + BOX + CURVE, largest, limit, width)
    level = levels(timeline)
    for rank, events in enumerate(timeline.ranks):
        row = top + rank * ROW
        for event in events:
            fill, ink = colour(event.action.kind, level.get(event.action.stage, 0))
            left, wide = x(event.start - first), x(event.end) - x(event.start)
            yield (
                f'<rect x="{left:.2f}" y="{row}" width="{max(wide - 0.8, 0.4):.2f}" height="{BOX}" fill="{fill}">'
                f"<title>{event.action}: from {seconds_text(event.start - first)}, takes {seconds_text(event.seconds)}"
                "</title></rect>"
            )
            label = str(event.action.microbatch)
            if event.action.microbatch >= 0 and wide > len(label) * DIGIT + 2:
                middle = left + wide / 2
                yield f'<text x="{middle:.2f}" y="{row + 14}" text-anchor="middle" style="fill:{ink}">{label}</text>'
    for move in timeline.transfers if messages else ():
        down = move.destination_rank > move.source_rank
        yield (
            f'<line x1="{x(move.start - first):.2f}" y1="{top + move.source_rank * ROW + (BOX if down else 0)}" '
            f'x2="{x(move.end - first):.2f}" y2="{top + move.destination_rank * ROW + (0 if down else BOX)}" '
            f'stroke="{BASE[move.kind]}" stroke-opacity="0.7"/>'
        )
    bottom = top + ROW * len(timeline.ranks)
    for time, dash in ((timeline.makespan, ""), (bound, ' stroke-dasharray="5 4"')):
        if time is not None:
            yield f'<line class="ink" x1="{x(time):.2f}" x2="{x(time):.2f}" y1="{top - 2}" y2="{bottom}"{dash}/>'


def _memory(
    timeline: Timeline,
    rank: int,
    x: Callable[[float], float],
    bottom: float,
    largest: float,
    limit: float | None,
    width: int,
) -> Iterator[str]:
    def y(size: float) -> float:
        return bottom - size / largest * (CURVE - 2)

    state, end = timeline.state[rank], x(timeline.makespan)
    path = f"M{x(0):.2f} {bottom}V{y(state):.2f}"
    for time, size in timeline.memory[rank]:
        path += f"H{x(time - timeline.start):.2f}V{y(size):.2f}"
    peak = bytes_text(timeline.peak_memory[rank])
    yield f'<path d="{path}H{end:.2f}V{bottom}Z" fill="{MEMORY}"><title>rank {rank}: at most {peak}</title></path>'
    yield (
        f'<rect class="state" x="{x(0)}" y="{y(state):.2f}" width="{end - x(0):.2f}" height="{bottom - y(state):.2f}"/>'
    )
    if limit is not None:
        yield (
            f'<line x1="{GUTTER}" x2="{width - RIGHT}" y1="{y(limit):.2f}" y2="{y(limit):.2f}" stroke="{LIMIT}" '
            'stroke-dasharray="4 3"/>'
        )


def _legend(timelines: Sequence[Timeline], y: float, bound: float | None, limit: float | None) -> Iterator[str]:
    present = {event.action.kind for timeline in timelines for events in timeline.ranks for event in events}
    entries = [(f'fill="{BASE[kind]}"', f"{kind} {MEANING[kind]}") for kind in BASE if kind in present]
    entries += [(f'fill="{MEMORY}"', "activations"), ('class="state"', "state")]
    left = 12.0
    for look, text in entries:
        yield f'<rect x="{left}" y="{y - 9}" width="11" height="11" {look}/><text x="{left + 16}" y="{y}">{text}</text>'
        left += 34 + 6.2 * len(text)
    lines = [(f'stroke="{LIMIT}" stroke-dasharray="4 3"', "memory limit")] if limit is not None else []
    lines += [('class="ink" stroke-dasharray="5 4"', "lower bound")] if bound is not None else []
    for look, text in lines:
        yield f'<line x1="{left}" x2="{left + 16}" y1="{y - 4}" y2="{y - 4}" {look}/>'
        yield f'<text x="{left + 21}" y="{y}">{text}</text>'
        left += 39 + 6.2 * len(text)
