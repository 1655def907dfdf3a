"""`csc explain`: components and regions as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from csc.commands.model_options import Opening, on_target
from csc.commands.printing import Column, JsonOption, Rows, console, print_json, table
from csc.commands.tables import NONE_YET, fused_functions, fused_table, memory_table, unfit_table
from csc.temporary import TemporaryFolder

if TYPE_CHECKING:
    from csc.driver.compiled import CompiledModel
    from csc.runtime.fusing import FusedRow


@on_target
def explain(
    opening: Opening,
    json_output: JsonOption = False,
) -> None:
    """Show parameters, gradient needs, work and memory of components and regions, and what was pruned and why."""
    from csc.analysis.explain import explain as rows_of
    from csc.analysis.unfit_parts import unfit_parts
    from csc.passes.pipeline_problem import limit, problem
    from csc.reports.forecast import devices_of, forecast, memory_forecast
    from csc.reports.survival_price import price_of

    with opening as compiled:
        program, options = compiled.program, compiled.options
        chosen = compiled.inspected.mesh_text
        components, regions = rows_of(program)
        memory, most = memory_forecast(program, options), limit(program, options)
        devices = devices_of(problem(program, options)) if memory else ()
        price = price_of(compiled, compiled.survive)
        step = forecast(compiled, None).plan.makespan if price is not None else 0.0
        fused = _fused(compiled) if options.fuse else []
        unfit = unfit_parts(program, options.mesh) if options.cuda_graphs else []
    if json_output:
        rows = {"components": components, "regions": regions}
        held = {"memory": [row.as_dict() for row in memory], "memory_limit": most}
        more = {"functions": fused, "unrecorded": [row._asdict() for row in unfit]}
        survived = {"survive": price} if price is not None else {}
        print_json({**rows, **held, **more, **survived, "notes": list(program.notes), "mesh": chosen})
        return
    if chosen:
        console.print(escape(chosen), highlight=False)
    for title, rows_ in (("components", components), ("regions", regions)):
        console.print(explain_table(title, rows_))
    if memory:
        console.print(memory_table(memory, most, devices))
    for line in price.sentences(step) if price is not None else ():
        console.print(escape(line), highlight=False)
    if options.fuse:
        console.print(fused_table(fused) if fused else NONE_YET)
    if options.cuda_graphs:
        console.print(unfit_table(unfit, len(program.stages)))
    for note in program.notes:
        console.print(escape(note))


def _fused(compiled: CompiledModel) -> list[FusedRow]:
    with TemporaryFolder() as folder:
        return fused_functions(compiled.write(Path(folder) / "program", ranks=[0]))


def explain_table(title: str, rows: list[Any]) -> Rows:
    """The rows of csc.analysis.explain as a table; what all names begin with (PEFT's wrappers) is in the title."""
    around = "".join(f"{part}." for part in _common([row.name.split(".")[:-1] for row in rows]))
    if around:
        title = f"{title} of {around[:-1]}"
    scale, unit = _flops_unit(max((flops for row in rows for flops in (*row.flops, row.pruned_flops)), default=0.0))
    printed = table(
        "name", Column("stage", 1), Column("parameters", 4), Column("trainable", 3), Column("dx", 5), Column("dw", 6),
        Column("matmuls F/B/W", 7), f"{unit} F/B/W", Column(f"pruned {unit}", 2), "why",
        title=title,
    )  # fmt: skip
    for row in rows:
        printed.add_row(
            escape(row.name.removeprefix(around)), str(row.stage), f"{row.parameters:,}", f"{row.trainable:,}",
            "yes" if row.needs_dx else "-", "yes" if row.needs_dw else "-",
            "/".join(map(str, row.matmuls)), "/".join(f"{flops / scale:.2f}" if flops else "0" for flops in row.flops),
            f"{row.pruned_flops / scale:.2f}" if row.pruned_flops else "0", escape(row.why),
        )  # fmt: skip
    return printed


def _flops_unit(most: float) -> tuple[float, str]:
    """In which a table's largest figure has at most five digits before its point."""
    for scale, unit in ((1e6, "MFLOPs"), (1e9, "GFLOPs")):
        if most < 1e5 * scale:
            return scale, unit
    return 1e12, "TFLOPs"


def _common(paths: list[list[str]]) -> list[str]:
    """What all paths begin with."""
    alike = 0
    while paths and all(path[alike : alike + 1] == paths[0][alike : alike + 1] != [] for path in paths):
        alike += 1
    return paths[0][:alike] if paths else []
