"""`csc checkpoint list | show | verify | convert`: what a training run has saved. See docs/checkpoints.md."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from csc.commands.printing import Column, DebugOption, JsonOption, console, print_json, shown, table

if TYPE_CHECKING:
    from csc.checkpoints.files import StepIndex

app = typer.Typer(no_args_is_help=True, help="List, show, check or convert the checkpoints of a training run.")

PathArgument = Annotated[Path, typer.Argument(help="directory of a run, or a step's folder in it")]
StepOption = Annotated[int | None, typer.Option("--step", help="step of the run; by default the last one saved")]


class ConversionFormat(StrEnum):
    """What a checkpoint is converted to."""

    CSC = "csc"
    HF = "hf"
    DCP = "dcp"


@app.command("list")
def list_command(
    run: Annotated[Path, typer.Argument(help="directory of a run")],
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Checkpoints of a run: step, when, of what, saved on which mesh, how large; and saves that were cut off."""
    from csc.checkpoints import files
    from csc.errors import InputError
    from csc.simulation.page import bytes_text

    if not run.is_dir():
        raise InputError("there is no such directory", str(run), "give the directory that a CheckpointManager saves to")
    indices: list[StepIndex] = []
    damaged: dict[str, str] = {}
    for folder in files.saved(run).values():
        try:
            indices.append(files.read(folder))
        except InputError as error:
            damaged[folder.name] = error.what
    begun = [folder.name for folder in files.cut_off(run)]
    if json_output:
        rows = [{**index.about, "folder": str(index.folder), "bytes": index.size()} for index in indices]
        print_json({"run": str(run), "checkpoints": rows, "damaged": damaged, "cut_off": begun})
        return
    if not indices and not damaged and not begun:
        console.print(f"no checkpoint of csc in {escape(str(run))}", soft_wrap=True)
        return
    about_run = (Column("mesh", 1), Column("zero", 3), Column("processes", 4), Column("holds", 2))
    listed = table("step", "saved", "model", *about_run, "size")
    for index in indices:
        about = index.about
        cells = (index.step, about["time"], about["model"], about["mesh"], about["zero"], about["processes"])
        listed.add_row(*(escape(str(cell)) for cell in (*cells, ", ".join(index.has), bytes_text(index.size()))))
    console.print(listed)
    for name, fault in damaged.items():
        console.print(f"[red]damaged[/] {escape(name)}: {escape(fault)}")
    for name in begun:
        console.print(f"[yellow]cut off[/] {escape(name)}: it has no index, and is not taken for a checkpoint")


@app.command()
def show(
    path: PathArgument,
    step: StepOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor with its parts")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """What is in a checkpoint: parameters that train or not, the optimizer and its groups, other state, files."""
    from csc.checkpoints import files
    from csc.simulation.page import bytes_text

    index = files.read(files.find(path, step))
    rows = _summary(index)
    if json_output:
        more = {"tensors": _tensors(index)} if tensors else {}
        groups = index.optimizer["groups"] if index.optimizer is not None else []
        kind = index.optimizer["kind"] if index.optimizer is not None else None
        content = {"folder": str(index.folder), **index.about, "optimizer": kind, "groups": groups, "what": rows}
        print_json({**content, "files": index.files(), **more})
        return
    about = index.about
    zero = f", zero={about['zero']}" if about["zero"] else ""
    console.print(
        f"step {index.step} of {escape(str(about['model']))}, saved {about['time']} by csc {about['csc']} on "
        f"{about['processes']} {'process' if about['processes'] == 1 else 'processes'}, mesh {about['mesh']}{zero}"
    )
    console.print(f"holds {', '.join(index.has)}; {len(index.files())} files, {bytes_text(index.size())}")
    listed = table("what", "tensors", "entries", "bytes", "dtypes")
    for row in rows:
        cells = (row["what"], row["tensors"], f"{row['entries']:,}", bytes_text(row["bytes"]), ", ".join(row["dtypes"]))
        listed.add_row(*(escape(str(cell)) for cell in cells))
    console.print(listed)
    for number, group in enumerate(index.optimizer["groups"] if index.optimizer is not None else ()):
        options = ", ".join(f"{key}={value}" for key, value in group["options"].items() if value is not None)
        console.print(escape(f"group {number}: {len(group['names'])} parameters, {options}"), highlight=False)
    if tensors:
        every = table("tensor", "shape", Column("dtype", 1), Column("trained", 2), Column("parts", 3))
        for row in _tensors(index):
            cells = (row["name"], row["shape"], row["dtype"], row["trained"], row["parts"])
            every.add_row(*(escape(str(cell)) for cell in cells))
        console.print(every)


def _summary(index: StepIndex) -> list[dict[str, Any]]:
    """Counts of what trains, what does not, and each kind of the optimizer's tensors."""
    kinds: dict[str, list[Any]] = {}
    for name, stored in index.parameters.items():
        kinds.setdefault("trained" if name in index.trained else "frozen, buffers", []).append(stored)
    for _, key, stored in index.of_optimizer():
        kinds.setdefault(f"optimizer: {key}", []).append(stored)
    return [
        {
            "what": kind, "tensors": len(members), "entries": sum(member.entries() for member in members),
            "bytes": sum(member.nbytes() for member in members), "dtypes": sorted({member.dtype for member in members}),
        }
        for kind, members in kinds.items()
    ]  # fmt: skip


def _tensors(index: StepIndex) -> list[dict[str, Any]]:
    named = [(name, name in index.trained, stored) for name, stored in index.parameters.items()]
    named += [(f"{name} ({key})", True, stored) for name, key, stored in index.of_optimizer()]
    return [
        {
            "name": name,
            "shape": list(stored.shape),
            "dtype": stored.dtype,
            "trained": trained,
            "parts": len(stored.parts),
        }
        for name, trained, stored in named
    ]


@app.command()
def verify(
    path: PathArgument, step: StepOption = None, json_output: JsonOption = False, debug: DebugOption = False
) -> None:
    """Read a checkpoint and compare every byte with what was saved. Exit code 1 if something is damaged or missing."""
    from csc.checkpoints import files, restoring

    index = files.read(files.find(path, step))
    damaged = list(restoring.damaged(index))
    if json_output:
        rows = [{"file": error.where, "what": error.what} for error in damaged]
        print_json({"folder": str(index.folder), "ok": not damaged, "files": index.files(), "damaged": rows})
    else:
        for error in damaged:
            console.print(f"[red]damaged[/] {escape(error.where)}: {escape(error.what)}", soft_wrap=True)
        if not damaged:
            console.print(f"[green]whole[/]: {len(index.files())} files of {escape(str(index.folder))}")
    if damaged:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="a checkpoint of csc, or a directory of HF or of DCP")],
    out: Annotated[Path, typer.Argument(help="directory to create")],
    to: Annotated[
        ConversionFormat | None,
        typer.Option("--to", help="hf: weights for from_pretrained; dcp: torch.distributed.checkpoint"),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="step of the run, or the number of the new one")] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="optimizer class of a DCP directory's state; by default AdamW")
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make Hugging Face's or torch's directory of a checkpoint (--to), or a checkpoint of one of these."""
    from csc.driver import checkpoint as conversion

    kind = conversion.kind(source)
    wanted = to.value if to is not None else (conversion.HF if kind == conversion.CSC else conversion.CSC)
    with shown(Console(stderr=True)) as tell:
        conversion_made = conversion.convert(source, out, wanted, step, optimizer, tell)
    path_written, left = conversion_made.made, conversion_made.left
    if json_output:
        print_json({"source": str(source), "from": kind, "to": wanted, "made": str(path_written), "left_out": left})
        return
    console.print(f"wrote {escape(str(path_written))}", soft_wrap=True)
    if left:
        console.print(f"left out, since a checkpoint has no place for them: {escape(', '.join(left))}")
