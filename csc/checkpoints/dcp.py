"""Directories of torch.distributed.checkpoint (DCP), as `dcp.save({"model": ..., "optim": ...})` writes them.

Terms: a *key* is the path of an entry, joined by dots: `model.NAME`, `optim.state.NAME.KEY`, `optim.param_groups.0.lr`.
Its `.metadata` is a pickle: it is read by an unpickler that knows the classes of such files and nothing else, so that
no code of the file's runs. Tensors in it are read with weights_only=True.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from csc.checkpoints import restoring
from csc.checkpoints.files import LazyTensor, StepIndex
from csc.errors import InputError
from csc.runtime.loaded_program import checked_file, within
from csc.runtime.meeting import first_line
from csc.runtime.weights import make_directory, published
from csc.torch_private.distributed_checkpoint import StorageInfo, allowed

METADATA, DATA = ".metadata", "__0_0.distcp"
VERSION = "1.0.0"
MODEL = ("model", "module", "state_dict")
OPTIMIZER = ("optim", "optimizer", "optimizers")
Key = tuple[Any, ...]


@dataclass(frozen=True)
class DcpContents:
    """What a directory holds. optimizer: as csc.runtime.optimizer lists it, with a LazyTensor for each tensor;
    None: none is there. left: keys that are neither.
    """

    parameters: dict[str, LazyTensor]
    optimizer: dict[str, Any] | None
    left: list[str]


def read(directory: Path, kind: str | None = None) -> DcpContents:
    """Tensors are read later. InputError for what is no such directory, or names anything else than it should."""
    checkpoint = _Directory(directory)
    paths = {key: checkpoint.path(key) for key in checkpoint.metadata.state_dict_metadata}
    nested = any(path[0] in MODEL and len(path) == 2 for path in paths.values())
    parameters: dict[str, LazyTensor] = {}
    states: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    left = []
    for key, path in paths.items():
        if path[0] in MODEL and len(path) == 2:
            parameters[path[1]] = checkpoint.lazy(key)
        elif path[0] in OPTIMIZER and path[1:2] == ("state",) and len(path) == 4:
            states.setdefault(path[2], {})[path[3]] = (
                checkpoint.lazy(key) if checkpoint.is_tensor(key) else checkpoint.value(key)
            )
        elif path[0] in OPTIMIZER and path[1:2] == ("param_groups",) and len(path) == 4 and str(path[2]).isdecimal():
            groups.setdefault(int(path[2]), {})[path[3]] = checkpoint.value(key)
        elif not nested and len(path) == 1 and checkpoint.is_tensor(key):
            parameters[key] = checkpoint.lazy(key)
        else:
            left.append(key)
    if not parameters:
        raise checkpoint.fail(f"it has no parameters of a model: its keys are {', '.join(list(paths)[:5])}")
    optimizer = _listed(states, groups, parameters, kind) if states and groups else None
    return DcpContents(parameters, optimizer, left)


def _listed(
    states: dict[str, dict[str, Any]], groups: dict[int, dict[str, Any]], parameters: dict[str, LazyTensor],
    kind: str | None,
) -> dict[str, Any]:  # fmt: skip
    listed: dict[str, Any] = {}
    for name, state in states.items():
        shape = parameters[name].about.shape if name in parameters else None
        tensors = {key: value for key, value in state.items() if _is_of_entries(value, shape)}
        numbers = {key: _number(value) for key, value in state.items() if key not in tensors}
        listed[name] = {"shape": list(shape or ()), "numbers": numbers, "tensors": tensors}
    told = [
        {
            "names": list(groups[i].get("params", ())),
            "options": {k: _plain(v) for k, v in groups[i].items() if k != "params"},
        }
        for i in sorted(groups)
    ]
    return {"kind": kind or "AdamW", "groups": told, "parameters": listed}


def _is_of_entries(value: Any, shape: torch.Size | None) -> bool:
    """Or a number: a parameter of one entry has a state of one entry."""
    if not isinstance(value, LazyTensor) or not value.about.dim():
        return False
    return value.about.numel() != 1 or value.about.shape == shape


def _number(value: Any) -> dict[str, Any]:
    if isinstance(value, LazyTensor):
        number = value.load()
        return {"dtype": str(number.dtype).removeprefix("torch."), "value": number.item(), "shape": list(number.shape)}
    return {"value": value}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


class _AllowListUnpickler(pickle.Unpickler):
    """Of classes that are allowed by name."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; InputError for any other."""
        allowed_class = allowed().get((module, name))
        if allowed_class is None:
            raise InputError(
                f"it names {module}.{name}, which no metadata of a checkpoint has", METADATA,
                "it was damaged, or made to run code: take the checkpoint from where you trust it",
            )  # fmt: skip
        return allowed_class


class _Directory:
    """Entries by key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            with checked_file(directory / METADATA, self.fail).open("rb") as opened:
                self.metadata: Metadata = _AllowListUnpickler(opened).load()
        except InputError:
            raise
        except Exception as error:  # of a damaged pickle Python says all kinds of things
            raise self.fail(f"it cannot be read: {first_line(error)}") from None
        if not isinstance(self.metadata, Metadata) or not isinstance(self.metadata.storage_data, dict):
            raise self.fail("it is no metadata of a checkpoint")

    def fail(self, what: str) -> InputError:
        return InputError(
            what, str(self._directory / METADATA), "Give a directory that torch.distributed.checkpoint wrote"
        )

    def path(self, key: str) -> Key:
        """What a key was made of."""
        planned = self.metadata.planner_data
        if isinstance(planned, dict) and isinstance(planned.get(key), tuple):
            return tuple(planned[key])
        first, dot, rest = key.partition(".")
        return (first, rest) if dot and first in MODEL else (key,)

    def is_tensor(self, key: str) -> bool:
        """Or something else."""
        return isinstance(self.metadata.state_dict_metadata[key], TensorStorageMetadata)

    def lazy(self, key: str) -> LazyTensor:
        """A tensor, to be read later."""
        about = self.metadata.state_dict_metadata[key]
        if not isinstance(about, TensorStorageMetadata):
            raise self.fail(f"{key!r} is no tensor there")
        meta = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        return LazyTensor(meta, partial(self.tensor, key))

    def value(self, key: str) -> Any:
        """A tensor, or what is plain."""
        return self.tensor(key) if self.is_tensor(key) else self._loaded(MetadataIndex(key))

    def tensor(self, key: str) -> torch.Tensor:
        """Put together from its chunks."""
        about = self.metadata.state_dict_metadata[key]
        if not isinstance(about, TensorStorageMetadata):
            raise self.fail(f"{key!r} is no tensor there")
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        filled = 0
        for chunk in about.chunks:
            part = self._loaded(MetadataIndex(key, chunk.offsets))
            if not isinstance(part, torch.Tensor) or part.shape != chunk.sizes:
                raise self.fail(f"{key!r} is damaged: its chunk at {list(chunk.offsets)} is not {list(chunk.sizes)}")
            tensor[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes))] = part
            filled += part.numel()
        if filled != tensor.numel():
            raise self.fail(f"{key!r} is not all there")
        return tensor

    def _loaded(self, index: MetadataIndex) -> Any:
        places: Any = self.metadata.storage_data
        info = places.get(index)
        if not isinstance(info, StorageInfo):
            raise self.fail(f"it does not say where {index.fqn!r} is")
        file = checked_file(within(self._directory, info.relative_path, self.fail), self.fail)
        with file.open("rb") as opened:
            opened.seek(info.offset)
            data = opened.read(info.length)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch says all kinds of things
            raise InputError(
                f"{index.fqn!r} cannot be read: {first_line(error)}", str(file), "take another copy of it"
            ) from None


def write(directory: Path, index: StepIndex, tell: Callable[[str], None]) -> None:
    """Whole tensors, one at a time; the metadata last. InputError if it cannot be written, or is damaged. tell: is
    called with what is being written.
    """
    make_directory(directory)
    about: dict[str, Any] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    paths: dict[str, Key] = {}

    def fill(file: Path) -> None:
        with file.open("wb") as opened:
            for path, value in _entries(index):
                key, start = ".".join(map(str, path)), opened.tell()
                tell(f"{key}, {start / 1e9:.1f} GB written")
                torch.save(value, opened)
                offset = (0,) * value.dim() if isinstance(value, torch.Tensor) else None
                places[MetadataIndex(key, offset)] = StorageInfo(DATA, start, opened.tell() - start)
                paths[key], about[key] = path, _about(value)

    published(directory / DATA, fill)
    metadata = Metadata(about, planner_data=paths, storage_data=places, version=VERSION)
    published(directory / METADATA, lambda file: file.write_bytes(pickle.dumps(metadata)))


def _about(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size((0,) * value.dim()), value.shape)
    return TensorStorageMetadata(TensorProperties.create_from_tensor(value), value.shape, [chunk])


def _entries(index: StepIndex) -> Iterator[tuple[Key, Any]]:
    for name, stored in index.parameters.items():
        yield ("model", name), restoring.whole(index, stored, repr(name))
    if index.optimizer is None:
        return
    for name, state in index.optimizer["parameters"].items():
        for key, number in state["numbers"].items():
            dtype = number.get("dtype")
            value = (
                torch.full(number["shape"], number["value"], dtype=getattr(torch, dtype)) if dtype else number["value"]
            )
            yield ("optim", "state", name, key), value
        for key, stored in state["tensors"].items():
            yield ("optim", "state", name, key), restoring.whole(index, stored, f"{key!r} of {name!r}")
    for number, group in enumerate(index.optimizer["groups"]):
        for option, value in group["options"].items():
            yield ("optim", "param_groups", number, option), tuple(value) if isinstance(value, list) else value
        yield ("optim", "param_groups", number, "params"), group["names"]
