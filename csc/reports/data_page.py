"""What balance makes of lengths, as one HTML page: distributions, what a step takes by way, sizes that are compiled.

    page(report, title) -> str

The page is self-contained: plain SVG, no script, and nothing is fetched. Bars are drawn from 0.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from csc.planning.assign.step import Size
from csc.reports.data import DataReport, Histogram
from csc.simulation.page import BASE, MEMORY, seconds_text

WIDTH, HEIGHT, LEFT, FOOT = 720, 180, 90, 24
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto;
padding: 0 1rem; } h2 { margin-top: 2rem; font-size: 1.1rem; } h1 { overflow-wrap: anywhere; }
.table { overflow-x: auto; margin-bottom: 1rem; } table { border-collapse: collapse; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; } td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.rule { stroke: currentColor; stroke-opacity: .25; }
"""


def page(report: DataReport, title: str) -> str:
    """The page's HTML. Names may hold any text."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            f"<h2>How long {report.samples:,} samples are</h2>",
            _distribution(report),
            *(_histogram(name, one) for name, one in report.histograms.items()),
            f"<h2>What a step of {report.batch_size} samples takes, by how they are divided</h2>",
            _ways(report),
            f"<h2>Sizes of microbatches that are compiled: {len(report.sizes)}</h2>",
            f"<p>{report.outside:,} of {report.microbatches:,} microbatches had another size. "
            f"Costs are off by {report.error:.1%}.</p>",
            _sizes(report.sizes),
            table(["", "rows", "width", *report.units], _rows(report.sizes)),
            "</body></html>\n",
        ]
    )


def _distribution(report: DataReport) -> str:
    first = next(iter(report.distribution.values()))
    rows = ([name, *(f"{value:.4g}" for value in values.values())] for name, values in report.distribution.items())
    return table(["", *first], rows)


def _histogram(name: str, one: Histogram) -> str:
    """Samples by length, in bins of one width; the axis says where they begin and end."""
    most, count = max(one.counts, default=0) or 1, len(one.counts)
    wide = (WIDTH - LEFT) / max(count, 1)
    bars = [
        _bar(LEFT + n * wide, samples / most, max(wide - 1, 0.5), BASE["F"], f"{samples:,} samples")
        for n, samples in enumerate(one.counts)
    ]
    ends = [_text(LEFT, "start", f"{one.first:g}"), _text(WIDTH, "end", f"{one.last:g}")]
    middle = _text((LEFT + WIDTH) / 2, "middle", name)
    return _picture([*bars, *ends, middle, _top(f"{most:,} samples")], f"{name}: samples by length")


def _ways(report: DataReport) -> str:
    most, best = max(report.seconds.values()), report.seconds["balanced"]
    wide = (WIDTH - LEFT) / len(report.seconds)
    parts = []
    for n, (way, seconds) in enumerate(report.seconds.items()):
        own = MEMORY if way == "equal" else BASE["W"] if way == "balanced" else BASE["B"]
        text = f"{way}: {seconds_text(seconds)}, {seconds / best:.3f} × balanced"
        parts.append(_bar(LEFT + (n + 0.15) * wide, seconds / most, 0.7 * wide, own, text))
        parts.append(_text(LEFT + (n + 0.5) * wide, "middle", f"{way}, {seconds / best:.3f} × balanced"))
    note = "<p>equal: every microbatch the mean, which no samples are.</p>"
    return _picture([*parts, _top(seconds_text(most))], "seconds of a step by way") + note


def _sizes(sizes: Sequence[Size]) -> str:
    """Each size as a point: width across, rows up."""
    if not sizes:
        return ""
    widest, most = max(size[-1] for size in sizes), max(size[-2] for size in sizes)
    points = [
        f'<circle cx="{LEFT + (WIDTH - LEFT - 8) * size[-1] / widest:.1f}" '
        f'cy="{4 + (HEIGHT - FOOT - 8) * (1 - size[-2] / most):.1f}" r="4" fill="{BASE["F"]}" fill-opacity=".6">'
        f"<title>{size[-2]} x {size[-1]}</title></circle>"
        for size in sizes
    ]
    ends = [_text(LEFT, "start", "0"), _text(WIDTH, "end", f"width {widest:,}"), _top(f"{most:,} rows")]
    return _picture([*points, *ends], "rows and width of the sizes that are compiled")


def _rows(sizes: Sequence[Size]) -> Iterable[list[str]]:
    return ([str(n + 1), f"{size[-2]:,}", f"{size[-1]:,}", *map(str, size[:-2])] for n, size in enumerate(sizes))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def _picture(parts: Iterable[str], name: str) -> str:
    rule = f'<line class="rule" x1="{LEFT}" x2="{WIDTH}" y1="{HEIGHT - FOOT}" y2="{HEIGHT - FOOT}"/>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name, quote=True)}">'
        f"{rule}{''.join(parts)}</svg>"
    )


def _bar(x: float, share: float, wide: float, fill: str, text: str) -> str:
    tall = share * (HEIGHT - FOOT - 4)
    return (
        f'<rect x="{x:.1f}" y="{HEIGHT - FOOT - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{fill}">'
        f"<title>{html.escape(text)}</title></rect>"
    )


def _text(x: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _top(text: str) -> str:
    """What the top of the picture stands for."""
    return f'<text x="{LEFT - 6}" y="14" text-anchor="end">{html.escape(text)}</text>'
