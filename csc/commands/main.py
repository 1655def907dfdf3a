"""The command line: `csc compile | dump | explain | verify | simulate | ...`. Commands only; the work is done below.

Here are those that make and print programs; the others stand in files of their own.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from csc import __version__
from csc.commands.cache_commands import app as cache_app
from csc.commands.checkpoint_commands import app as checkpoint_app
from csc.commands.cost_commands import cost, profile
from csc.commands.data_command import data
from csc.commands.energy_command import energy
from csc.commands.explain_command import explain
from csc.commands.mask_command import mask
from csc.commands.model_options import Opening, on_target
from csc.commands.plan_command import plan
from csc.commands.printing import Column, DebugOption, JsonOption, console, print_json, print_text, table
from csc.commands.search_command import search
from csc.commands.simulate_command import simulate, timeline
from csc.commands.tables import NONE_YET, compile_times, fused_functions, fused_table, timings_table
from csc.commands.verify_command import verify
from csc.errors import CscError

ABOUT = "Compile the training step of a multimodal LLM into one readable Python program per rank."
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=ABOUT)
errors = Console(stderr=True)


def main() -> None:
    """Entry point: errors become one sentence and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False) or 0)  # the code that a command left by typer.Exit, None without one
    except CscError as error:
        _fail(error)
    except typer.Abort:
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a usage error of the command line
            errors.print(f"[red]error:[/] {escape(error.format_message())}")
            sys.exit(2)
        raise


def _fail(error: CscError) -> None:
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
    sys.exit(2)


@app.command("compile")
@on_target
def compile_command(
    opening: Opening,
    output: Annotated[Path, typer.Option("-o", "--output", help="directory to write")],
    weights: Annotated[bool, typer.Option("--weights", help="also write the parameters, as safetensors")] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="show the seconds of each step of the compilation")
    ] = False,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", help="write only this rank's files; repeat it for several")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write the program: a file per layer template, a file per rank, schedule.txt, program.json."""
    from csc.passes.pipeline_problem import chosen_hardware
    from csc.runtime.launch import command as start_command

    with opening as compiled:
        checked = compiled.check() if compiled.checks and not rank else ""
        directory = compiled.write(output, weights, rank or None)
        program, ranks = compiled.program, compiled.options.mesh.size
        per_node = chosen_hardware(program, compiled.options).ranks_per_node
    start = start_command(ranks, per_node, f"-m csc.run {directory}")
    passes = [{"name": r.name, "seconds": round(r.seconds, 4), "summary": r.summary} for r in program.history]
    tracing = ("capture", "normalise")
    spent = compile_times(directory)
    fused = fused_functions(directory) if compiled.options.fuse else []
    if json_output:
        print_json(
            {
                "directory": str(directory),
                "ranks": ranks,
                "start": start,
                "emitted": sorted(set(rank)) if rank else list(range(ranks)),
                "templates": sorted(program.variants),
                "passes": [row for row in passes if row["name"] not in tracing],
                "timings": spent,
                "functions": fused,
                "check": checked,
            }
        )
        return
    if timings:
        console.print(timings_table(program.name, spent, {row["name"]: row["summary"] for row in passes}))
        if compiled.options.fuse:
            console.print(fused_table(fused) if fused else NONE_YET)
    held = f"{len(program.stages)} stages on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    console.print(f"{program.name}: {held}, {len(program.variants)} layer files, in {spent['total']:.1f} s")
    alone = f", of {ranks} ranks only {', '.join(map(str, sorted(set(rank))))}" if rank else ""
    if checked:
        console.print(escape(checked))
    console.print(f"wrote {escape(str(directory))}{alone}", soft_wrap=True)
    joint = ", " if start.startswith("on ") else ": "
    console.print(f"run it{joint}{escape(start)}", soft_wrap=True, highlight=False)


@app.command()
@on_target
def dump(
    opening: Opening,
    after: Annotated[str, typer.Option("--after", help="pass name, or capture")] = "schedule",
    rank: Annotated[int | None, typer.Option("--rank", help="only this rank")] = None,
    region: Annotated[str | None, typer.Option("--region", help="only this region")] = None,
    form: Annotated[str, typer.Option("--format", help="text, python, mermaid or html")] = "text",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="file to write instead of the screen")] = None,
    json_output: JsonOption = False,
) -> None:
    """Print the graph after a pass, or the emitted Python."""
    from csc.reports.inspection import dump as dump_text

    with opening as compiled:
        text = dump_text(compiled, after, form, rank, region)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if json_output:
        where = {"output": str(output)} if output is not None else {"text": text}
        print_json({"model": type(compiled.model).__name__, "after": after, "format": form, **where})
    elif output is None:
        print_text(text) if form == "text" else sys.stdout.write(text)


@app.command()
@on_target
def diff(
    opening: Opening,
    first: Annotated[str, typer.Argument(help="pass name, or capture")],
    second: Annotated[str, typer.Argument(help="a later pass")],
    region: Annotated[str | None, typer.Option("--region", help="only this region")] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what changed between two passes, as a unified diff."""
    from csc.reports.inspection import difference

    with opening as compiled:
        text = difference(compiled, first, second, region)
    if json_output:
        print_json({"model": type(compiled.model).__name__, "first": first, "second": second, "diff": text})
    else:
        print_text(text)


@app.command()
def passes(
    line: Annotated[
        str | None, typer.Argument(help="passes as a line, or path.py:name of a pipeline; csc's own without it")
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the passes, as a line and one by one: what each requires, establishes and breaks, and its options."""
    from csc.api import pipeline
    from csc.driver.options import changed
    from csc.ir.program import Options
    from csc.passes.pipeline import FACTS
    from csc.passes.runner import contracts

    steps = pipeline(line)
    changed(Options(), passes=steps)  # refused where one of them requires what does not hold
    listed = contracts(steps)
    if json_output:
        facts = {name: fact.meaning for name, fact in FACTS.items()}
        print_json({"line": str(steps), "passes": [vars(contract) for contract in listed], "facts": facts})
        return
    print_text(f"{steps}\n")
    rows = table("pass", Column("does", 2), "requires", "establishes", "breaks", "options", show_lines=True)
    for one in listed:
        lists = ("\n".join(told) for told in (one.requires, one.establishes, one.breaks, one.options))
        rows.add_row(*map(escape, (one.name, one.summary, *lists)))
    console.print(rows)


for command in (explain, verify, simulate, plan, energy, timeline, cost, profile, data, mask, search):
    app.command()(command)
app.add_typer(cache_app, name="cache")
app.add_typer(checkpoint_app, name="checkpoint")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit()


__all__ = ["app", "main"]
