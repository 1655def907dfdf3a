"""What the command line shows of a compilation: dumps after a pass, differences between passes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import PurePosixPath

from csc.codegen.rank_file import position_path, rank_path
from csc.codegen.write import sources
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir.printer import program_text
from csc.ir.program import Program, Region
from csc.passes.runner import after
from csc.reports.drawing import mermaid, page

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
