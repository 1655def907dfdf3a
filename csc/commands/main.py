"""The command line: `csc compile | dump | explain | verify | simulate | ...`. Commands only; the work is done below."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from csc import __version__
from csc.commands.cache import app as cache_app
from csc.commands.mask import mask
from csc.commands.options import Opening, on_target
from csc.commands.timings import compile_times, timings_table
from csc.errors import CscError, InputError
from csc.simulation.look import bytes_text, seconds_text

ABOUT = "Compile the training step of a multimodal LLM into one readable Python program per rank."
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=ABOUT)
errors = Console(stderr=True)
console = Console(width=None if sys.stdout.isatty() else 160)

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


@app.command("compile")
@on_target
def compile_command(
    opening: Opening,
    output: Annotated[Path, typer.Option("-o", "--output", help="directory to write")],
    weights: Annotated[bool, typer.Option("--weights", help="also write the parameters, as safetensors")] = False,
    timings: Annotated[bool, typer.Option("--timings", help="show what each step of the compilation took")] = False,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", help="write the files of this rank alone; repeat it for several")
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the program: a file per layer template, a file per rank, schedule.txt, program.json."""
    with opening as compiled:
        checked = compiled.check() if compiled.checks and not rank else ""
        directory = compiled.write(output, weights, rank or None)
        program, ranks = compiled.program, compiled.options.mesh.size
    passes = [{"name": r.name, "seconds": round(r.seconds, 4), "summary": r.summary} for r in program.history]
    tracing = ("capture", "normalise")
    spent = compile_times(directory)
    if json_output:
        _json(
            {
                "directory": str(directory),
                "ranks": ranks,
                "emitted": sorted(set(rank)) if rank else list(range(ranks)),
                "templates": sorted(program.variants),
                "passes": [row for row in passes if row["name"] not in tracing],
                "timings": spent,
                "check": checked,
            }
        )
        return
    if timings:
        console.print(timings_table(program.name, spent, {row["name"]: row["summary"] for row in passes}))
    held = f"{len(program.stages)} stages on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    console.print(f"{program.name}: {held}, {len(program.variants)} layer files, in {spent['total']:.1f} s")
    alone = f", of {ranks} ranks only {', '.join(map(str, sorted(set(rank))))}" if rank else ""
    if checked:
        console.print(escape(checked))
    console.print(f"wrote {escape(str(directory))}{alone}", soft_wrap=True)
    console.print(f"run it: torchrun --nproc-per-node {ranks} -m csc.run {escape(str(directory))}", soft_wrap=True)


@app.command()
@on_target
def dump(
    opening: Opening,
    after: Annotated[str, typer.Option("--after", help="pass name, or capture")] = "schedule",
    rank: Annotated[int | None, typer.Option("--rank", help="only this rank")] = None,
    region: Annotated[str | None, typer.Option("--region", help="only this region")] = None,
    form: Annotated[str, typer.Option("--format", help="text, python, mermaid or html")] = "text",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="file to write instead of the screen")] = None,
    debug: DebugOption = False,
) -> None:
    """Print the graph after a pass, or the emitted Python."""
    from csc.reports.inspection import dump as dump_text

    with opening as compiled:
        text = dump_text(compiled, after, form, rank, region)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)


@app.command()
@on_target
def diff(
    opening: Opening,
    first: Annotated[str, typer.Argument(help="pass name, or capture")],
    second: Annotated[str, typer.Argument(help="a later pass")],
    region: Annotated[str | None, typer.Option("--region", help="only this region")] = None,
    debug: DebugOption = False,
) -> None:
    """What changed between two passes, as a unified diff."""
    from csc.reports.inspection import difference

    with opening as compiled:
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
@on_target
def explain(
    opening: Opening,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Components and regions: parameters, gradient needs, work of F, B and W, and what was pruned and why."""
    from csc.analysis.explain import explain as rows_of

    with opening as compiled:
        components, regions = rows_of(compiled.program)
    if json_output:
        rows = {"components": [r.as_dict() for r in components], "regions": [r.as_dict() for r in regions]}
        _json({**rows, "notes": list(compiled.program.notes)})
        return
    for title, rows_ in (("components", components), ("regions", regions)):
        console.print(explain_table(title, rows_))
    for note in compiled.program.notes:
        console.print(escape(note))


def explain_table(title: str, rows: list[Any]) -> Table:
    """The rows of csc.analysis.explain as a table; what all names begin with (PEFT's wrappers) is in the title."""
    around = "".join(f"{part}." for part in _common([row.name.split(".")[:-1] for row in rows]))
    if around:
        title = f"{title} of {around[:-1]}"
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
            escape(row.name.removeprefix(around)), str(row.stage), f"{row.parameters:,}", f"{row.trainable:,}",
            "yes" if row.needs_dx else "-", "yes" if row.needs_dw else "-",
            "/".join(map(str, row.matmuls)), "/".join(f"{f / 1e6:.2f}" for f in row.flops),
            f"{row.pruned_flops / 1e6:.2f}", escape(row.why),
        )  # fmt: skip
    return table


def _common(paths: list[list[str]]) -> list[str]:
    """What all paths begin with."""
    alike = 0
    while paths and all(path[alike : alike + 1] == paths[0][alike : alike + 1] != [] for path in paths):
        alike += 1
    return paths[0][:alike] if paths else []


@app.command()
@on_target
def verify(
    opening: Opening,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="largest relative difference that passes; default 1e-6, with cp > 1 1e-5, in bf16 0.1, or where it is "
            "more, 16 times what a changed last bit of every weight makes of eager's own gradient",
        ),
    ] = None,
    float64: Annotated[
        bool,
        typer.Option(
            "--float64",
            help="compare both with eager PyTorch in float64 too: a gradient that is as near to it as eager's passes",
        ),
    ] = False,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="also compare parameters after so many optimizer steps")
    ] = 0,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare with eager PyTorch on the example batch: loss and every gradient. Exit code 1 if they differ."""
    from csc.reports.verification import default_tolerance, parting
    from csc.reports.verification import verify as compare

    with opening as compiled:
        result = compare(compiled, float64=float64, steps=steps, rounding=tolerance is None)
        tolerance = default_tolerance(compiled.options) if tolerance is None else tolerance
        good = result.good(tolerance)
        place = None if good else parting(compiled, tolerance)
    if json_output:
        _json(
            {
                "ok": good, "loss": result.loss, "loss_eager": result.loss_eager, "loss_rel": result.loss_rel,
                "grad_rel_max": result.grad_rel_max if result.grad_rel_max < float("inf") else None,
                "params_checked": result.params_checked, "params_bit_equal": result.bit_equal,
                "params_missing": list(result.params_missing), "params_unexpected": list(result.params_unexpected),
                "random_ops": result.random_ops, "unknown_random_ops": list(result.unknown),
                "trained_rel_max": max(result.trained_rel.values(), default=0.0) if steps else None, "parting": place,
                "from_float64": {name: list(both) for name, both in result.from_float64.items()} if float64 else None,
            }
        )  # fmt: skip
    else:
        further = ("eager from float64", "compiled from float64") if float64 else ()
        table = Table("parameter", "relative difference", *further, title="largest differences to eager PyTorch")
        for name, value in sorted(result.grad_rel.items(), key=lambda item: -item[1])[:8]:
            table.add_row(escape(name), *(f"{one:.3g}" for one in (value, *result.from_float64.get(name, ()))))
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
            console.print(f"{result.random_ops} random operations (dropout): both had the same constants for numbers")
        for name in result.unknown:
            console.print(f"[red]drawn[/] {name}: eager and compiled have different random numbers")
        if steps:
            most = max(result.trained_rel.values(), default=0.0)
            console.print(f"after {steps} optimizer steps parameters have moved as eager's, to {most:.3g} of the way")
        if place:
            console.print(escape(place))
        console.print("[green]equal[/]" if good else f"[red]different[/] (tolerance {tolerance:g})")
    if not good:
        raise typer.Exit(1)


@app.command()
@on_target
def simulate(
    opening: Opening,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="pipeline ranks, instead of the mesh's pp")
    ] = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="schedule of the split to compare with, or none")
    ] = "1f1b",
    jitter: Annotated[
        bool, typer.Option("--jitter", help="disturb every action as a busy cluster does (J3 of arXiv 2605.18750)")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the plan's timeline, as JSON")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="write a page that shows both timelines")] = None,
    chrome: Annotated[Path | None, typer.Option("--chrome", help="write a Chrome trace, for Perfetto")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What the plan will take: makespan, bubble and memory by rank, the lower bound, and a frozen-unaware baseline."""
    from dataclasses import replace

    from csc.reports.forecast import forecast
    from csc.simulation.jitter import J3

    with opening as compiled:
        if ranks is not None:
            compiled = compiled.with_options(mesh=replace(compiled.options.mesh, pp=ranks))
        found = forecast(compiled, None if baseline == "none" else baseline, J3 if jitter else None)
    timelines = [found.plan, *([found.baseline] if found.baseline is not None else [])]
    _write_timelines(
        timelines, f"{compiled.program.name}: {found.layout}", output, page, chrome, found.bound, found.memory
    )
    if json_output:
        _json(found.as_dict())
        return
    table = Table(
        "rank", "holds", "busy", "bubble", "peak memory", "of it activations", title=f"{found.schedule}, {found.layout}"
    )
    for rank in found.as_dict()["ranks"]:
        table.add_row(
            str(rank["rank"]), escape(rank["holds"]), seconds_text(rank["busy"]), f"{rank['bubble_share']:.1%}",
            bytes_text(rank["peak_memory"]), bytes_text(rank["peak_activations"]),
        )  # fmt: skip
    console.print(table)
    console.print(f"makespan {seconds_text(found.plan.makespan)}; costs: {escape(found.costs)}", highlight=False)
    kind = "plans with any number of stages on a rank" if found.shared else "partitions into one stage a rank"
    console.print(
        f"lower bound {seconds_text(found.bound)}, over all {kind}: the plan is {found.gap:.1%} above it",
        highlight=False,
    )
    if found.baseline is not None:
        console.print(
            f"{found.baseline.name}: {seconds_text(found.baseline.makespan)}, peak memory "
            f"{bytes_text(max(found.baseline.peak_memory))}; the plan is {found.speedup:.2f} x as fast",
            highlight=False,
        )


@app.command()
def timeline(
    sources: Annotated[
        list[Path],
        typer.Argument(help="timeline files, and directories of compiled programs (what their plan expects)"),
    ],
    page: Annotated[Path | None, typer.Option("--page", help="write a page that shows them under each other")] = None,
    chrome: Annotated[Path | None, typer.Option("--chrome", help="write a Chrome trace, for Perfetto")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Lay timelines on top of each other: what a plan expects, and what `csc.run --timeline` measured."""
    from csc.reports.forecast import comparison, read

    timelines = [read(source) for source in sources]
    _write_timelines(timelines, "timelines", None, page, chrome)
    rows = comparison(timelines)
    if json_output:
        _json({"timelines": [vars(row) for row in rows]})
        return
    table = Table("timeline", "makespan", "over the first", "bubble", "mean F", "mean B", "mean W", "mean BW")
    for row in rows:
        means = [seconds_text(row.seconds[kind]) if kind in row.seconds else "" for kind in ("F", "B", "W", "BW")]
        table.add_row(
            escape(row.name), seconds_text(row.makespan), f"{row.over_first:.3f}", f"{row.bubble_share:.1%}", *means
        )
    console.print(table)


def _write_timelines(
    timelines: list[Any], title: str, output: Path | None, page: Path | None, chrome: Path | None,
    bound: float | None = None, limit: float | None = None,
) -> None:  # fmt: skip
    from csc.simulation.chrome import chrome_trace
    from csc.simulation.page import page as page_text
    from csc.simulation.timeline import to_json

    if output is not None:
        output.write_text(json.dumps(to_json(timelines[0])))
    if page is not None:
        page.write_text(page_text(timelines, title, bound, limit))
    if chrome is not None:
        chrome.write_text(json.dumps(chrome_trace(timelines)))


@app.command()
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
    debug: DebugOption = False,
) -> None:
    """FLOPs, bytes and, with --hardware, seconds of F, B and W of one microbatch, by component and region."""
    from csc.analysis.hardware import hardware
    from csc.commands.cost_tables import cost_tables
    from csc.reports.costs import report

    with opening as compiled:
        chosen = hardware(compiled.options.hardware) if compiled.options.hardware else None
        found = report(compiled, chosen, master, symbolic)
    if json_output:
        _json(found.as_dict())
        return
    for table in cost_tables(found):
        console.print(table)
    for symbol, size in found.sizes.items():
        console.print(f"{symbol} = {size}: {escape(found.meanings[symbol])}", highlight=False)


@app.command()
@on_target
def profile(
    opening: Opening,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write it, as a .toml for --hardware")] = None,
    budget: Annotated[float, typer.Option("--seconds", min=0.0, help="how long to measure, at most")] = 20.0,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure F, B and W of every template on the device at hand, fit the cost model to them, report its error."""
    from csc.commands.cost_tables import profile_summary, profile_table
    from csc.reports.profiling import profile as measured

    with opening as compiled:
        found = measured(compiled, compiled.options.hardware, budget, output)
    if json_output:
        _json(found.as_dict())
        return
    console.print(profile_table(found))
    console.print(profile_summary(found), highlight=False)
    if output is not None:
        console.print(f"wrote {escape(str(output))}: use it with --hardware {escape(str(output))}", soft_wrap=True)


app.command()(mask)
app.add_typer(cache_app, name="cache")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit()


def _json(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


__all__ = ["InputError", "app", "explain_table", "main"]
