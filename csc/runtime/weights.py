"""Weights from disk and to disk: safetensors under the model's own names, as Hugging Face stores them."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from csc.errors import InputError
from csc.runtime.loaded_program import checked_file, read_json, within
from csc.runtime.specs import Manifest, ParameterSpec

# --- Weights from disk: safetensors under the model's own names, as HF stores them -----------------------------------
#
# Terms: a *shard* is one file of several; its *index* (model.safetensors.index.json) says which parameter is in which
# shard. Files that csc wrote hold a digest of each tensor, which is checked.
#
# A *format* says how files name and lay out the parameters where they do not do so as the program does (see
# csc.driver.checkpoint); its *groups* are tensors of the files that make some parameters together, its *rest* what the
# model has and the program does not use: nothing trains it, a whole model has it, and it goes with the first shard.
#
# Reading takes the memory of what is read, and no second copy of it: see `Files`.


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
    names = {name for group in groups for name in group.names}
    for name in specs:
        if name not in names and not optional:
            raise _unknown(name, table, str(path))
    with Files(table) as files:
        as_it_is: dict[str, str] = {}  # parameters that a tensor of the files is, under whatever name
        for group in groups:
            headers = {key: files.header(key) for key in group.keys}
            for name, spec in group.make(headers).items():
                key = next((key for key, header in headers.items() if header is spec), None)
                if key is not None:
                    as_it_is[name] = key
                if name in specs:
                    _check(specs[name], spec, str(path if key is None else table[key]))
        for group in groups:
            wanted = [name for name in group.names if name in specs]
            if as_it_is.keys() >= set(wanted):
                for name in wanted:
                    yield name, files.tensor(as_it_is[name], device, (into or {}).get(name))
                continue
            tensors = group.make({key: files.tensor(key, device) for key in group.keys})
            yield from ((name, tensors[name]) for name in wanted)


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
                portion = self._file(key).get_slice(key)
            except SafetensorError:
                fault = f"{key!r} is not in it, though the index says so"
                raise InputError(fault, str(self.table[key]), "Save the weights again") from None
            if portion.get_dtype() not in _DTYPES:
                fault = f"parameter {key!r} is {portion.get_dtype()} there"
                raise InputError(fault, str(self.table[key]), f"Convert it to one of {', '.join(_DTYPES)}")
            self.headers[key] = torch.empty(portion.get_shape(), dtype=_DTYPES[portion.get_dtype()], device="meta")
        return self.headers[key]

    def tensor(self, key: str, device: torch.device | str, target: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the device; `target`, filled, if it is given."""
        header = self.header(key)
        if target is None:
            target = torch.empty(header.shape, dtype=header.dtype, device=device)
        rows = header.shape[0] if header.dim() else 1
        count = max(1, PORTION // max(1, header.nbytes // max(1, rows)))
        expected, digest = self._digest(key), hashlib.sha256()
        for start in range(0, rows, count):
            if self.mapped >= PORTION:
                self._close()
            file = self._file(key)
            portion = file.get_tensor(key) if count >= rows else file.get_slice(key)[start : start + count]
            if expected is not None:
                digest.update(bytes_of(portion))
            (target if count >= rows else target[start : start + count]).copy_(portion)
            self.mapped += min(count, rows - start) * (header.nbytes // max(1, rows))
        if expected is not None and digest.hexdigest() != expected:
            fault = f"{key!r} is not what was saved there: its bytes have changed"
            raise InputError(fault, str(self.table[key]), "Take another copy of it, or an older checkpoint")
        return target

    def _digest(self, key: str) -> str | None:
        """What the file says that the tensor's bytes are; None if another program wrote it."""
        file = self.table[key]
        if file not in self.digests:
            try:
                listed = json.loads((self._file(key).metadata() or {}).get(DIGESTS, "{}"))
                self.digests[file] = {name: str(value) for name, value in listed.items()}
            except (ValueError, AttributeError, RecursionError):
                fault = "its header has changed since it was saved"
                raise InputError(fault, str(file), "Take another copy of it, or an older checkpoint") from None
        listed = self.digests[file]
        return listed.get(key, "none") if listed else None


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a dense tensor on the CPU, without a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def _opened(file: Path) -> Any:
    checked_file(file, lambda fault: InputError(fault, str(file), "Give a safetensors file or directory"))
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
    def fail(fault: str) -> InputError:
        return InputError(fault, str(index), "Save the weights again")

    table = read_json(index, fail)
    files = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise fail("it is not an index of shards: it has no weight_map with the file of each tensor")
    places = {file: within(path, file, fail) for file in dict.fromkeys(files.values())}
    return {name: places[file] for name, file in files.items()}


def _unknown(name: str, names: Iterable[str], where: str) -> InputError:
    close = difflib.get_close_matches(name, list(names), 3, 0.6)
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


# --- Weights written as safetensors, as HF stores them: whole, or not at all -----------------------------------------
#
# Terms: a *shard* is one file of several; its *index* (model.safetensors.index.json) says which parameter is in which
# shard. The first dp replica of a rank writes what it *owns*: a tied parameter is written by its owner alone. Every
# *save* names its shards anew: until its index is in place, the one before with its shards is what is read; then those
# are removed. A file's header has the SHA-256 of each of its tensors (`digests`), which csc checks when it
# reads them; other readers leave it alone.


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
        fault = f"{without[0]!r}, which the step does not use, has no values: the model is on the meta device"
        raise InputError(fault, "save", "Load weights that have it with compiled.load(...)")


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
        fault = "a file is where a directory is to be made"
        raise InputError(fault, str(directory), "Save to another path") from error
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
        fault = f"it is of an older save, and cannot be removed ({error}): some programs would read it all the same"
        raise InputError(fault, str(older), "Remove it, or save to another directory") from error


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


# --- Random weights, for trying a program out before there are real ones ---------------------------------------------
#
# Terms: the *seed* and a parameter's name alone decide its values, so every rank draws the same ones.


STD = 0.02


def random_weights(parameters: Iterable[ParameterSpec], seed: int) -> dict[str, torch.Tensor]:
    """CPU tensors. Each depends on the seed and its name alone, so holders and replicas agree without a
    message.
    """
    weights = {}
    for spec in parameters:
        digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        weights[spec.name] = torch.randn(spec.shape, generator=generator).mul_(STD).to(spec.dtype)
    return weights
