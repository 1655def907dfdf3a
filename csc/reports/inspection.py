"""What the command line shows of a compilation: dumps after a pass, differences between passes, pictures."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from csc.analysis.explain import explain
from csc.codegen.rank_file import position_path, rank_path
from csc.codegen.write import sources
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir.printer import program_text
from csc.ir.program import Program, Region
from csc.passes.runner import after

# --- A Program as a picture: Mermaid text, or a self-contained HTML page with an SVG of regions and stages -----------


FROZEN, PASSING, TRAINED, PLAIN = "#dbeafe", "#fef3c7", "#dcfce7", "#f3f4f6"
MEANING = {FROZEN: "forward only", PASSING: "a gradient passes", TRAINED: "trains", PLAIN: "not known before pruning"}
INK = "#1b1f24"  # on each of them, in the dark as well
BACK, NOT_BACK = "a gradient comes back", "no gradient comes back"  # to the region that an arrow starts at


def colour(region: Region) -> str:
    """What fills a region's box; see MEANING."""
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
    """Mermaid text: one box a region, one frame a stage, and a legend; solid arrows have a gradient coming back."""
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
    lines += [f"  style r{number[region.name]} fill:{colour(region)},color:{INK}" for region in regions]
    lines += ['  subgraph legend["legend"]']
    lines += [
        f'    key{i}["{text}"]\n    style key{i} fill:{fill},color:{INK}'
        for i, (fill, text) in enumerate(_used(regions))
    ]
    lines += [
        f'    region["region"] -->|{BACK}| reader["reader"]',
        f'    region -.->|{NOT_BACK}| other["reader"]',
        "  end",
    ]
    return "\n".join([*lines, ""])


def page(program: Program, regions: Sequence[Region], text: str | None = None) -> str:
    """A self-contained HTML page: the picture, the table of regions, the text of the graphs."""
    rows = ""
    if program.stages:
        _, explained = explain(program)
        chosen = {region.name for region in regions}
        rows = "".join(
            f"<tr><td>{_breaking(row.name)}</td><td>{_breaking(row.template)}</td><td>{row.stage}</td>"
            f"<td>{row.parameters:,}</td><td>{row.trainable:,}</td>"
            f"<td>{' / '.join(map(str, row.matmuls))}</td>"
            f"<td>{sum(row.flops):,}</td><td>{html.escape(row.why)}</td></tr>"
            for row in explained if row.name in chosen
        )  # fmt: skip
        rows = (
            "<div class=wide><table><tr><th>region</th><th>file</th><th>stage</th><th>parameters</th><th>trainable</th>"
            f"<th>F / B / W matmuls</th><th>FLOPs</th><th>why</th></tr>{rows}</table></div>"
        )
    body = html.escape(text if text is not None else program_text(program, tuple(r.name for r in regions)))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(program.name)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(program.name)}</h1>{_legend(regions)}{_svg(program, regions)}{rows}"
        f"<pre>{body}</pre></html>\n"
    )


def _breaking(name: str) -> str:
    """A name that a line may end in, behind a dot or an underscore."""
    return re.sub(r"(?<=[._])", "<wbr>", html.escape(name))


def _legend(regions: Sequence[Region]) -> str:
    """What colours and lines mean, of those that the picture has."""
    words = [f'<span><i style="background:{fill}"></i>{text}</span>' for fill, text in _used(regions)]
    lines = [("solid", BACK), ("dashed", NOT_BACK)]
    words += [f'<span><i class=line style="border-top-style:{style}"></i>{text}</span>' for style, text in lines]
    return f"<p class=legend>{''.join(words)}</p>"


def _used(regions: Sequence[Region]) -> list[tuple[str, str]]:
    """(colour, meaning) of those that regions have."""
    used = {colour(region) for region in regions}
    return [(fill, text) for fill, text in MEANING.items() if fill in used]


STYLE = (
    ":root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--rule:#cbd5e1;--raised:#f8fafc}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#9ba4ae;--rule:#343a42;--raised:#1d2126}"
    "body{background:#14171b}}"
    "body{font:14px/1.4 system-ui,sans-serif;margin:1.5rem;color:var(--ink)}h1{overflow-wrap:anywhere}"
    "pre,.wide{overflow:auto}pre{background:var(--raised);padding:1rem;font-size:12px}"
    "table{border-collapse:collapse;margin:1rem 0;font-size:13px}"
    "td,th{border:1px solid var(--rule);padding:.2rem .4rem;text-align:left;vertical-align:top}"
    "td:nth-child(n+3):not(:last-child){white-space:nowrap;font-variant-numeric:tabular-nums}"
    ".legend{display:flex;flex-wrap:wrap;gap:2px 16px;color:var(--soft)}"
    ".legend i{display:inline-block;width:13px;height:13px;margin-right:6px;vertical-align:-2px;"
    "border:1px solid #64748b}"
    ".legend i.line{height:0;width:18px;border:0;border-top:2px solid var(--soft);vertical-align:4px}"
    "svg{max-width:100%;height:auto}svg .name{fill:#1b1f24}svg .stage{fill:var(--soft)}"
    "svg path{stroke:var(--soft);fill:none}"
)
BOX_HEIGHT, GAP, BOX_WIDTH, LEFT, BEND = 26, 14, 420, 110, 150
LETTER = 8  # points, the mean width of a letter


def _svg(program: Program, regions: Sequence[Region]) -> str:
    """Regions from top to bottom, stages as bands behind them, skips as arcs on the right."""
    wide = max([BOX_WIDTH, *(20 + LETTER * len(region.name) for region in regions)])
    top = {region.name: 20 + index * (BOX_HEIGHT + GAP) for index, region in enumerate(regions)}
    height = 20 + len(regions) * (BOX_HEIGHT + GAP)
    parts: list[str] = []
    for stage in program.stages:
        held = [top[name] for name in stage.regions if name in top]
        if held:
            y, tall = min(held) - 6, max(held) - min(held) + BOX_HEIGHT + 12
            parts.append(
                f'<rect x="6" y="{y}" width="{LEFT + wide + 20}" height="{tall}" rx="8" fill="none" '
                f'stroke="#94a3b8"/>'
                f'<text x="14" y="{y + 20}" class="stage">stage {stage.index}</text>'
            )
    for source, target, back in edges(program):
        if source not in top or target not in top:
            continue
        dash = "" if back else ' stroke-dasharray="4 3"'
        start, end = top[source] + BOX_HEIGHT, top[target]
        if end - start == GAP:
            parts.append(f'<path d="M{LEFT + wide // 2} {start} V{end}"{dash}/>')
        else:
            x, bend = LEFT + wide, 30 + min(BEND - 30, (end - start) // 6)
            start, end = start - BOX_HEIGHT // 2, end + BOX_HEIGHT // 2
            parts.append(f'<path d="M{x} {start} C{x + bend} {start} {x + bend} {end} {x} {end}"{dash}/>')
    for region in regions:
        y = top[region.name]
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{wide}" height="{BOX_HEIGHT}" rx="5" '
            f'fill="{colour(region)}" stroke="#64748b"/>'
            f'<text x="{LEFT + 10}" y="{y + 17}" class="name">{html.escape(region.name)}</text>'
        )
    total = LEFT + wide + BEND
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" width="{total}" height="{height}" '
        f'role="img" aria-label="regions and stages" font-size="13" font-family="system-ui,sans-serif">'
        f"{''.join(parts)}</svg>"
    )


# --- What the command line shows of a compilation: dumps after a pass, differences between passes --------------------


FORMATS = ("text", "python", "mermaid", "html")


def dump(
    compiled: CompiledModel,
    pass_name: str,
    form: str = "text",
    rank: int | None = None,
    region: str | None = None,
) -> str:
    """The Program after a pass, whole or of one rank or region. Raises InputError for what does not exist."""
    if form not in FORMATS:
        raise InputError(f"there is no format {form!r}", "--format", f"choose one of {', '.join(FORMATS)}")
    program = after(compiled.history(), pass_name)
    final = compiled.program
    if rank is not None and not 0 <= rank < compiled.options.mesh.size:
        raise InputError(
            f"there is no rank {rank}", "--rank", f"the mesh has ranks 0 to {compiled.options.mesh.size - 1}"
        )
    if form == "python":
        return _python(compiled, final, rank, region)
    stages = None
    if rank is not None:
        position = compiled.options.mesh.coordinates(rank).pp
        stages = tuple(stage.index for stage in final.stages if stage.rank == position)
    chosen = _chosen(program, final, stages, region)
    names = None if rank is None and region is None else tuple(r.name for r in chosen)
    if form == "text":
        return program_text(program, names, stages if program.stages else None)
    if not program.regions:
        raise InputError(
            f"after {pass_name} the graph is not cut into regions yet",
            "--after",
            "draw it after `regions` or a later pass",
        )
    if form == "html":
        return page(program, chosen, program_text(program, names))
    return mermaid(program, chosen)


def _chosen(program: Program, final: Program, stages: tuple[int, ...] | None, region: str | None) -> Sequence[Region]:
    if region is not None and not any(r.name == region for r in final.regions):
        close = difflib.get_close_matches(region, [r.name for r in final.regions], n=3, cutoff=0.4)
        raise InputError(f"there is no region {region!r}", "--region", f"close names: {', '.join(close) or 'none'}")
    held = {name for s in final.stages if stages is None or s.index in stages for name in s.regions}
    return [r for r in program.regions if r.name in held and region in (None, r.name)]


def _python(compiled: CompiledModel, program: Program, rank: int | None, region: str | None) -> str:
    files = sources(program, compiled.options)
    if region is not None:
        (chosen,) = _chosen(program, program, None, region)
        wanted = [f"layers/{chosen.variant}.py"]
    elif rank is not None:
        position = position_path(compiled.options.mesh.coordinates(rank).pp)
        wanted = [rank_path(rank), *([position] if position in files else [])]
    else:
        wanted = sorted((p for p in files if PurePosixPath(p).stem != "__init__"), key=lambda p: ("/" in p, p))
    if len(wanted) == 1:
        return files[wanted[0]]
    return "\n".join(f"# ===== {path}\n{files[path]}" for path in wanted)


def difference(compiled: CompiledModel, first: str, second: str, region: str | None = None) -> str:
    """A unified diff of the Program's text after two passes; empty if nothing changed."""
    before, after_it = (dump(compiled, name, region=region).splitlines(keepends=True) for name in (first, second))
    return "".join(difflib.unified_diff(before, after_it, fromfile=f"after {first}", tofile=f"after {second}"))
