"""A Program as a picture: Mermaid text, or a self-contained HTML page with an SVG of regions and stages."""

from __future__ import annotations

import html
from collections.abc import Sequence

from csc.analysis.explain import explain
from csc.ir.printer import program_text
from csc.ir.program import Program, Region

FROZEN, PASSING, TRAINED, PLAIN = "#dbeafe", "#fef3c7", "#dcfce7", "#f3f4f6"


def colour(region: Region) -> str:
    """Blue: F only. Yellow: a gradient passes. Green: trains. Grey: not known yet."""
    if not region.variant:
        return PLAIN
    if region.needs_dw:
        return TRAINED
    return PASSING if region.needs_dx else FROZEN


def edges(program: Program) -> list[tuple[str, str, bool]]:
    """(producer, reader, a gradient comes back) between regions."""
    maker = {value: region.name for region in program.regions for value in region.outputs}
    return [
        (maker[value], region.name, bool(region.dx and region.dx[i]))
        for region in program.regions
        for i, value in enumerate(region.activations)
    ]


def mermaid(program: Program, regions: Sequence[Region]) -> str:
    """Mermaid text: one box a region, one frame a stage; solid arrows have a gradient coming back."""
    number = {region.name: index for index, region in enumerate(regions)}
    home = {name: stage.index for stage in program.stages for name in stage.regions}
    lines = ["flowchart TB"]
    current = None
    for region in regions:
        stage = home.get(region.name)
        if stage != current:
            if current is not None:
                lines.append("  end")
            if stage is not None:
                lines.append(f'  subgraph stage{stage}["stage {stage}"]')
            current = stage
        label = html.escape(region.name, quote=True).replace("&#x27;", "'")
        lines.append(f'    r{number[region.name]}["{label}"]')
    if current is not None:
        lines.append("  end")
    for source, target, back in edges(program):
        if source in number and target in number:
            lines.append(f"  r{number[source]} {'-->' if back else '-.->'} r{number[target]}")
    lines += [f"  style r{number[region.name]} fill:{colour(region)}" for region in regions]
    return "\n".join([*lines, ""])


def page(program: Program, regions: Sequence[Region], text: str | None = None) -> str:
    """A self-contained HTML page: the picture, the table of regions, the text of the graphs."""
    rows = ""
    if program.stages:
        _, explained = explain(program)
        chosen = {region.name for region in regions}
        rows = "".join(
            f"<tr><td>{html.escape(row.name)}</td><td>{html.escape(row.template)}</td><td>{row.stage}</td>"
            f"<td>{row.parameters:,}</td><td>{row.trainable:,}</td>"
            f"<td>{' / '.join(map(str, row.matmuls))}</td>"
            f"<td>{sum(row.flops):,}</td><td>{html.escape(row.why)}</td></tr>"
            for row in explained if row.name in chosen
        )  # fmt: skip
        rows = (
            "<table><tr><th>region</th><th>file</th><th>stage</th><th>parameters</th><th>trainable</th>"
            f"<th>F / B / W matmuls</th><th>FLOPs</th><th>why</th></tr>{rows}</table>"
        )
    body = html.escape(text if text is not None else program_text(program, tuple(r.name for r in regions)))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(program.name)}</title><style>"
        f"{STYLE}</style>"
        f"<h1>{html.escape(program.name)}</h1>{_svg(program, regions)}{rows}<pre>{body}</pre></html>\n"
    )


STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2rem;color:#111}"
    "pre{background:#f8fafc;padding:1rem;overflow:auto;font-size:12px}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{border:1px solid #cbd5e1;padding:.2rem .6rem;text-align:left;white-space:nowrap}"
)
BOX_HEIGHT, GAP, BOX_WIDTH, LEFT = 26, 14, 420, 110


def _svg(program: Program, regions: Sequence[Region]) -> str:
    """Regions from top to bottom, stages as bands behind them, skips as arcs on the right."""
    top = {region.name: 20 + index * (BOX_HEIGHT + GAP) for index, region in enumerate(regions)}
    height = 20 + len(regions) * (BOX_HEIGHT + GAP)
    parts: list[str] = []
    for stage in program.stages:
        held = [top[name] for name in stage.regions if name in top]
        if held:
            y, tall = min(held) - 6, max(held) - min(held) + BOX_HEIGHT + 12
            parts.append(
                f'<rect x="6" y="{y}" width="{LEFT + BOX_WIDTH + 20}" height="{tall}" rx="8" fill="none" '
                f'stroke="#94a3b8"/>'
                f'<text x="14" y="{y + 20}" fill="#475569">stage {stage.index}</text>'
            )
    for source, target, back in edges(program):
        if source not in top or target not in top:
            continue
        dash = "" if back else ' stroke-dasharray="4 3"'
        start, end = top[source] + BOX_HEIGHT, top[target]
        if end - start == GAP:
            x = LEFT + BOX_WIDTH // 2
            parts.append(f'<path d="M{x} {start} V{end}" stroke="#334155" fill="none"{dash}/>')
        else:
            x, bend = LEFT + BOX_WIDTH, 30 + min(120, (end - start) // 6)
            start, end = start - BOX_HEIGHT // 2, end + BOX_HEIGHT // 2
            parts.append(
                f'<path d="M{x} {start} C{x + bend} {start} {x + bend} {end} {x} {end}" '
                f'stroke="#334155" fill="none"{dash}/>'
            )
    for region in regions:
        y = top[region.name]
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
            f'fill="{colour(region)}" stroke="#64748b"/>'
            f'<text x="{LEFT + 10}" y="{y + 17}">{html.escape(region.name)}</text>'
        )
    legend = "blue: forward only; yellow: a gradient passes; green: trains; dashed: no gradient comes back"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + BOX_WIDTH + 200}" height="{height}" font-size="13" '
        f'font-family="system-ui,sans-serif">{"".join(parts)}</svg><p>{legend}</p>'
    )
