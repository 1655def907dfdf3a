"""What is in a checkpoint: its index, tensors in safetensors files read and written part by part, state as JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from csc.errors import InputError
from csc.runtime.loaded_program import checked_file, read_json, within
from csc.runtime.specs import Box, sizes
from csc.runtime.weights import DIGESTS, DTYPES, bytes_of, published

# --- A tensor that is read when it is asked for ----------------------------------------------------------------------


class LazyTensor(NamedTuple):
    """about: its shape and dtype, as a meta tensor. load: reads it, anew each time."""

    about: torch.Tensor
    load: Callable[[], torch.Tensor]


# --- What is in a checkpoint, as its index says, and where checkpoints are -------------------------------------------
#
# Terms
#   run        a directory with a folder for each step that was saved: step-00000100
#   part       a box (csc.runtime.specs) of a tensor's entries, some bytes of a safetensors file of that folder
#   index      checkpoint.json: every tensor with its parts, their digests, and the files of other state. It is written
#              last, and has a digest of itself: a folder without one, or with another, is no checkpoint


FILE = "checkpoint.json"
FORMAT = 1
_FOLDER = re.compile(r"step-(\d{8,})")
OLDER = "Take another copy of it, or an older checkpoint (`csc checkpoint list` shows them)"


@dataclass(frozen=True)
class StoredPart:
    """Where some entries of a tensor are. offset: of their first byte in the file."""

    file: str
    offset: int
    box: Box
    sha256: str

    def entries(self) -> int:
        """How many."""
        return math.prod(sizes(self.box))

    def to_row(self, numbers: Mapping[str, int]) -> list[Any]:
        """The form of the index: short, as there may be millions. numbers: of files."""
        return [numbers[self.file], self.offset, self.box, self.sha256]

    @classmethod
    def of(cls, row: Sequence[Any], files: Sequence[str]) -> StoredPart:
        """KeyError, TypeError, IndexError or ValueError for what is none."""
        number, offset, box, sha256 = row
        box_read = tuple(tuple((int(start), int(stop)) for start, stop in dim) for dim in box)
        return cls(str(files[number]), int(offset), box_read, str(sha256))


@dataclass(frozen=True)
class Stored:
    """A tensor. dtype: as torch names it, without `torch.`."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredPart, ...]

    def to_row(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """The form of the index."""
        return {"shape": self.shape, "dtype": self.dtype, "parts": [part.to_row(numbers) for part in self.parts]}

    @classmethod
    def of(cls, row: Mapping[str, Any], files: Sequence[str]) -> Stored:
        """Errors are those of Part.of."""
        parts = tuple(StoredPart.of(part, files) for part in row["parts"])
        return cls(tuple(map(int, row["shape"])), str(row["dtype"]), parts)

    def entries(self) -> int:
        """How many."""
        return math.prod(self.shape)

    def nbytes(self) -> int:
        """Of all entries."""
        return self.entries() * getattr(torch, self.dtype).itemsize

    def missing(self) -> int:
        """Entries that no part has."""
        return self.entries() - sum(part.entries() for part in self.parts)


@dataclass(frozen=True)
class StepIndex:
    """about: step, model, mesh, zero, processes, time, versions; has: which of weights, optimizer, scheduler, loader,
    random, extra. parameters: with buffers; none if weights are elsewhere. optimizer: as csc.runtime.optimizer
    joins it, with a Stored for each tensor; None: not saved. states: a file of each process.
    """

    folder: Path
    about: Mapping[str, Any]
    parameters: Mapping[str, Stored]
    trained: frozenset[str]
    optimizer: Mapping[str, Any] | None
    states: tuple[Mapping[str, str], ...]

    @property
    def step(self) -> int:
        """After which it was saved."""
        return int(self.about["step"])

    @property
    def has(self) -> list[str]:
        """What was saved."""
        return list(self.about["has"])

    def of_optimizer(self) -> Iterator[tuple[str, str, Stored]]:
        """(parameter, key, tensor) of the optimizer's state."""
        for name, state in (self.optimizer or {}).get("parameters", {}).items():
            yield from ((name, key, stored) for key, stored in state["tensors"].items())

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """All, each with what it is called in sentences."""
        yield from ((repr(name), stored) for name, stored in self.parameters.items())
        yield from ((f"{key!r} of {name!r}", stored) for name, key, stored in self.of_optimizer())

    def files(self) -> list[str]:
        """Of the folder."""
        parts = [part.file for _, stored in self.tensors() for part in stored.parts]
        return sorted({*parts, *(state["file"] for state in self.states)})

    def size(self) -> int:
        """Bytes of its files, as far as they are there."""
        return sum((self.folder / name).stat().st_size for name in self.files() if (self.folder / name).is_file())

    def to_text(self) -> str:
        """The index as it is written."""
        listed = sorted({part.file for _, stored in self.tensors() for part in stored.parts})
        numbers = {name: number for number, name in enumerate(listed)}
        optimizer = None
        if self.optimizer is not None:
            states = {
                name: {**state, "tensors": {key: stored.to_row(numbers) for key, stored in state["tensors"].items()}}
                for name, state in self.optimizer["parameters"].items()
            }
            optimizer = {**self.optimizer, "parameters": states}
        content = {
            "about": dict(self.about), "files": listed,
            "parameters": {
                name: {**one.to_row(numbers), "trained": name in self.trained} for name, one in self.parameters.items()
            },
            "optimizer": optimizer, "states": [dict(state) for state in self.states],
        }  # fmt: skip
        table = {"format": FORMAT, "sha256": _digest(content), "content": content}
        return json.dumps(table, separators=(",", ":")) + "\n"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of(folder: Path) -> str:
    """Of the index, for ranks to compare."""
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


def read(folder: Path) -> StepIndex:
    """Returns the index of a step's folder. Raises InputError for what is no checkpoint, or damaged."""
    where = folder / FILE

    def fail(fault: str) -> InputError:
        return InputError(fault, str(where), OLDER)

    table = read_json(where, fail)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        format_found = table.get("format") if isinstance(table, dict) else None
        raise fail(f"it is an index of format {format_found!r}, and this csc reads {FORMAT}")
    if _digest(table.get("content")) != table.get("sha256"):
        raise fail("it is not what was saved there: its bytes have changed")
    try:
        return _of(folder, table["content"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise fail(f"it was not written by csc: {type(error).__name__}: {error}") from None


def _of(folder: Path, content: Mapping[str, Any]) -> StepIndex:
    listed, optimizer = content["files"], content["optimizer"]
    for state in optimizer["parameters"].values() if optimizer is not None else ():
        state["tensors"] = {key: Stored.of(row, listed) for key, row in state["tensors"].items()}
    index = StepIndex(
        folder, content["about"], {name: Stored.of(row, listed) for name, row in content["parameters"].items()},
        frozenset(name for name, row in content["parameters"].items() if row["trained"]),
        optimizer, tuple(content["states"]),
    )  # fmt: skip
    for group in (index.optimizer or {"groups": ()})["groups"]:
        _ = group["names"], group["options"].items()
    _ = index.step, index.has, index.files(), [number["value"] for number in _numbers(index)]
    return index


def _numbers(index: StepIndex) -> Iterator[Mapping[str, Any]]:
    for state in (index.optimizer or {"parameters": {}})["parameters"].values():
        _ = state["shape"]
        yield from state["numbers"].values()


def folder_of(run: Path, step: int) -> Path:
    """Of a step."""
    return run / f"step-{step:08d}"


def _folders(run: Path) -> list[tuple[int, Path]]:
    if not run.is_dir():
        return []
    named = [(_FOLDER.fullmatch(path.name), path) for path in run.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match and path.is_dir())


def saved(run: str | Path) -> dict[int, Path]:
    """The folders of steps that were saved to the end."""
    return {step: folder for step, folder in _folders(Path(run)) if (folder / FILE).is_file()}


def cut_off(run: str | Path) -> list[Path]:
    """Folders of saves that are under way, or did not come to their end."""
    return [folder for _, folder in _folders(Path(run)) if not (folder / FILE).is_file()]


def find(path: str | Path, step: int | None = None) -> Path:
    """The folder of a checkpoint. InputError, with what is there, if there is none."""
    path = Path(path)
    if step is None and (path / FILE).is_file():
        return path
    steps = saved(path)
    if step is None and steps:
        return steps[max(steps)]
    if step in steps:
        return steps[step]
    begun = ", ".join(folder.name for folder in cut_off(path))
    fault = "it has no checkpoint" if step is None else f"it has no checkpoint of step {step}"
    if _FOLDER.fullmatch(path.name) and path.is_dir():
        fault = f"it has no {FILE}: the save was cut off"
    elif steps:
        fault += f", but of {', '.join(map(str, steps))}"
    elif begun:
        fault += f": {begun} was begun, and has no {FILE}"
    elif path.is_dir() and ((path / ".metadata").is_file() or any(path.glob("*.safetensors"))):
        raise InputError(
            f"{fault}, but weights in another format", str(path),
            "read weights with compiled.load(path), or make a checkpoint of them: `csc checkpoint convert PATH OUT`",
        )  # fmt: skip
    raise InputError(fault, str(path), "give the directory that a CheckpointManager saves to, or a step's folder in it")


# --- Tensors in safetensors files, written and read part by part: no more than one is held besides what is given -----
#
# Terms: a file holds some numbered keys; where each begins, and its digest, go to the index.
# Other programs read the files as any safetensors.


NO_DIGEST = "0" * 64
Places = dict[str, int]


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes."""
    return hashlib.sha256(bytes_of(tensor.detach().cpu())).hexdigest()


def layout(tensors: Mapping[str, torch.Tensor], digests: Mapping[str, str] | None = None) -> tuple[bytes, Places]:
    """What a file of these begins with, and the offset of each. InputError for a dtype that it has no form for.
    digests: to be in the header, as csc.runtime.weights has them there.
    """
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"} | ({DIGESTS: json.dumps(digests)} if digests is not None else {})
    }
    places, end = {}, 0
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            fault = f"{key!r} is {tensor.dtype}, which safetensors has no form for"
            raise InputError(fault, "save", f"convert it to one of {', '.join(DTYPES.values())}")
        places[key] = end
        end += tensor.nbytes
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [places[key], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {key: len(begin) + place for key, place in places.items()}


def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, str]]:
    """The offset and the digest of each. InputError if the file cannot be written."""
    return write_each(file, tensors, tensors.items())


def write_each(
    file: Path, about: Mapping[str, torch.Tensor], given: Iterable[tuple[str, torch.Tensor]], in_header: bool = False
) -> dict[str, tuple[int, str]]:
    """about: shapes and dtypes of all, of meta tensors, too. given: all of them, in any order; none is kept. in_header:
    whether the digests go to the header as well.
    """
    digests = dict.fromkeys(about, NO_DIGEST)
    begin, places = layout(about, digests if in_header else None)

    def fill(path: Path) -> None:
        with path.open("wb") as opened:
            opened.write(begin)
            for key, tensor in given:
                assert (tensor.shape, tensor.dtype) == (about[key].shape, about[key].dtype), key
                data = bytes_of(tensor.detach().cpu())
                digests[key] = hashlib.sha256(data).hexdigest()
                opened.seek(places[key])
                opened.write(data)
            assert NO_DIGEST not in digests.values(), "a tensor was not given"
            if in_header:
                opened.seek(0)
                opened.write(layout(about, digests)[0])

    published(file, fill)
    return {key: (place, digests[key]) for key, place in places.items()}


def read_part(folder: Path, part: StoredPart, dtype: str, what: str) -> torch.Tensor:
    """what: the tensor's name in sentences."""

    def fail(why: str) -> InputError:
        return InputError(f"{what}: {why}", str(folder / part.file), OLDER)

    kind = getattr(torch, dtype, None)
    if kind not in DTYPES:
        raise fail(f"it is {dtype!r}, which is no dtype that csc reads")
    found = torch.empty(sizes(part.box), dtype=kind)
    if found.numel():
        file = checked_file(within(folder, part.file, fail), fail)
        target = memoryview(found.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with file.open("rb", buffering=0) as opened:
                opened.seek(part.offset)
                read_into(opened, target)
        except (OSError, EOFError) as error:
            raise fail(f"it cannot be read: {error}") from None
        if hashlib.sha256(target).hexdigest() != part.sha256:
            raise fail("its bytes are not those that were saved")
    return found


def read_into(opened: RawIOBase, target: memoryview) -> None:
    """Fill it. EOFError if there is not as much."""
    offset = 0
    while offset < len(target):
        count = opened.readinto(target[offset:])
        if not count:
            raise EOFError("the file ends before it")
        offset += count


# --- State of schedulers, loaders and generators of random numbers as JSON, and back: nothing is unpickled -----------
#
# Terms: *plain* are numbers, texts, bytes, None, tensors, arrays, and lists, tuples, sets, dicts and Counters of
# these. What JSON has no form for is an object with the key KIND.


KIND = "csc"


def packed(value: Any, where: str) -> Any:
    """where: whose state it is, for the error."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, np.generic):
        return packed(value.item(), where)
    if isinstance(value, list):
        return [packed(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return _dict(value, where)
    if type(value) in (tuple, set, frozenset):
        members = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return {KIND: type(value).__name__, "of": [packed(item, f"{where}[{i}]") for i, item in enumerate(members)]}
    if isinstance(value, (bytes, bytearray)):
        return {KIND: "bytes", "data": _text(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        dense = value.detach().cpu().contiguous()
        name = str(value.dtype).removeprefix("torch.")
        return {KIND: "tensor", "dtype": name, "shape": list(value.shape), "data": _text(bytes(bytes_of(dense)))}
    raise InputError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: it has no pickles", "save",
        "let its state_dict() give numbers, texts, tensors, and lists and dicts of these",
    )  # fmt: skip


def _dict(value: dict[Any, Any], where: str) -> Any:
    if not isinstance(value, Counter) and KIND not in value and all(type(key) is str for key in value):
        return {key: packed(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [[packed(key, where), packed(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {KIND: "Counter" if isinstance(value, Counter) else "dict", "of": pairs}


def _text(data: Any) -> str:
    return base64.b64encode(data).decode()


def unpacked(value: Any) -> Any:
    """The inverse; tensors are on the CPU."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: unpacked(item) for key, item in value.items()}
    kind = value[KIND]
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpacked(item) for item in value["of"])
    if kind in ("dict", "Counter"):
        pairs = {unpacked(key): unpacked(item) for key, item in value["of"]}
        return pairs if kind == "dict" else Counter(pairs)
    data = base64.b64decode(value["data"], validate=True)
    if kind == "bytes":
        return data
    if kind == "array":
        return np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind != "tensor":
        raise ValueError(f"{kind!r} is no kind of state")
    dtype = getattr(torch, value["dtype"])
    if not data:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(value["shape"])
