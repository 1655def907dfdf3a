"""What a search found, as one HTML page: the table, the learning curves, and the Pareto front.

The page is self-contained: plain SVG, no script, and nothing is fetched. Curves have logarithmic axes, in which a power
law is a straight line.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

from csc.model_search.forecast import LEAST
from csc.model_search.result import PairRow, SearchResult
from csc.reports.energy_page import joules_text
from csc.simulation.page import BASE, LIMIT, bytes_text, seconds_text

WIDTH, HEIGHT, LEFT, RIGHT, FOOT = 720, 320, 100, 12, 34
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto;
padding: 0 1rem; } h2 { margin-top: 2rem; font-size: 1.1rem; } h1 { overflow-wrap: anywhere; }
.table { overflow-x: auto; margin-bottom: 1rem; } table { border-collapse: collapse; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; } td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.rule { stroke: currentColor; stroke-opacity: .25; }
.curve { fill: none; stroke: currentColor; stroke-opacity: .35; }
.first { stroke: #d55e00; stroke-opacity: 1; stroke-width: 2.5; }
td:last-child, th:last-child { text-align: left; } td:first-child { white-space: nowrap; }
"""
Axis = Callable[[float], float]


def page(result: SearchResult, title: str) -> str:
    """The page's HTML. Names may hold any text."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            f"<p>{html.escape(summary(result))}</p>",
            "<h2>Learning curves</h2>",
            _curves(result),
            "<h2>Score and what a step takes</h2>",
            _front(result),
            "<h2>Every pair</h2>",
            _table(HEADINGS, ([*cells(row, result), row.dropped] for row in result.rows)),
            "</body></html>\n",
        ]
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


HEADINGS = (
    "pair", "score", "spread", "samples", "seconds", "energy", "step", "joules a step", "bytes a rank", "front",
    "why it is not the first",
)  # fmt: skip


def cells(row: PairRow, result: SearchResult) -> list[str]:
    """A row's figures as text, without the reason."""
    return [
        " x ".join(row.pair),
        "" if row.score is None else f"{row.score:.4g}",
        "" if row.spread is None else f"± {row.spread:.2g}",
        f"{row.samples:,}" if row.samples else "",
        f"{row.seconds:.3g}" if row.samples else "",
        "" if row.joules is None else joules_text(row.joules),
        "" if row.planned_seconds is None else seconds_text(row.planned_seconds),
        "" if row.planned_joules is None else joules_text(row.planned_joules),
        "" if row.planned_bytes is None else bytes_text(row.planned_bytes),
        "yes" if row.pair in result.front else "",
    ]


def summary(result: SearchResult) -> str:
    """What was found and what it took, in three sentences."""
    counts, best = result.counts, result.best
    first = f"{' x '.join(best.pair)} is the first of {len(result.rows)} pairs, with a score of {best.score:.4g}"
    grid = f", 1/{counts.grid / counts.samples:.1f} of the grid's" if counts.samples else ""
    passes = max(counts.encoder_passes.values(), default=None)
    seen = "encoders trained" if passes is None else f"each encoder saw an item {passes:.2f} times"
    return (
        f"{first} after {best.samples:,} samples. The strategy {result.strategy!r} took "
        f"{counts.samples:,} samples{grid}. {counts.captures} captures; {seen}; "
        f"compilation took {counts.compile_share:.0%} of {seconds_text(counts.seconds)}."
    )


def _curves(result: SearchResult) -> str:
    """Error over samples of each pair, both logarithmic; the best pair's curve stands out."""
    points = [(samples, _error(score, result)) for row in result.rows for samples, score in row.curve]
    if not points:
        return "<p>No pair was trained.</p>"
    across, up = (
        _log_axis([x for x, _ in points], LEFT, WIDTH - RIGHT),
        _log_axis([y for _, y in points], HEIGHT - FOOT, 10),
    )
    drawn = []
    for row in reversed(result.rows):
        line = [(across(samples), up(_error(score, result))) for samples, score in row.curve]
        first = row is result.best
        path = " ".join(f"{'M' if not n else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(line))
        tip = f"<title>{html.escape(' x '.join(row.pair))}: {row.score or 0.0:.4g}</title>"
        drawn.append(f'<path class="curve{" first" if first else ""}" d="{path}">{tip}</path>')
        drawn += [_dot(x, y, 3.5 if first else 2.5, LIMIT if first else BASE["F"], tip) for x, y in line[-1:]]
    return (
        _picture(
            [*drawn, *_ends(points, "{:,.0f} samples", "error {:.3g}")], "error of each pair over samples, logarithmic"
        )
        + f"<p>Error is {result.perfect:g} - score. In colour: {html.escape(' x '.join(result.best.pair))}.</p>"
    )


def _front(result: SearchResult) -> str:
    """Score up, seconds of the planned step across, bytes as the area of a dot."""
    rows = [row for row in result.rows if row.score is not None and row.planned_seconds is not None]
    if not rows:
        return "<p>No step was planned: name a mesh to see what pairs cost.</p>"
    points = [(row.planned_seconds or 0.0, row.score or 0.0) for row in rows]
    across = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT - 60)
    up = _axis([y for _, y in points], HEIGHT - FOOT, 14)
    most = max(row.planned_bytes or 0.0 for row in rows) or 1.0
    drawn = []
    for row, (x, y) in zip(rows, points):
        size = 3 + 6 * math.sqrt((row.planned_bytes or 0.0) / most)
        on_front = row.pair in result.front
        label = f"{' x '.join(row.pair)}: {row.score:.4g}, {seconds_text(x)}, {bytes_text(row.planned_bytes or 0.0)}"
        tip = f"<title>{html.escape(label)}</title>"
        drawn.append(_dot(across(x), up(y), size, LIMIT if on_front else BASE["F"], tip))
        if on_front:
            far = across(x) > WIDTH / 2  # the name stands on the side that has room
            place = f'x="{across(x) + (-size - 3 if far else size + 3):.1f}" y="{up(y) + 4:.1f}"'
            anchor = "end" if far else "start"
            drawn.append(f'<text {place} text-anchor="{anchor}">{html.escape(" x ".join(row.pair))}</text>')
    shown = [(x * 1000, y) for x, y in points]
    return _picture([*drawn, *_ends(shown, "{:.3g} ms a step", "score {:.3g}")], "score over seconds of a step") + (
        f"<p>On {html.escape(result.mesh)}; a dot's area shows bytes of the fullest rank. In colour: pairs that no "
        "other beats in score, seconds and bytes at once. Scores are those after the samples that each was trained "
        "on.</p>"
    )


def _error(score: float, result: SearchResult) -> float:
    return max(LEAST, result.perfect - score)


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / span


def _log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    linear = _axis([math.log(value) for value in values], start, end)
    return lambda value: linear(math.log(value))


def _ends(points: Sequence[tuple[float, float]], across: str, up: str) -> list[str]:
    """What the axes' ends stand for."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    words = [
        (LEFT, HEIGHT - 8, "start", across.format(min(xs))), (WIDTH - RIGHT, HEIGHT - 8, "end", across.format(max(xs))),
        (4, 14, "start", up.format(max(ys))), (4, HEIGHT - FOOT, "start", up.format(min(ys))),
    ]  # fmt: skip
    return [f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>' for x, y, anchor, text in words]


def _dot(x: float, y: float, size: float, fill: str, tip: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill="{fill}" fill-opacity=".8">{tip}</circle>'


def _picture(parts: Iterable[str], name: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name, quote=True)}">'
        f'<line class="rule" x1="{LEFT}" x2="{WIDTH}" y1="{HEIGHT - FOOT + 6}" y2="{HEIGHT - FOOT + 6}"/>'
        f"{''.join(parts)}</svg>"
    )
