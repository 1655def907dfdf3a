"""Weights from disk: safetensors under the model's own names, as HF stores them.

Terms: a *shard* is one file of several; its *index* (model.safetensors.index.json) says which parameter is in
which shard. Files that csc wrote (csc.runtime.saving) hold a digest of each tensor, which is checked.

A *format* says how files name and lay out the parameters where they do not do so as the program does (see
csc.driver.checkpoint); its *groups* are tensors of the files that make some parameters together, its *rest* what the
model has and the program does not use: nothing trains it, a whole model has it, and it goes with the first shard.

    each(path, parameters, device, format) -> (name, tensor)...  only these, one by one; a file, or a directory as of HF
    read(path, parameters, device, format) -> {name: tensor}     all of them
    headers(path) -> {key: meta tensor}                          what there is
    identity(path) -> str                                        which weights those of a directory are
    check(parameters, tensors)                                   tensors in memory against what the program needs

Reading takes the memory of what is read, and no second copy of it: see `Files`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from csc.errors import InputError
from csc.runtime.reading import checked_file, read_json, within
from csc.runtime.specs import ParameterSpec

INDEX = "model.safetensors.index.json"
SINGLE = ("model.safetensors", "weights.safetensors")
PICKLED = (b"PK", b"\x80\x02")  # what files of torch.save begin with
CONVERT = (
    "Convert it once: safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors'), or "
    "save_pretrained of a transformers model that has loaded it"
)
DIGESTS = "csc.sha256"  # key of a file's metadata: the digest of each tensor, as JSON


@dataclass(frozen=True)
class FileTensors:
    """Tensors of the files (`keys`) and the parameters that `make` gives for them (`names`)."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    make: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class WeightLayout:
    """groups: of the tensors that the files have. stored: parameters as files have them (meta tensors: their names and
    shapes). rest: tensors of the model that no program reads, by the model's names; the first shard takes them.
    """

    groups: Callable[[Iterable[str]], list[FileTensors]]
    stored: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    rest: Mapping[str, torch.Tensor]


def own_groups(keys: Iterable[str]) -> list[FileTensors]:
    """Every tensor is the parameter of its name."""
    return [FileTensors((key,), (key,), dict) for key in keys]


OWN = WeightLayout(own_groups, dict, {})


def read(
    path: str | Path,
    parameters: Iterable[ParameterSpec],
    device: torch.device | str = "cpu",
    format: WeightLayout = OWN,
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
    format: WeightLayout = OWN,
    optional: bool = False,
    into: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """These parameters, one by one, in memory of their own. All InputErrors come before the first one.

    into: tensors of the right shape and dtype, of some of them, that are filled where a tensor of the files is a
    parameter as it is.
    """
    specs = {spec.name: spec for spec in parameters}
    table = _table(Path(path))
    groups = [group for group in format.groups(table) if not specs.keys().isdisjoint(group.names)]
    there = {name for group in groups for name in group.names}
    for name in specs:
        if name not in there and not optional:
            raise _unknown(name, table, str(path))
    with Files(table) as files:
        as_it_is: dict[str, str] = {}  # parameters that a tensor of the files is, under whatever name
        for group in groups:
            headers = {key: files.header(key) for key in group.keys}
            for name, found in group.make(headers).items():
                whole = next((key for key, header in headers.items() if header is found), None)
                if whole is not None:
                    as_it_is[name] = whole
                if name in specs:
                    _check(specs[name], found, str(path if whole is None else table[whole]))
        for group in groups:
            wanted = [name for name in group.names if name in specs]
            if as_it_is.keys() >= set(wanted):
                for name in wanted:
                    yield name, files.tensor(as_it_is[name], device, (into or {}).get(name))
                continue
            made = group.make({key: files.tensor(key, device) for key in group.keys})
            yield from ((name, made[name]) for name in wanted)


def headers(path: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file or directory, as a meta tensor, by the names that the files have."""
    with Files(_table(Path(path))) as files:
        return {key: files.header(key) for key in files.table}


def identity(path: Path) -> str:
    """A digest of which weights are in a directory that csc wrote; "" of others."""
    index = path / INDEX
    if index.is_file():
        return hashlib.sha256(index.read_bytes()).hexdigest()
    with _opened(path / SINGLE[0]) as opened:
        digests = (opened.metadata() or {}).get(DIGESTS, "")
    return hashlib.sha256(digests.encode()).hexdigest() if digests else ""


PORTION = 16 * 2**20  # bytes


class Files:
    """Tensors of several safetensors files, read in portions.

    The pages of a mapped file that were read count as memory of the process for as long as the file is mapped. So what
    is read is copied out, PORTION bytes at most at a time, and then the file is mapped anew.
    """

    def __init__(self, table: Mapping[str, Path]) -> None:
        self.table = table
        self.stack = ExitStack()
        self.opened: dict[Path, Any] = {}
        self.headers: dict[str, torch.Tensor] = {}
        self.digests: dict[Path, dict[str, str]] = {}
        self.mapped = 0

    def __enter__(self) -> Files:
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
        expected, found = self._digest(key), hashlib.sha256()
        for start in range(0, rows, count):
            if self.mapped >= PORTION:
                self._close()
            file = self._file(key)
            portion = file.get_tensor(key) if count >= rows else file.get_slice(key)[start : start + count]
            if expected is not None:
                found.update(bytes_of(portion))
            (target if count >= rows else target[start : start + count]).copy_(portion)
            self.mapped += min(count, rows - start) * (header.nbytes // max(1, rows))
        if expected is not None and found.hexdigest() != expected:
            what = f"{key!r} is not what was saved there: its bytes have changed"
            raise InputError(what, str(self.table[key]), "Take another copy of it, or an older checkpoint")
        return target

    def _digest(self, key: str) -> str | None:
        """What the file says that the tensor's bytes are; None if another program wrote it."""
        file = self.table[key]
        if file not in self.digests:
            try:
                listed = json.loads((self._file(key).metadata() or {}).get(DIGESTS, "{}"))
                self.digests[file] = {name: str(one) for name, one in listed.items()}
            except (ValueError, AttributeError, RecursionError):
                what = "its header has changed since it was saved"
                raise InputError(what, str(file), "Take another copy of it, or an older checkpoint") from None
        listed = self.digests[file]
        return listed.get(key, "none") if listed else None


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a dense tensor on the CPU, without a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def _opened(file: Path) -> Any:
    checked_file(file, lambda what: InputError(what, str(file), "Give a safetensors file or directory"))
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            pickled = opened.read(2) in PICKLED
        if pickled:
            raise InputError("it holds a pickle, as torch.save writes it", str(file), CONVERT) from None
        raise InputError(f"it is not safetensors: {error}", str(file), "Save the weights again") from None


def _table(path: Path) -> dict[str, Path]:
    """The file of every tensor."""
    if not path.is_dir():
        with _opened(path) as opened:
            return dict.fromkeys(opened.keys(), path)
    index = path / INDEX
    if index.exists():
        return _indexed(path, index)
    for single in SINGLE:
        if (path / single).is_file():
            return _table(path / single)
    if (path / "checkpoint.json").is_file():
        raise InputError(
            "it is the checkpoint of a training run", str(path),
            "Load it with csc.CheckpointManager, or make weights of it: `csc checkpoint convert PATH OUT`",
        )  # fmt: skip
    adapter = " It holds PEFT adapters: read them with PeftModel.from_pretrained, then compile"
    pickles = sorted(file for ending in ("*.bin", "*.pt", "*.pth") for file in path.glob(ending))
    pickled = f" {pickles[0].name} is a pickle, and csc loads none. {CONVERT}" if pickles else ""
    raise InputError(
        f"it has neither {INDEX} nor {' nor '.join(SINGLE)}",
        str(path),
        "Give a directory that holds weights." + (adapter * (path / "adapter_config.json").is_file() or pickled),
    )


def _indexed(path: Path, index: Path) -> dict[str, Path]:
    def fail(what: str) -> InputError:
        return InputError(what, str(index), "Save the weights again")

    table = read_json(index, fail)
    files = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise fail("it is not an index of shards: it has no weight_map with the file of each tensor")
    places = {file: within(path, file, fail) for file in dict.fromkeys(files.values())}
    return {name: places[file] for name, file in files.items()}


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


DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
