"""Weights on disk: safetensors under the model's own names, as HF stores them.

Terms: a *shard* is one file of several; its *index* (model.safetensors.index.json) says which parameter is in
which shard. The first dp replica of a rank writes what it *owns*: a tied parameter is written by its owner
alone. *Others* are parameters of the model that the program does not use: nothing trains them, a whole model has them,
and they go with the first shard.

    read(path, parameters, device) -> {name: tensor}         only these, lazily; a file, or a directory as of HF
    write(directory, manifest, position, tensors, others)    a rank's shard, or (None) all in one file
    write_index(directory, manifest, others)                 once all shards are there
    check(parameters, tensors)                           tensors in memory against what the program needs

Files appear whole or not at all: written under another name, then renamed.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from csc.errors import InputError
from csc.runtime.specs import Manifest, ParameterSpec

INDEX = "model.safetensors.index.json"
SINGLE = ("model.safetensors", "weights.safetensors")


def read(
    path: str | Path,
    parameters: Iterable[ParameterSpec],
    device: torch.device | str = "cpu",
    optional: bool = False,
) -> dict[str, torch.Tensor]:
    """Read these parameters, nothing else. InputError for a file, name, shape or dtype that does not fit.

    optional: those that are not there are left out.
    """
    specs = {spec.name: spec for spec in parameters}
    found: dict[str, torch.Tensor] = {}
    for file, names in _files(Path(path), list(specs), optional).items():
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                there = set(opened.keys())
                for name in names:
                    if name not in there:
                        if optional:
                            continue
                        raise _unknown(name, there, str(file))
                    piece = opened.get_slice(name)
                    dtype = _DTYPES.get(piece.get_dtype(), piece.get_dtype())
                    _check(specs[name], tuple(piece.get_shape()), dtype, str(file))
                    found[name] = opened.get_tensor(name)
        except FileNotFoundError:
            raise InputError("there is no such file", str(file), "Give a safetensors file or directory") from None
        except SafetensorError as error:
            raise InputError(f"it is not safetensors: {error}", str(file), "Save the weights again") from None
    return found


def _files(path: Path, names: list[str], optional: bool) -> dict[Path, list[str]]:
    if not path.is_dir():
        return {path: names}
    index = path / INDEX
    if index.is_file():
        try:
            table = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"it is not an index of shards: {error}", str(index), "Save the weights again") from None
        files: dict[Path, list[str]] = {}
        for name in names:
            if name not in table:
                if optional:
                    continue
                raise _unknown(name, table, str(index))
            files.setdefault(path / table[name], []).append(name)
        return files
    for single in SINGLE:
        if (path / single).is_file():
            return {path / single: names}
    raise InputError(
        f"it has neither {INDEX} nor {' nor '.join(SINGLE)}", str(path), "Give a directory that holds weights"
    )


def _unknown(name: str, there: Iterable[str], where: str) -> InputError:
    close = difflib.get_close_matches(name, list(there), 3, 0.6)
    return InputError(
        f"parameter {name!r} is not in it",
        where,
        f"Close names there: {', '.join(close)}" if close else "Are these the weights of another model?",
    )


def check(parameters: Iterable[ParameterSpec], tensors: Mapping[str, torch.Tensor]) -> None:
    """InputError unless `tensors` has every parameter in its shape and dtype; more names are fine."""
    for spec in parameters:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise _unknown(spec.name, tensors, "weights")
        _check(spec, tuple(tensor.shape), tensor.dtype, "weights")


def _check(spec: ParameterSpec, shape: tuple[int, ...], dtype: torch.dtype | str, where: str) -> None:
    if shape != spec.shape:
        raise InputError(
            f"parameter {spec.name!r} has shape {list(shape)} there, {list(spec.shape)} in the program",
            where,
            "Are these the weights of a model of another size?",
        )
    if dtype != spec.dtype:
        raise InputError(
            f"parameter {spec.name!r} is {dtype} there, {spec.dtype} in the program",
            where,
            "Convert the weights, or compile the model in their dtype",
        )


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def shard_name(manifest: Manifest, position: int) -> str:
    """File of what a position on the pp axis owns: model.safetensors if there is one, else
    model-0000R-of-0000P.safetensors, R from 1.
    """
    count = manifest.mesh.pp
    return SINGLE[0] if count == 1 else f"model-{position + 1:05d}-of-{count:05d}.safetensors"


def write(
    directory: str | Path,
    manifest: Manifest,
    position: int | None,
    tensors: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Write what `position` owns into its shard, others into the first; None: everything into model.safetensors."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    owned = {p.name: tensors[p.name] for p in manifest.parameters if position is None or p.owner == position}
    owned |= {} if position else others
    name = SINGLE[0] if position is None else shard_name(manifest, position)
    if owned or name == SINGLE[0]:
        file = path / name
        temporary = path / f".{name}.{os.getpid()}.tmp"
        try:
            save_file({n: _alone(t) for n, t in owned.items()}, temporary, metadata={"format": "pt"})
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    if name == SINGLE[0]:
        (path / INDEX).unlink(missing_ok=True)  # of an older save: readers would prefer it


def write_index(
    directory: str | Path, manifest: Manifest, others: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> None:
    """Write the index over all shards; one process does this, after all have written. Nothing to do for one
    stage.
    """
    if manifest.mesh.pp == 1:
        return
    path = Path(directory)
    size = sum(math.prod(p.shape) * p.dtype.itemsize for p in manifest.parameters)
    table = {
        "metadata": {"total_size": size + sum(tensor.nbytes for tensor in others.values())},
        "weight_map": {p.name: shard_name(manifest, p.owner) for p in manifest.parameters}
        | dict.fromkeys(others, shard_name(manifest, 0)),
    }
    temporary = path / f".{INDEX}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(table, indent=2) + "\n")
    os.replace(temporary, path / INDEX)
    (path / SINGLE[0]).unlink(missing_ok=True)  # of an older save: HF would prefer it


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, with a memory of its own: safetensors stores nothing that is shared."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
