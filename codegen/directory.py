"""A program directory is put in place whole, or not at all.

with building(directory) as folder: ...          what is written to `folder` becomes `directory`
install(files, directory, example)               a directory from the bytes of its files
contents(directory) -> {path: bytes}             of what was compiled: without example and weights
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from csc.errors import InputError, ProgramError

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
    found = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix in SUFFIXES)
    named = {path.relative_to(directory).as_posix(): path for path in found}
    return {name: path.read_bytes() for name, path in named.items() if name not in (EXAMPLE, WEIGHTS)}


def with_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An example whose features another process has loaded: zeros, of the size that they have there."""
    return {name: torch.zeros_like(one, device="cpu") if one.is_meta else one for name, one in tensors.items()}


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
