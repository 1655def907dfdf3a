"""Weights written as safetensors, as HF stores them: whole, or not at all.

Terms: a *shard* is one file of several; its *index* (model.safetensors.index.json) says which parameter is in which
shard. The first dp replica of a rank writes what it *owns*: a tied parameter is written by its owner alone. Every
*save* names its shards anew: until its index is in place, the one before with its shards is what is read; then those
are removed. A file's header has the SHA-256 of each of its tensors (`digests`), which csc checks when it
reads them; other readers leave it alone.

    write(directory, manifest, position, tensors, format, save)  a rank's shard, or (None) all in one file
    write_index(directory, manifest, format, save)               once all shards are there
    discard(directory, manifest, position, save)                 a shard of a save that failed
    check_rest(format)                                           whether what no program reads has values
    digest(tensor) -> str                                        of its bytes
    with_own_memory(tensor) -> tensor                            a dense copy on the CPU
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from csc.errors import InputError
from csc.runtime.specs import Manifest, ParameterSpec
from csc.runtime.weights import DIGESTS, INDEX, OWN, SINGLE, WeightLayout, bytes_of

_SHARD = re.compile(r"model-\d{5}-of-\d{5}(-[0-9a-f]{8})?\.safetensors")
_UNFINISHED = re.compile(r"\.model[-.].*\.tmp")


def shard_name(manifest: Manifest, position: int, save: str) -> str:
    """File of what a position on the pp axis owns: model.safetensors if there is one, else
    model-0000R-of-0000P-SAVE.safetensors, R from 1.
    """
    count = manifest.mesh.pp
    return SINGLE[0] if count == 1 else f"model-{position + 1:05d}-of-{count:05d}-{save}.safetensors"


def _parameters_of(manifest: Manifest, position: int | None) -> list[ParameterSpec]:
    return [p for p in manifest.parameters if position is None or p.owner == position]


def write(
    directory: str | Path,
    manifest: Manifest,
    position: int | None,
    tensors: Mapping[str, torch.Tensor],
    format: WeightLayout = OWN,
    save: str = "00000000",
) -> None:
    """Write what `position` owns into its shard; None: everything into model.safetensors. InputError if that cannot be
    written; then what was saved there before is as it was. save: 8 hexadecimal digits.
    """
    path = Path(directory)
    owned = {p.name: tensors[p.name] for p in _parameters_of(manifest, position)}
    if not position:
        check_rest(format)
        owned |= format.rest
    name = SINGLE[0] if position is None else shard_name(manifest, position, save)
    if owned or name == SINGLE[0]:
        stored = {n: _alone(t) for n, t in format.stored(owned).items()}
        digests = {n: digest(t) for n, t in stored.items()}
        metadata = {"format": "pt", DIGESTS: json.dumps(digests)}
        published(path / name, lambda file: save_file(stored, file, metadata=metadata))
    if name == SINGLE[0]:
        _removed(path / INDEX)  # of an older save: readers would prefer it
        _clear(path, set())


def check_rest(format: WeightLayout) -> None:
    """InputError if something of the rest has no values."""
    without = [name for name, tensor in format.rest.items() if tensor.is_meta]
    if without:
        what = f"{without[0]!r}, which the step does not use, has no values: the model is on the meta device"
        raise InputError(what, "save", "Load weights that have it with compiled.load(...)")


def write_index(directory: str | Path, manifest: Manifest, format: WeightLayout = OWN, save: str = "00000000") -> None:
    """Write the index over all shards, and remove those of older saves; one process does this, after all have written.
    Nothing to do for one stage.
    """
    if manifest.mesh.pp == 1:
        return
    path = Path(directory)
    files: dict[str, str] = {}
    size = 0
    for position in range(manifest.mesh.pp):
        owned = {
            p.name: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in _parameters_of(manifest, position)
        } | ({name: t.to("meta") for name, t in format.rest.items()} if position == 0 else {})
        stored = format.stored(owned)
        files |= dict.fromkeys(stored, shard_name(manifest, position, save))
        size += sum(tensor.nbytes for tensor in stored.values())
    table = {"metadata": {"total_size": size}, "weight_map": files}
    text = json.dumps(table, indent=2) + "\n"
    try:
        published(path / INDEX, lambda file: file.write_text(text))
    except InputError:
        for position in range(manifest.mesh.pp):
            discard(path, manifest, position, save)
        raise
    _removed(path / SINGLE[0])  # of an older save: HF would prefer it
    _clear(path, set(files.values()))


def discard(directory: str | Path, manifest: Manifest, position: int, save: str) -> None:
    """Remove a shard that no index lists."""
    with contextlib.suppress(OSError):
        if manifest.mesh.pp > 1:
            (Path(directory) / shard_name(manifest, position, save)).unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """Make it and those above it. InputError if a file stands in the way, or it cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        what = "a file is where a directory is to be made"
        raise InputError(what, str(directory), "Save to another path") from error
    except OSError as error:
        raise InputError(f"it cannot be made ({error})", str(directory), "Save to another path") from error


def published(file: Path, write: Callable[[Path], object]) -> None:
    """Make a file, of which readers see nothing before it is on the disk. InputError if it cannot be written."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        try:
            make_directory(file.parent)
            write(temporary)
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, file)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"it cannot be written ({error})",
            str(file),
            "Make room, or save to another directory; what was saved there before is as it was",
        ) from error


def flushed(folder: Path) -> None:
    """The names in it are on the disk, as far as the file system does that."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _removed(older: Path) -> None:
    try:
        older.unlink(missing_ok=True)
    except OSError as error:
        what = f"it is of an older save, and cannot be removed ({error}): some programs would read it all the same"
        raise InputError(what, str(older), "Remove it, or save to another directory") from error


def _clear(directory: Path, listed: set[str]) -> None:
    """Remove shards of older saves, and what saves that were cut off have left."""
    for file in list(directory.iterdir()):
        if (_SHARD.fullmatch(file.name) and file.name not in listed) or _UNFINISHED.fullmatch(file.name):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """As safetensors wants all that it writes together: labels may be the very tensor of the tokens, or a view."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a dense tensor on the CPU, in hexadecimal digits."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, with a memory of its own: safetensors stores nothing that is shared."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
