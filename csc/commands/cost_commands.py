"""`csc cost` and `csc profile`: FLOPs, bytes and seconds of F, B and W, computed and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from csc.commands.model_options import Opening, on_target
from csc.commands.printing import JsonOption, console, print_json
from csc.errors import InputError


@on_target
def cost(
    opening: Opening,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="every figure as an expression in batch, text, image and audio lengths")
    ] = False,
    master: Annotated[
        bool, typer.Option("--master", help="AdamW with float32 moments and a float32 copy of narrower parameters")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """FLOPs, bytes and, with --hardware, seconds of F, B and W of one microbatch, by component and region."""
    from csc.analysis.hardware import hardware
    from csc.commands.tables import cost_tables
    from csc.reports.cost_report import report

    with opening as compiled:
        name = _one(compiled)
        chosen = None if name is None else hardware(name)
        costs = report(compiled, chosen, master, symbolic)
    if json_output:
        print_json(costs.as_dict())
        return
    for table in cost_tables(costs):
        console.print(table)
    for symbol, size in costs.sizes.items():
        console.print(f"{symbol} = {size}: {escape(costs.meanings[symbol])}", highlight=False)


def _one(compiled: Any) -> str | None:
    """The profile of the device that is looked at; InputError for one of each pipeline rank."""
    named = compiled.options.hardware
    if isinstance(named, tuple):
        raise InputError(f"there is a profile for each rank: {', '.join(named)}", "hardware", "name one of them")
    return named


@on_target
def profile(
    opening: Opening,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the profile, as a .toml for --hardware")
    ] = None,
    budget: Annotated[float, typer.Option("--seconds", min=0.0, help="most seconds to measure")] = 20.0,
    wires: Annotated[bool, typer.Option(help="measure messages between processes and the runtime, too")] = True,
    clocks: Annotated[
        bool, typer.Option("--clocks", help="measure seconds and joules at each clock of the GPU, for csc energy")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Measure F, B and W of every template on the device at hand, fit the cost model to them, report its error."""
    from csc.commands.tables import profile_summary, profile_table
    from csc.reports.profiling import profile as measured

    with opening as compiled:
        profile_found = measured(compiled, _one(compiled), budget, output, wires, clocks)
    if json_output:
        print_json(profile_found.as_dict())
        return
    console.print(profile_table(profile_found))
    console.print(profile_summary(profile_found), highlight=False)
    if output is not None:
        console.print(f"wrote {escape(str(output))}: use it with --hardware {escape(str(output))}", soft_wrap=True)
