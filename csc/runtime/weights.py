"""Weights on disk: safetensors under the model's own names, as HF stores them.

Terms: a *shard* is one file of several; its *index* (model.safetensors.index.json) says which parameter is in
which shard. The first dp replica of a rank writes what it *owns*: a tied parameter is written by its owner
alone.

A *format* says how files name and lay out the parameters where they do not do so as the program does (see
csc.checkpoint); its *pieces* are tensors of the files that make some parameters together, its *rest* what the model has
and the program does not use: nothing trains it, a whole model has it, and it goes with the first shard.

    each(path, parameters, device, format) -> (name, tensor)...  only these, one by one; a file, or a directory as of HF
    read(path, parameters, device, format) -> {name: tensor}     all of them
    write(directory, manifest, position, tensors, format)        a rank's shard, or (None) all in one file
    write_index(directory, manifest, format)                     once all shards are there
    check(parameters, tensors)                                   tensors in memory against what the program needs

Reading takes the memory of what is read, and no second copy of it: see `_Files`. Files appear whole or not at all:
written under another name, then renamed.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from csc.errors import InputError
from csc.runtime.specs import Manifest, ParameterSpec

INDEX = "model.safetensors.index.json"
SINGLE = ("model.safetensors", "weights.safetensors")


@dataclass(frozen=True)
class Piece:
    """Tensors of the files (`keys`) and the parameters that `make` gives for them (`names`)."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    make: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """pieces: of the tensors that the files have. stored: parameters as files have them (meta tensors: their names and
    shapes). rest: tensors of the model that no program reads, by the model's names; the first shard takes them.
    """

    pieces: Callable[[Iterable[str]], list[Piece]]
    stored: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    rest: Mapping[str, torch.Tensor]


def own_pieces(keys: Iterable[str]) -> list[Piece]:
    """Every tensor is the parameter of its name."""
    return [Piece((key,), (key,), dict) for key in keys]


OWN = Format(own_pieces, dict, {})


def read(
    path: str | Path,
    parameters: Iterable[ParameterSpec],
    device: torch.device | str = "cpu",
    format: Format = OWN,
    optional: bool = False,
) -> dict[str, torch.Tensor]:
    """Read these parameters, nothing else. InputError for a file, name, shape or dtype that does not fit.

    optional: those that are not there are left out.
    """
    return dict(each(path, parameters, device, format, optional))


def each(
    path: str | Path,
    parameters: Iterable[ParameterSpec],
    device: torch.device | str = "cpu",
    format: Format = OWN,
    optional: bool = False,
    into: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """These parameters, one by one, in memory of their own. All InputErrors come before the first one.

    into: tensors of the right shape and dtype that are filled where a tensor of the files is a parameter as it is.
    """
    specs = {spec.name: spec for spec in parameters}
    table = _table(Path(path))
    pieces = [piece for piece in format.pieces(table) if not specs.keys().isdisjoint(piece.names)]
    there = {name for piece in pieces for name in piece.names}
    for name in specs:
        if name not in there and not optional:
            raise _unknown(name, table, str(path))
    with _Files(table) as files:
        as_it_is: dict[str, str] = {}  # parameters that a tensor of the files is, under whatever name
        for piece in pieces:
            headers = {key: files.header(key) for key in piece.keys}
            for name, found in piece.make(headers).items():
                whole = next((key for key, header in headers.items() if header is found), None)
                if whole is not None:
                    as_it_is[name] = whole
                if name in specs:
                    _check(specs[name], found, str(path if whole is None else table[whole]))
        for piece in pieces:
            wanted = [name for name in piece.names if name in specs]
            if as_it_is.keys() >= set(wanted):
                for name in wanted:
                    yield name, files.tensor(as_it_is[name], device, into[name] if into is not None else None)
                continue
            made = piece.make({key: files.tensor(key, device) for key in piece.keys})
            yield from ((name, made[name]) for name in wanted)


PORTION = 16 * 2**20  # bytes


class _Files:
    """Tensors of several safetensors files, read in portions.

    The pages of a mapped file that were read count as memory of the process for as long as the file is mapped. So what
    is read is copied out, PORTION bytes at most at a time, and then the file is mapped anew.
    """

    def __init__(self, table: Mapping[str, Path]) -> None:
        self.table = table
        self.stack = ExitStack()
        self.opened: dict[Path, Any] = {}
        self.headers: dict[str, torch.Tensor] = {}
        self.mapped = 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        self.opened.clear()
        self.stack.close()
        self.mapped = 0

    def _file(self, key: str) -> Any:
        file = self.table[key]
        if file not in self.opened:
            self.opened[file] = self.stack.enter_context(_opened(file))
        return self.opened[file]

    def header(self, key: str) -> torch.Tensor:
        """Shape and dtype of a tensor, as a meta tensor. InputError if torch has no such dtype."""
        if key not in self.headers:
            try:
                found = self._file(key).get_slice(key)
            except SafetensorError:
                what = f"{key!r} is not in it, though the index says so"
                raise InputError(what, str(self.table[key]), "Save the weights again") from None
            if found.get_dtype() not in _DTYPES:
                what = f"parameter {key!r} is {found.get_dtype()} there"
                raise InputError(what, str(self.table[key]), f"Convert it to one of {', '.join(_DTYPES)}")
            self.headers[key] = torch.empty(found.get_shape(), dtype=_DTYPES[found.get_dtype()], device="meta")
        return self.headers[key]

    def tensor(self, key: str, device: torch.device | str, target: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the device; `target`, filled, if it is given."""
        header = self.header(key)
        if target is None:
            target = torch.empty(header.shape, dtype=header.dtype, device=device)
        rows = header.shape[0] if header.dim() else 1
        count = max(1, PORTION // max(1, header.nbytes // max(1, rows)))
        for start in range(0, rows, count):
            if self.mapped >= PORTION:
                self._close()
            file = self._file(key)
            if count >= rows:
                target.copy_(file.get_tensor(key))
            else:
                target[start : start + count].copy_(file.get_slice(key)[start : start + count])
            self.mapped += min(count, rows - start) * (header.nbytes // max(1, rows))
        return target


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise InputError("there is no such file", str(file), "Give a safetensors file or directory") from None
    except SafetensorError as error:
        raise InputError(f"it is not safetensors: {error}", str(file), "Save the weights again") from None


def _table(path: Path) -> dict[str, Path]:
    """The file of every tensor."""
    if not path.is_dir():
        with _opened(path) as opened:
            return dict.fromkeys(opened.keys(), path)
    index = path / INDEX
    if index.is_file():
        try:
            return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"it is not an index of shards: {error}", str(index), "Save the weights again") from None
    for single in SINGLE:
        if (path / single).is_file():
            return _table(path / single)
    adapter = " It holds PEFT adapters: read them with PeftModel.from_pretrained, then compile"
    raise InputError(
        f"it has neither {INDEX} nor {' nor '.join(SINGLE)}",
        str(path),
        "Give a directory that holds weights." + adapter * (path / "adapter_config.json").is_file(),
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
        _check(spec, tensor, "weights")


def _check(spec: ParameterSpec, tensor: torch.Tensor, where: str) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise InputError(
            f"parameter {spec.name!r} has shape {list(tensor.shape)} there, {list(spec.shape)} in the program",
            where,
            "Are these the weights of a model of another size?",
        )
    if tensor.dtype != spec.dtype:
        raise InputError(
            f"parameter {spec.name!r} is {tensor.dtype} there, {spec.dtype} in the program",
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


def _parameters_of(manifest: Manifest, position: int | None) -> list[ParameterSpec]:
    return [p for p in manifest.parameters if position is None or p.owner == position]


def write(
    directory: str | Path,
    manifest: Manifest,
    position: int | None,
    tensors: Mapping[str, torch.Tensor],
    format: Format = OWN,
) -> None:
    """Write what `position` owns into its shard; None: everything into model.safetensors."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    owned = {p.name: tensors[p.name] for p in _parameters_of(manifest, position)}
    if not position:
        without = [name for name, tensor in format.rest.items() if tensor.is_meta]
        if without:
            what = f"{without[0]!r}, which the step does not use, has no values: the model is on the meta device"
            raise InputError(what, "save", "Load weights that have it with compiled.load(...)")
        owned |= format.rest
    name = SINGLE[0] if position is None else shard_name(manifest, position)
    if owned or name == SINGLE[0]:
        file = path / name
        temporary = path / f".{name}.{os.getpid()}.tmp"
        try:
            stored = {n: _alone(t) for n, t in format.stored(owned).items()}
            save_file(stored, temporary, metadata={"format": "pt"})
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    if name == SINGLE[0]:
        (path / INDEX).unlink(missing_ok=True)  # of an older save: readers would prefer it


def write_index(directory: str | Path, manifest: Manifest, format: Format = OWN) -> None:
    """Write the index over all shards; one process does this, after all have written. Nothing to do for one
    stage.
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
        files |= dict.fromkeys(stored, shard_name(manifest, position))
        size += sum(tensor.nbytes for tensor in stored.values())
    table = {"metadata": {"total_size": size}, "weight_map": files}
    temporary = path / f".{INDEX}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(table, indent=2) + "\n")
    os.replace(temporary, path / INDEX)
    (path / SINGLE[0]).unlink(missing_ok=True)  # of an older save: HF would prefer it


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, with a memory of its own: safetensors stores nothing that is shared."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
