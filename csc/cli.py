"""The command line: `csc compile | dump | diff | passes | explain | verify`. Commands only; the work is done below."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from csc import __version__
from csc.errors import CscError, InputError

ABOUT = "Compile the training step of a multimodal LLM into one readable Python program per rank."
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=ABOUT)
errors = Console(stderr=True)
console = Console(width=None if sys.stdout.isatty() else 160)

Target = Annotated[str, typer.Argument(help="path.py:name of a compiled model, a module or a factory")]
MeshOption = Annotated[str | None, typer.Option("--mesh", help="axis sizes, for example pp=3,dp=2")]
FreezeOption = Annotated[
    list[str] | None,
    typer.Option("--freeze", help="component names or globs over parameter names; repeat it, or commas"),
]
CutOption = Annotated[list[str] | None, typer.Option("--cut", help="regions that open a stage; repeat it, or commas")]
MicrobatchOption = Annotated[int | None, typer.Option("--microbatches", help="microbatches per step")]
ScheduleOption = Annotated[str | None, typer.Option("--schedule", help="1f1b or gpipe")]
ExampleOption = Annotated[str | None, typer.Option("--example", help="name of the example batch in the same file")]
DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


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


@contextlib.contextmanager
def _compiled(
    target: str, example: str | None, mesh: str | None, freeze: list[str] | None, cuts: list[str] | None,
    microbatches: int | None, schedule: str | None,
) -> Iterator[Any]:  # fmt: skip
    """The target with the command line's options, and a progress line on a terminal while it works."""
    from csc.target import load_target, overridden

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("loading")
        compiled = load_target(target, example)
        changes = {
            "mesh": mesh,
            "freeze": _listed(freeze),
            "cuts": _listed(cuts),
            "microbatches": microbatches,
            "schedule": schedule,
        }
        compiled = overridden(compiled, changes)
        compiled.progress = lambda name: progress.update(task, description=name)
        yield compiled


def _listed(given: list[str] | None) -> list[str] | None:
    """Repeated and comma-separated values as one list; None if the option was not given."""
    return [name.strip() for item in given for name in item.split(",") if name.strip()] if given else None


@app.command("compile")
def compile_command(
    target: Target,
    output: Annotated[Path, typer.Option("-o", "--output", help="directory to write")],
    mesh: MeshOption = None,
    freeze: FreezeOption = None,
    cut: CutOption = None,
    microbatches: MicrobatchOption = None,
    schedule: ScheduleOption = None,
    example: ExampleOption = None,
    weights: Annotated[bool, typer.Option("--weights", help="also write the parameters, as safetensors")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the program: a file per layer template, a file per rank, schedule.txt, program.json."""
    with _compiled(target, example, mesh, freeze, cut, microbatches, schedule) as compiled:
        directory = compiled.write(output, weights)
        program, ranks = compiled.program, compiled.options.mesh.size
    passes = [{"name": r.name, "seconds": round(r.seconds, 4), "summary": r.summary} for r in program.history]
    if json_output:
        _json(
            {
                "directory": str(directory),
                "ranks": ranks,
                "templates": sorted(program.variants),
                "passes": passes,
            }
        )
        return
    table = Table("pass", "seconds", "leaves", title=f"{program.name}: {len(program.stages)} stages, {ranks} ranks")
    for row in passes:
        table.add_row(row["name"], f"{row['seconds']:.3f}", row["summary"])
    console.print(table)
    console.print(f"wrote {escape(str(directory))}", soft_wrap=True)
    console.print(f"run it: torchrun --nproc-per-node {ranks} -m csc.run {escape(str(directory))}", soft_wrap=True)


@app.command()
def dump(
    target: Target,
    after: Annotated[str, typer.Option("--after", help="pass name, or capture")] = "schedule",
    rank: Annotated[int | None, typer.Option("--rank", help="only this rank")] = None,
    region: Annotated[str | None, typer.Option("--region", help="only this region")] = None,
    form: Annotated[str, typer.Option("--format", help="text, python, dot, mermaid or html")] = "text",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="file to write instead of the screen")] = None,
    mesh: MeshOption = None,
    freeze: FreezeOption = None,
    cut: CutOption = None,
    microbatches: MicrobatchOption = None,
    schedule: ScheduleOption = None,
    example: ExampleOption = None,
    debug: DebugOption = False,
) -> None:
    """Print the graph after a pass, or the emitted Python."""
    from csc.inspection import dump as dump_text

    with _compiled(target, example, mesh, freeze, cut, microbatches, schedule) as compiled:
        text = dump_text(compiled, after, form, rank, region)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)


@app.command()
def diff(
    target: Target,
    first: Annotated[str, typer.Argument(help="pass name, or capture")],
    second: Annotated[str, typer.Argument(help="a later pass")],
    region: Annotated[str | None, typer.Option("--region", help="only this region")] = None,
    mesh: MeshOption = None,
    freeze: FreezeOption = None,
    cut: CutOption = None,
    microbatches: MicrobatchOption = None,
    schedule: ScheduleOption = None,
    example: ExampleOption = None,
    debug: DebugOption = False,
) -> None:
    """What changed between two passes, as a unified diff."""
    from csc.inspection import difference

    with _compiled(target, example, mesh, freeze, cut, microbatches, schedule) as compiled:
        text = difference(compiled, first, second, region)
    sys.stdout.write(text)


@app.command()
def passes(json_output: JsonOption = False) -> None:
    """List the passes with what each requires and ensures."""
    from csc.passes.runner import contracts

    found = contracts()
    if json_output:
        _json({"passes": [vars(contract) for contract in found]})
        return
    table = Table("pass", "does", "requires", "ensures", show_lines=True)
    for contract in found:
        table.add_row(
            *(escape(text) for text in (contract.name, contract.summary, contract.requires, contract.ensures))
        )
    console.print(table)


@app.command()
def explain(
    target: Target,
    mesh: MeshOption = None,
    freeze: FreezeOption = None,
    cut: CutOption = None,
    microbatches: MicrobatchOption = None,
    schedule: ScheduleOption = None,
    example: ExampleOption = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Components and regions: parameters, gradient needs, work of F, B and W, and what was pruned and why."""
    from csc.analysis.explain import explain as rows_of

    with _compiled(target, example, mesh, freeze, cut, microbatches, schedule) as compiled:
        components, regions = rows_of(compiled.program)
    if json_output:
        _json({"components": [r.as_dict() for r in components], "regions": [r.as_dict() for r in regions]})
        return
    for title, rows in (("components", components), ("regions", regions)):
        console.print(explain_table(title, rows))


def explain_table(title: str, rows: list[Any]) -> Table:
    """The rows of csc.analysis.explain as a table."""
    table = Table(
        "name",
        "stage",
        "parameters",
        "trainable",
        "dx",
        "dw",
        "matmuls F/B/W",
        "MFLOPs F/B/W",
        "pruned MFLOPs",
        "why",
        title=title,
    )
    for row in rows:
        table.add_row(
            escape(row.name), str(row.stage), f"{row.parameters:,}", f"{row.trainable:,}",
            "yes" if row.needs_dx else "-", "yes" if row.needs_dw else "-",
            "/".join(map(str, row.matmuls)), "/".join(f"{f / 1e6:.2f}" for f in row.flops),
            f"{row.pruned_flops / 1e6:.2f}", escape(row.why),
        )  # fmt: skip
    return table


@app.command()
def verify(
    target: Target,
    mesh: MeshOption = None,
    freeze: FreezeOption = None,
    cut: CutOption = None,
    microbatches: MicrobatchOption = None,
    schedule: ScheduleOption = None,
    example: ExampleOption = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="largest relative difference that passes")] = 1e-6,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare with eager PyTorch on the example batch: loss and every gradient. Exit code 1 if they differ."""
    from csc.verification import verify as compare

    with _compiled(target, example, mesh, freeze, cut, microbatches, schedule) as compiled:
        result = compare(compiled)
    good = result.grad_rel_max <= tolerance and result.loss_rel <= tolerance
    if json_output:
        _json(
            {
                "ok": good, "loss": result.loss, "loss_eager": result.loss_eager, "loss_rel": result.loss_rel,
                "grad_rel_max": result.grad_rel_max if result.grad_rel_max < float("inf") else None,
                "params_checked": result.params_checked, "params_bit_equal": result.bit_equal,
                "params_missing": list(result.params_missing), "params_unexpected": list(result.params_unexpected),
                "random_ops": result.random_ops,
            }
        )  # fmt: skip
    else:
        table = Table("parameter", "relative difference", title="largest differences to eager PyTorch")
        for name, value in sorted(result.grad_rel.items(), key=lambda item: -item[1])[:8]:
            table.add_row(escape(name), f"{value:.3g}")
        console.print(table)
        console.print(
            f"loss {result.loss:.7g}, eager {result.loss_eager:.7g}, relative difference {result.loss_rel:.3g}"
        )
        console.print(
            f"{result.params_checked} gradients, {result.bit_equal} of them bit-equal, "
            f"largest difference {result.grad_rel_max:.3g}"
        )
        for title, names in (("missing", result.params_missing), ("unexpected", result.params_unexpected)):
            for name in names:
                console.print(f"[red]{title}[/] {escape(name)}")
        if result.random_ops:
            console.print(f"{result.random_ops} random operations (dropout): eager and compiled draw different numbers")
        console.print("[green]equal[/]" if good else f"[red]different[/] (tolerance {tolerance:g})")
    if not good:
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit()


def _json(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


__all__ = ["InputError", "app", "explain_table", "main"]
