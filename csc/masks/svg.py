"""A mask's picture as SVG text that stands alone: no scripts, no fonts, light and dark.

Terms: see csc.masks.picture. The *strips* beside the axes show what tokens are, with a notch where a document starts.

    svg(picture) -> str

One path a colour: a picture of 1,024 x 1,024 tiles is some 10 to 300 kB.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from csc.masks.look import ANY, HIDDEN, headline, rank_colour, type_colour, type_name
from csc.masks.picture import Picture, rectangles, ticks

LEFT, TOP, SIDE, STRIP, GAP, LEGEND, BOTTOM = 74, 98, 640, 9, 5, 216, 22
SMALLEST = 90  # a cross-attention's short side
ROW = 21

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1b1f24; }
.title { font-size: 17px; font-weight: 600; } .head { font-weight: 600; } .soft { fill: #5b6570; }
.ground { fill: #ffffff; } .field { fill: #f3f5f7; } .rule { stroke: #ffffff; } .tick { stroke: #8d96a0; }
.bar { fill: #e3e7eb; } .frame { fill: none; stroke: #c8ced5; }
@media (prefers-color-scheme: dark) {
text { fill: #e8eaed; } .soft { fill: #9ba4ae; } .ground { fill: #14171b; } .field { fill: #20252b; }
.rule { stroke: #14171b; } .tick { stroke: #6b747e; } .bar { fill: #2b3138; } .frame { stroke: #434b54; } }
"""


def svg(picture: Picture) -> str:
    """The picture's SVG text."""
    scale = SIDE / max(picture.queries, picture.keys)  # pixels of a token
    wide, high = max(picture.keys * scale, SMALLEST), max(picture.queries * scale, SMALLEST)
    x_scale, y_scale = wide / picture.keys, high / picture.queries
    width = LEFT + wide + 30 + LEGEND
    entries = list(_legend(picture, LEFT + wide + 30, TOP))
    height = max(TOP + high + BOTTOM, entries[-1][0] + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img">',
        f"<title>{html.escape(picture.title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="title" x="20" y="30">{html.escape(picture.title)}</text>',
        f'<text class="soft" x="20" y="50">{html.escape(headline(picture))}</text>',
        f'<rect class="field" x="{LEFT}" y="{TOP}" width="{wide:.2f}" height="{high:.2f}"/>',
        f'<g transform="translate({LEFT} {TOP}) scale({picture.cell * x_scale:.8g} {picture.cell * y_scale:.8g})" '
        'shape-rendering="crispEdges">',
        *_cells(picture),
        "</g>",
        *_grid(picture, x_scale, y_scale, wide, high),
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{wide:.2f}" height="{high:.2f}"/>',
        *_axis(picture, 0, y_scale),
        *_axis(picture, 1, x_scale),
        *(line for _, line in entries),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _cells(picture: Picture) -> Iterator[str]:
    """One path for each rank and for visible or hidden; the last cell of an axis may be short."""
    columns, rows = picture.keys / picture.cell, picture.queries / picture.cell
    for code, boxes in rectangles(picture.cells).items():
        rank, visible = divmod(code - 1, 2)
        path = "".join(
            f"M{x} {y}h{min(wide, columns - x):.6g}v{min(high, rows - y):.6g}H{x}z" for x, y, wide, high in boxes
        )
        look = "" if visible else f' fill-opacity="{HIDDEN}"'
        yield f'<path fill="{rank_colour(rank, len(picture.loads))}"{look} d="{path}"/>'


def _grid(picture: Picture, x_scale: float, y_scale: float, wide: float, high: float) -> Iterator[str]:
    """Lines between tiles, where they do not cover them."""
    block, path = picture.block, ""
    if block * y_scale >= 5:
        path += "".join(f"M{LEFT} {TOP + at * y_scale:.2f}h{wide:.2f}" for at in range(block, picture.queries, block))
    if block * x_scale >= 5:
        path += "".join(f"M{LEFT + at * x_scale:.2f} {TOP}v{high:.2f}" for at in range(block, picture.keys, block))
    if path:
        line = 0.4 if picture.block * min(x_scale, y_scale) < 10 else 0.8
        yield f'<path class="rule" stroke-width="{line}" fill="none" d="{path}"/>'


def _axis(picture: Picture, axis: int, scale: float) -> Iterator[str]:
    """Strip, ticks and name of an axis: 0 the queries, downwards at the left; 1 the keys, at the top."""
    tokens = (picture.queries, picture.keys)[axis]
    near = (LEFT, TOP)[axis] - GAP - STRIP
    origin = (TOP, LEFT)[axis]

    def box(start: float, end: float, look: str) -> str:
        at, long = origin + start * scale, (end - start) * scale
        place = f'x="{near}" y="{at:.2f}" width="{STRIP}" height="{long:.2f}"'
        if axis:
            place = f'x="{at:.2f}" y="{near}" width="{long:.2f}" height="{STRIP}"'
        return f"<rect {place} {look}/>"

    for start, end, kind in picture.runs[axis]:
        yield box(start, end, f'fill="{type_colour(kind)}"')
    starts = picture.starts[axis]
    if len(starts) * 5 < tokens * scale:
        notch = 1.4 / scale
        yield from (box(at - notch / 2, at + notch / 2, 'class="ground"') for at in starts)
    step, label = ticks(tokens)
    for at in range(0, tokens + 1, step):
        place = origin + at * scale
        if axis:
            yield f'<path class="tick" d="M{place:.2f} {near - 2}v-4"/>'
            yield f'<text class="soft" x="{place:.2f}" y="{near - 10}" text-anchor="middle">{label(at)}</text>'
        else:
            yield f'<path class="tick" d="M{near - 2} {place:.2f}h-4"/>'
            yield f'<text class="soft" x="{near - 10}" y="{place + 4:.2f}" text-anchor="end">{label(at)}</text>'
    if axis:
        yield f'<text class="head" x="{LEFT - 12}" y="{near - 10}" text-anchor="end">keys</text>'
    else:
        turned = f'transform="translate(18 {TOP + tokens * scale / 2:.0f}) rotate(-90)"'
        yield f'<text class="head" {turned} text-anchor="middle">queries</text>'


def _legend(picture: Picture, x: float, y: float) -> Iterator[tuple[float, str]]:
    """(lower edge, element) of everything right of the mask."""
    colour = ANY if picture.loads else rank_colour(0, 0)
    full, partial, empty = picture.tiles
    y, end = y + 10, x + LEGEND - 20
    yield y, f'<text class="head" x="{x}" y="{y}">tiles</text>'
    total = max(sum(picture.tiles), 1)
    inside = picture.cell < picture.block
    rows = [
        ("full", full, f'fill="{colour}"'),
        ("partial", partial, f'fill="{colour}" fill-opacity="{HIDDEN}"'),
        ("empty", empty, 'class="field"'),
    ]
    for name, number, look in rows:
        y += ROW
        yield y, f'<rect x="{x}" y="{y - 11}" width="13" height="13" {look}/>'
        if name == "partial" and inside:
            yield y, f'<path d="M{x} {y - 11}l13 13h-13z" fill="{colour}"/>'
        yield y, f'<text x="{x + 21}" y="{y}">{name}</text>'
        yield (
            y,
            f'<text class="soft" x="{end}" y="{y}" text-anchor="end">{number:,} ({number / total:.0%})</text>',
        )
    kinds: dict[int, int] = {}
    for first, behind, kind in picture.runs[0]:
        kinds[kind] = kinds.get(kind, 0) + behind - first
    y += ROW + 12
    yield y, f'<text class="head" x="{x}" y="{y}">tokens</text>'
    for kind in sorted(kinds):
        y += ROW
        yield y, f'<rect class="frame" x="{x}" y="{y - 11}" width="13" height="13" style="fill:{type_colour(kind)}"/>'
        yield y, f'<text x="{x + 21}" y="{y}">{type_name(kind)}</text>'
        share = kinds[kind] / picture.queries
        yield y, f'<text class="soft" x="{end}" y="{y}" text-anchor="end">{share:.0%}</text>'
    if picture.starts[0]:
        y += ROW
        yield y, f'<text class="soft" x="{x}" y="{y}">{len(picture.starts[0]) + 1:,} documents</text>'
    if not picture.loads:
        return
    y += ROW + 12
    yield y, f'<text class="head" x="{x}" y="{y}">tiles by rank</text>'
    # Many ranks share the room that is there.
    row = min(ROW, max((SIDE - (y - TOP) - 40) / len(picture.loads), 7.0))
    y += (ROW - row) / 2
    most, room = max(max(picture.loads), 1), LEGEND - 100
    for rank, load in enumerate(picture.loads):
        y += row
        thick = min(13.0, row - 1)
        long = load / most * room
        place = f'x="{x + 24}" y="{y - 4.5 - thick / 2:.2f}" width="{long:.2f}" height="{thick:.2f}"'
        yield y, f'<rect {place} fill="{rank_colour(rank, len(picture.loads))}"/>'
        if row >= 12 or rank % 4 == 0:
            yield y, f'<text class="soft" x="{x + 16}" y="{y:.2f}" text-anchor="end">{rank}</text>'
            yield y, f'<text class="soft" x="{end}" y="{y:.2f}" text-anchor="end">{load:,}</text>'
    y += ROW + 4
    yield y, f'<text class="soft" x="{x}" y="{y:.2f}">heaviest over mean {picture.imbalance:.3f}</text>'
