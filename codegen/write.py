"""The program directory: emitted whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

import torch
from csc.codegen.layer_file import batch_loss_source, layer_source, tables_source
from csc.codegen.manifest import manifest
from csc.codegen.rank_file import features_source, index, position_path, rank_path, rank_sources
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from csc.errors import InputError, ProgramError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program

# --- A program directory is put in place whole, or not at all --------------------------------------------------------


MANIFEST = "program.json"
CONSTANTS = "constants.safetensors"
EXAMPLE, WEIGHTS = "example.safetensors", "weights.safetensors"
SUFFIXES = (".py", ".txt", ".json", ".safetensors")


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """A folder that replaces `directory` at the end. InputError if something else than a csc program is there, or if
    it cannot be written; what was there before is then as it was.
    """
    directory = directory.resolve()
    if directory.exists() and not _replaceable(directory):
        raise InputError(
            f"{directory} exists and holds no csc program",
            "output directory",
            "choose another directory, or empty it",
        )
    folder = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        yield folder
        os.chmod(folder, 0o755)
        _swap_in(folder, directory)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"the program cannot be written ({error})", str(directory), "make room, or choose another directory"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def install(files: Mapping[str, bytes], directory: Path, example: Mapping[str, torch.Tensor]) -> None:
    """Write a program directory from what `contents` gave, with an example of one microbatch. ProgramError for paths
    that lead out of it.
    """
    for path in files:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            raise ProgramError(f"its file {path!r} is not within it", str(directory), "Compile the program again")
    inputs = [item["name"] for item in json.loads(files[MANIFEST])["inputs"]]
    with building(directory) as folder:
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        save_file(plain(with_values({name: example[name] for name in inputs if name in example})), folder / EXAMPLE)


def contents(directory: Path) -> dict[str, bytes]:
    """The compiled files of a program directory by their paths, in order."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix in SUFFIXES)
    named = {path.relative_to(directory).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in named.items() if name not in (EXAMPLE, WEIGHTS)}


def with_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An example whose features another process has loaded: zeros, of the size that they have there."""
    return {
        name: torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor for name, tensor in tensors.items()
    }


def plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors takes them: on the CPU, dense, sharing no memory. InputError for a dtype that it lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128:
            raise InputError(
                f"{name!r} holds complex128 numbers, which safetensors has no form for",
                name,
                "keep it as complex64, or as torch.view_as_real(...) and make it complex where it is used",
            )
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _replaceable(directory: Path) -> bool:
    return directory.is_dir() and ((directory / MANIFEST).is_file() or not any(directory.iterdir()))


def _swap_in(building: Path, directory: Path) -> None:
    """Put the finished directory in its place; a reader sees the old program or the new one."""
    if not directory.exists():
        os.rename(building, directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
    os.rename(directory, old / "program")
    try:
        os.rename(building, directory)
    except OSError:
        os.rename(old / "program", directory)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


# --- The program directory: emitted whole, or not at all -------------------------------------------------------------


LAYERS = "layers/__init__.py"
FEATURES, BATCH_LOSS = "features.py", "batch_loss.py"
ACTIONS = """\
# F s m     forward of stage s for microbatch m            SEND F a>b m, RECV F a>b m   activations from stage a to b
# B s m     backward: gradients of the stage's inputs      SEND B a>b m, RECV B a>b m   gradients from stage a to b
# W s m     backward: gradients of its parameters          REDUCE                       sum of gradients over ranks
# BW s m    B and W in one, region by region
"""
WHOLE_ACTIONS = """\
# GATHER s  all-gather of stage s' parameters begins       FREE s                       what it made is dropped
"""
Content = TypeVar("Content", str, bytes)


def sources(program: Program, options: Options) -> dict[str, str]:
    """Text by path of every emitted file but program.json."""
    files = {"__init__.py": "", LAYERS: "", "schedule.txt": _schedule(program)}
    used: dict[str, list] = {}
    indexed = index(program)
    for region in indexed.regions.values():
        used.setdefault(region.variant, []).append(region)
    for name, regions in used.items():
        variant = indexed.variants[name]
        files[f"layers/{name}.py"] = layer_source(program, variant, indexed.templates[variant.template], regions)
    if indexed.functions:
        files["layers/tables.py"] = tables_source(program)
    modules = sorted(Path(path).stem for path in files if path.startswith("layers/") and path != LAYERS)
    files[LAYERS] = "\n".join(["from . import (", *(f"    {name}," for name in modules), ")", ""])
    if program.features is not None:
        files[FEATURES] = features_source(indexed, program.features)
    if program.batch_loss is not None:
        files[BATCH_LOSS] = batch_loss_source(program.batch_loss)
    return files | rank_sources(indexed, options.mesh)


def _schedule(program: Program) -> str:
    """The schedule's text with a word for each of its actions."""
    first, rest = str(program.schedule).split("\n", 1)
    return f"{first}\n{ACTIONS}{WHOLE_ACTIONS if 'GATHER' in rest else ''}{rest}"


def write(
    program: Program,
    options: Options,
    directory: Path,
    example: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor] | None = None,
    ranks: Iterable[int] | None = None,
) -> Path:
    """Write the program directory. An earlier program of that name is replaced; anything else there is an InputError.

    example: one microbatch, saved for `csc run`, but for features that no user's batch has. weights: saved under the
    model's names if given. ranks: write the files of these alone; program.json stays that of all.
    program.json also gets the seconds of every step of the compilation; they are no part of its fingerprint.
    """
    start = time.perf_counter()
    wanted = None if ranks is None else checked_ranks(options.mesh, ranks)
    without = next((name for name, tensor in (weights or {}).items() if tensor.is_meta), None)
    if without is not None:
        fault = f"{without!r} has no data, the model is on the meta device"
        raise InputError(fault, "weights to write", "write the program without weights, or make the model with them")
    directory = Path(directory).resolve()
    with building(directory) as folder:
        files = sources(program, options)
        beside = [program.features.stage] if program.features is not None else []
        needed = {name for stage in (*program.stages, *beside) for name in stage.constants}
        constants = save(plain({n: t for n, t in program.constants.items() if n in needed}))
        content = manifest(program, options, files, {CONSTANTS: constants})
        (folder / "layers").mkdir()
        for path, text in (files if wanted is None else of_ranks(files, options.mesh, wanted)).items():
            (folder / path).write_text(text)
        (folder / CONSTANTS).write_bytes(constants)
        save_file(plain({i.name: example[i.name] for i in program.inputs if i.name in example}), folder / EXAMPLE)
        if weights is not None:
            save_file(plain(weights), folder / WEIGHTS)
        steps = [*((r.name, r.seconds) for r in program.history), ("emission", time.perf_counter() - start)]
        content["timings"] = {name: round(seconds, 4) for name, seconds in steps}
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    return directory


def checked_ranks(mesh: Mesh, ranks: Iterable[int]) -> list[int]:
    """The ranks, each once, in order. InputError if there is none, or one that the mesh does not have."""
    chosen = sorted(set(ranks))
    outside = [rank for rank in chosen if not 0 <= rank < mesh.size]
    if outside or not chosen:
        fault = f"there is no rank {outside[0]}" if outside else "no rank is named"
        raise InputError(fault, "ranks to emit", f"the mesh {mesh} has ranks 0 to {mesh.size - 1}")
    return chosen


def of_ranks(files: Mapping[str, Content], mesh: Mesh, ranks: Iterable[int]) -> dict[str, Content]:
    """What is shared by all ranks, and what these ranks have."""
    kept_paths = {path for rank in ranks for path in (rank_path(rank), position_path(mesh.coordinates(rank).pp))}
    removed_paths = {rank_path(rank) for rank in range(mesh.size)} | {position_path(p) for p in range(mesh.pp)}
    removed_paths -= kept_paths
    return {path: content for path, content in files.items() if path not in removed_paths}
