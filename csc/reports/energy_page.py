"""The energy frontier as a picture: joules by seconds of the step, and each action's clock at the chosen point."""

from __future__ import annotations

import html
from collections.abc import Iterator

from csc.planning.energy.frontier import EnergyPoint
from csc.reports.energy_report import EnergyReport
from csc.simulation.page import seconds_text
from csc.simulation.simulate import simulate

WIDTH, CHART, LEFT, RIGHT, LANE, SPACE = 1000, 300, 84, 24, 18, 6
FOUND, BOUND = "#0072b2", "#d55e00"
SLOW, FAST = (0x56, 0xB4, 0xE9), (0xD5, 0x5E, 0x00)  # of Okabe and Ito: told apart with any kind of colour vision
STYLE = """
svg { max-width: 100%; height: auto; }
text { font: 11px system-ui, sans-serif; fill: #1b1f24; } .head { font-weight: 600; font-size: 13px; }
.soft { fill: #59636e; } .ground { fill: #ffffff; } .rule { stroke: #d8dce1; }
@media (prefers-color-scheme: dark) {
text { fill: #e8eaed; } .soft { fill: #9ba4ae; } .ground { fill: #14171b; } .rule { stroke: #343a42; } }
"""
PAGE = """
body { font: 14px system-ui, sans-serif; margin: 2rem auto; max-width: 1040px; padding: 0 1rem; color: #1b1f24; }
table { border-collapse: collapse; } td, th { padding: .25rem .8rem; text-align: right; }
tr.chosen { font-weight: 600; } th { border-bottom: 1px solid #8a929b; }
@media (prefers-color-scheme: dark) { body { background: #14171b; color: #e8eaed; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def joules_text(joules: float) -> str:
    """Three digits or more, in J, kJ or MJ."""
    for size, name in ((1e6, "MJ"), (1e3, "kJ")):
        if joules >= size:
            value = joules / size
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:,.{digits}f} {name}"
    return f"{joules:.2f} J" if joules < 10 else f"{joules:.1f} J"


def watts_text(watts: float) -> str:
    """Three digits or more, in W or kW."""
    return f"{watts:.0f} W" if watts < 10_000 else f"{watts / 1000:.1f} kW"


def energy_picture(report: EnergyReport) -> str:
    """Returns an SVG: the frontier above, the clocks below."""
    chart = list(_chart(report))
    lanes, height = _lanes(report, CHART + 60)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" role="img">',
            f"<title>{html.escape(_title(report))}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height:.0f}"/>',
            *chart,
            *lanes,
            "</svg>\n",
        ]
    )


def energy_page(report: EnergyReport) -> str:
    """Returns a self-contained HTML page: the picture, the table of points, and where the figures come from."""
    head = ["step", "over the plan", "energy", "power", "saved", "saved at most", "changes of clock"]
    heads = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        f"<tr{' class=chosen' if point is report.chosen else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(report, point))
        + "</tr>"
        for point in report.points
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(_title(report))}</title><style>{PAGE}</style></head><body>",
            f"<h1>{html.escape(_title(report))}</h1>",
            energy_picture(report),
            f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>",
            *(f"<p>Curves of {html.escape(source)}.</p>" for source in report.sources),
            "</body></html>\n",
        ]
    )


def _title(report: EnergyReport) -> str:
    return f"{report.name}: energy of the step under {report.schedule}"


def _cells(report: EnergyReport, point: EnergyPoint) -> list[str]:
    found = report.frontier
    return [
        seconds_text(point.seconds),
        f"{point.seconds / found.usual.seconds - 1:+.1%}",
        joules_text(point.joules),
        watts_text(point.watts),
        f"{found.saved(point):.1%}",
        f"{found.possible(point):.1%}",
        str(sum(point.changes)),
    ]


def _chart(report: EnergyReport) -> Iterator[str]:
    found = report.frontier
    every = [*found.points, report.chosen, found.usual]
    times = [point.seconds for point in every]
    spent = [point.joules for point in every] + [point.bound for point in found.points]
    low, high = min(times), max(times)
    least, most = min(spent), max(spent)
    across = (WIDTH - LEFT - RIGHT) / ((high - low) or 1.0)
    up = (CHART - 70) / ((most - least) or 1.0)

    def place(seconds: float, joules: float) -> tuple[float, float]:
        return LEFT + (seconds - low) * across, CHART - 20 - (joules - least) * up

    yield f'<text class="head" x="12" y="20">{html.escape(_title(report))}</text>'
    for i in range(5):
        joules = least + (most - least) * i / 4
        seconds = low + (high - low) * i / 4
        x, y = place(seconds, joules)
        yield f'<line class="rule" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{joules_text(joules)}</text>'
        anchor = "start" if not i else "end" if i == 4 else "middle"
        yield f'<text class="soft" x="{x:.1f}" y="{CHART}" text-anchor="{anchor}">{seconds_text(seconds)}</text>'
    bounds = sorted((point.promised, point.bound) for point in found.points)
    for rows, colour, dash in (
        ([(e.seconds, e.joules) for e in found.points], FOUND, ""),
        ([(min(seconds, high), joules) for seconds, joules in bounds], BOUND, ' stroke-dasharray="5 4"'),
    ):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*row) for row in rows))
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
    for point in found.points:
        x, y = place(point.seconds, point.joules)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{FOUND}"/>'
    x, y = place(report.chosen.seconds, report.chosen.joules)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="{FOUND}" stroke-width="2"/>'
    x, y = place(found.usual.seconds, found.usual.joules)
    yield f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="#6b747e"/>'
    y = CHART + 24
    for x, colour, words in (
        (LEFT, "#6b747e", "highest clocks"),
        (LEFT + 120, FOUND, "clocks found (ring: the chosen point)"),
        (LEFT + 360, BOUND, "no choice of clocks comes below"),
    ):
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="{y}">{words}</text>'


def _lanes(report: EnergyReport, top: float) -> tuple[list[str], float]:
    """The chosen point's run, each action in the colour of its clock."""
    numbers = report.problem
    timeline = simulate(numbers.pipeline, numbers.schedule, seconds=numbers.seconds_at(report.chosen.clocks))
    clocks = [clock for rank_clocks in report.chosen.clocks for clock in rank_clocks]
    low, high = min(clocks, default=0), max(clocks, default=1)
    scale = (WIDTH - LEFT - RIGHT) / (timeline.makespan or 1.0)
    chosen = f"clocks at {seconds_text(report.chosen.seconds)} a step"
    drawn = [f'<text class="head" x="12" y="{top + 12:.0f}">{chosen}</text>']
    y = top + 24
    for rank, events in enumerate(timeline.ranks):
        drawn.append(f'<text x="12" y="{y + 13:.1f}">rank {rank}</text>')
        for event, clock in zip(events, report.chosen.clocks[rank]):
            x, width = LEFT + event.start * scale, max(event.seconds * scale, 0.3)
            fill = colour_of(clock, low, high)
            name = f"{event.action}: {clock} MHz"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LANE}" fill="{fill}">'
                f"<title>{name}</title></rect>"
            )
        y += LANE + SPACE
    steps = sorted({low, *(low + (high - low) * i // 4 for i in range(5)), high})
    for i, clock in enumerate(steps):
        x = LEFT + i * 110
        drawn.append(f'<rect x="{x}" y="{y + 6:.1f}" width="10" height="10" fill="{colour_of(clock, low, high)}"/>')
        drawn.append(f'<text x="{x + 16}" y="{y + 15:.1f}">{clock} MHz</text>')
    return drawn, y + 30


def colour_of(clock: int, low: int, high: int) -> str:
    """From SLOW at the lowest clock to FAST at the highest."""
    share = (clock - low) / ((high - low) or 1)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(SLOW, FAST))
