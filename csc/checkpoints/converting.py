"""A checkpoint of one process, made of tensors that are read one after the other: none is kept. Its index is written
last.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import csc
from csc.checkpoints import files
from csc.checkpoints.files import FILE, LazyTensor, StepIndex, Stored, StoredPart, folder_of
from csc.checkpoints.writing import Piece, divided
from csc.runtime.specs import whole_box
from csc.runtime.weights import flushed, published

Key = tuple[str, str]  # a parameter, and "" or what of the optimizer's state


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is made of. about: parameters and buffers, as meta tensors. given: all of them, in any order.
    optimizer: as csc.runtime.optimizer lists it, with a LazyTensor for each tensor; None: there is none.
    """

    about: Mapping[str, torch.Tensor]
    given: Iterable[tuple[str, torch.Tensor]]
    optimizer: Mapping[str, Any] | None = None

    def states(self) -> Iterator[tuple[Key, LazyTensor]]:
        """Tensors of the optimizer's state."""
        for name, state in (self.optimizer or {"parameters": {}})["parameters"].items():
            yield from (((name, key), tensor) for key, tensor in state["tensors"].items())


def write(run: Path, step: int, made: Contents, model: str, tell: Callable[[str], None]) -> Path:
    """Writes a checkpoint, the index last, and returns its folder. Raises InputError if it cannot be written, or
    something cannot be read. tell: is called with what is being written.
    """
    folder, number = folder_of(run, step), secrets.token_hex(4)
    about = {(name, ""): tensor for name, tensor in made.about.items()}
    about |= {key: tensor.about for key, tensor in made.states()}
    trained = frozenset((made.optimizer or {"parameters": {}})["parameters"])
    pieces = {key: list(divided(_piece(*key, tensor, key[0] in trained))) for key, tensor in about.items()}
    file = f"part-00001-of-00001-{number}.safetensors"

    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        done, size = 0, sum(tensor.nbytes for tensor in about.values())
        for key, tensor in _each(made):
            tell(f"{'/'.join(filter(None, key))}, {done / 1e9:.1f} of {size / 1e9:.1f} GB written")
            for i, piece in enumerate(divided(_piece(*key, tensor.contiguous(), key[0] in trained))):
                yield _name(key, i), piece.tensor
            done += tensor.nbytes

    named = {_name(key, i): piece.tensor for key, of_one in pieces.items() for i, piece in enumerate(of_one)}
    places = files.write_each(folder / file, named, parts())
    stored = {key: _stored(key, of_one, file, places) for key, of_one in pieces.items()}
    parameters = {name: stored_parameter for (name, kind), stored_parameter in stored.items() if not kind}
    index = StepIndex(
        folder, _about(step, model, made.optimizer), parameters, trained & parameters.keys(),
        _listed(made.optimizer, stored), (_no_state(folder, number),),
    )  # fmt: skip
    published(folder / FILE, lambda path: path.write_text(index.to_text()))
    flushed(folder)
    return folder


def _each(contents: Contents) -> Iterator[tuple[Key, torch.Tensor]]:
    for name, tensor in contents.given:
        yield (name, ""), tensor
    for key, lazy in contents.states():
        yield key, lazy.load()


def _name(key: Key, number: int) -> str:
    return f"{'/'.join(filter(None, key))}#{number}"


def _piece(name: str, key: str, tensor: torch.Tensor, trained: bool) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(name, key, shape, whole_box(shape), tensor, trained)


def _stored(key: Key, of_one: list[Piece], file: str, places: Mapping[str, tuple[int, str]]) -> Stored:
    rows = [(piece, *places[_name(key, i)]) for i, piece in enumerate(of_one)]
    parts = tuple(StoredPart(file, offset, piece.box, sha256) for piece, offset, sha256 in rows)
    return Stored(of_one[0].shape, str(of_one[0].tensor.dtype).removeprefix("torch."), parts)


def _listed(optimizer: Mapping[str, Any] | None, stored: Mapping[Key, Stored]) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    states = {
        name: {**state, "tensors": {key: stored[name, key] for key in state["tensors"]}}
        for name, state in optimizer["parameters"].items()
    }
    return {**optimizer, "parameters": states}


def _about(step: int, model: str, optimizer: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "step": step, "model": model, "mesh": "dp=1", "zero": 0, "processes": 1,
        "has": ["weights", *(["optimizer"] if optimizer is not None else [])],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "csc": csc.__version__, "torch": torch.__version__,
    }  # fmt: skip


def _no_state(folder: Path, number: str) -> dict[str, str]:
    """The file of what is no tensor: there is none."""
    name, text = f"state-00001-of-00001-{number}.json", json.dumps({})
    published(folder / name, lambda path: path.write_text(text))
    return {"file": name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
