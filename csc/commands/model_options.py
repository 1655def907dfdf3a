"""The options that every command on a model takes: what to compile, and how."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from csc.commands.printing import DebugOption, shown

# --- What commands take that look at the lengths of samples ----------------------------------------------------------


LENGTHS = "an .npz with a column `tokens`, and one for each kind of units"

LengthsOption = Annotated[Path | None, typer.Option("--lengths", help=f"plan for samples like these: {LENGTHS}")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="samples of a step, over all replicas")]
MultipleOption = Annotated[int, typer.Option("--multiple", min=1, help="round widths of rows up to a multiple of this")]
PackedOption = Annotated[bool, typer.Option("--packed/--padded", help="samples in one row, or a row for each")]


# --- The options that every command on a model takes: what to compile, and how ---------------------------------------
#
#     @app.command()
#     @on_target
#     def explain(opening: Opening, json_output: JsonOption = False) -> None:
#         with opening as compiled: ...
#
# The command line gets TARGET and the options below; the command gets a context manager that yields the CompiledModel
# and shows progress for as long as it is open. Until then what is printed goes to stderr: results are printed behind
# it.


Opening = AbstractContextManager[Any]  # of a csc.CompiledModel, whose import takes seconds
Command = Callable[..., Any]
PipelineOption = Annotated[int | None, typer.Option("--pp", min=1, help="pipeline ranks, instead of the mesh's pp")]


def _options(
    target: Annotated[str, typer.Argument(help="path.py:name of a compiled model, a module or a factory")],
    mesh: Annotated[str | None, typer.Option(help="axis sizes, for example pp=3,dp=2")] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(help="component names or globs over parameter names; repeat it, or commas")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="ranks that share a component's tokens, as vision_tower=2; repeat it, or commas"),
    ] = None,
    cut: Annotated[list[str] | None, typer.Option(help="regions that open a stage; repeat it, or commas")] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="regions of the next stage, as names or globs with commas; repeat it")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="auto, gpipe, 1f1b, eager-1f1b, interleaved-1f1b, interleaved-zb, zb-h1, zb-h2, zb-v, or your own file"
        ),
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="number of stages on each rank")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="profile: a40, a100, h100, h200, cpu, or a file; commas: one for each pipeline rank"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="memory of one rank, for example 40GB; with commas one for each pipeline rank"),
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="microbatches per step")] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(help="none, selective, elementwise, full, auto (needs --memory), REGIONS=CHOICE; or commas"),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, with float32 master weights")] = None,
    keep_fp32: Annotated[
        list[str] | None, typer.Option(help="modules that stay in float32 with --precision; repeat it, or commas")
    ] = None,
    loss_chunk: Annotated[int | None, typer.Option(help="tokens whose logits exist at once; 0: all")] = None,
    fuse: Annotated[
        bool | None, typer.Option("--fuse/--no-fuse", help="compile the layers' functions with Inductor")
    ] = None,
    cuda_graphs: Annotated[bool | None, typer.Option(help="on GPUs, record stages as CUDA graphs")] = None,
    zero: Annotated[
        int | None,
        typer.Option(help="what dp ranks shard: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters"),
    ] = None,
    sequence_parallel: Annotated[bool | None, typer.Option(help="tp ranks divide tokens in norms and sums")] = None,
    replicate: Annotated[list[str] | None, typer.Option(help="operators that each tp rank computes whole")] = None,
    passes: Annotated[str | None, typer.Option(help="a line as `csc passes` shows, or path.py:name of passes")] = None,
    check: Annotated[
        bool | None,
        typer.Option("--check/--no-check", help="compare the program with eager PyTorch on the example first"),
    ] = None,
    example: Annotated[str | None, typer.Option(help="name of the example batch in the same file")] = None,
    fake: Annotated[
        bool, typer.Option("--fake", help="make the model without weights, for a mesh and a model of any size")
    ] = False,
) -> None:
    """Never called: its signature is what `on_target` gives to commands."""


SHARED = inspect.signature(_options, eval_str=True).parameters
DEBUG = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption)


def on_target(command: Command) -> Command:
    """The command with the options above in front of its own, and --debug behind them, which `main` looks for; its
    first parameter is the Opening.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [*SHARED.values(), *list(signature.parameters.values())[1:], DEBUG]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        shared = {name: values.pop(name) for name in SHARED}
        values.pop("debug")
        return command(_opened(shared), **values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@contextlib.contextmanager
def _opened(values: Mapping[str, Any]) -> Iterator[Any]:
    from csc.capture.trace.meta_init import meta_init
    from csc.commands.target import load_target, overridden

    with (
        contextlib.redirect_stdout(sys.stderr),  # what the user's file prints is no part of what a command prints
        meta_init() if values["fake"] else contextlib.nullcontext(),  # as long as a factory may be called
        shown(Console(stderr=True)) as tell,
    ):
        compiled = load_target(values["target"], values["example"])
        changes = {name: values[name] for name in ("mesh", "schedule", "chunks", "hardware", "memory", "microbatches")}
        changes |= {"precision": values["precision"], "keep_fp32": listed(values["keep_fp32"])}
        changes |= {"freeze": listed(values["freeze"]), "cuts": listed(values["cut"])}
        changes |= {"fuse": values["fuse"], "loss_chunk": values["loss_chunk"], "zero": values["zero"]}
        changes |= {"cuda_graphs": values["cuda_graphs"], "sequence_parallel": values["sequence_parallel"]}
        changes["recompute"] = _choices(listed(values["recompute"]))
        changes["stages"] = [listed([stage]) for stage in values["stage"]] if values["stage"] else None
        changes["replicate"] = listed(values["replicate"])
        changes["context"] = _context(values["context"])
        changes["passes"] = values["passes"]
        compiled = overridden(compiled, {**changes, "check": values["check"]})
        compiled.inspected.progress = tell
        yield compiled


def over(pp: int | None, compiled: Any) -> Any:
    """The CompiledModel with so many pipeline ranks; None: as it is."""
    if pp is None:
        return compiled
    return compiled.with_options(mesh=replace(compiled.options.mesh, pp=pp))


def _choices(values: list[str] | None) -> list[tuple[str, str]] | None:
    """`full` is a choice for all regions, `vision_tower=none` one for some."""
    if values is None:
        return None
    return [(regions or "*", choice) for regions, _, choice in (item.rpartition("=") for item in values)]


def listed(given: list[str] | None) -> list[str] | None:
    """Repeated and comma-separated values as one list; None if the option was not given."""
    return [name.strip() for item in given for name in item.split(",") if name.strip()] if given else None


def _context(values: list[str] | None) -> dict[str, int] | None:
    """`vision_tower=2` as a mapping."""
    from csc.errors import InputError

    pairs = [item.partition("=") for item in listed(values) or ()]
    for component, _, ranks in pairs:
        if not component or not ranks.strip().isdigit():
            raise InputError(f"--context has {component!r}", "command line", "write component=ranks, as vision_tower=2")
    return {component.strip(): int(ranks) for component, _, ranks in pairs} or None
