"""Checkpoints of training from and to other formats: Hugging Face's safetensors, torch.distributed.checkpoint.

Terms: a directory of Hugging Face has config.json beside its weights, by which transformers names and shapes them in
its own way; without one, names are the model's own. `save` puts that file into a checkpoint, too.

    kind(path) -> CSC | HF | DCP               InputError for something else
    to_hf(index, out), to_dcp(index, out)      from a checkpoint of csc
    from_hf(path, run, step), from_dcp(path, run, step, optimizer) -> folder, keys that were left out
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import csc
from csc.checkpoints import dcp, restoring
from csc.checkpoints.pieces import Piece, divided
from csc.checkpoints.step_index import FILE, StepIndex, folder_of, saved
from csc.checkpoints.writing import CONFIGS, ProcessState, Save, write
from csc.driver.checkpoint import format_of
from csc.errors import InputError
from csc.runtime import weights
from csc.runtime.boxes import whole_box
from csc.runtime.meeting import Meeting
from csc.runtime.saving import digest, make_directory, published
from csc.runtime.specs import ParameterSpec
from csc.runtime.weights import DIGESTS, INDEX, OWN, SINGLE, WeightLayout

CSC, HF, DCP = "csc", "hf", "dcp"
SHARD = 4 * 2**30  # bytes of a file


def kind(path: Path) -> str:
    """By the files that are there."""
    if (path / FILE).is_file() or saved(path):
        return CSC
    if (path / dcp.METADATA).is_file():
        return DCP
    if path.is_file() or (path / INDEX).is_file() or any((path / single).is_file() for single in SINGLE):
        return HF
    raise InputError(
        f"it has neither {FILE} nor {INDEX}, {SINGLE[0]} or {dcp.METADATA}", str(path),
        "give a checkpoint of csc, a directory of Hugging Face, or one of torch.distributed.checkpoint",
    )  # fmt: skip


def fresh(out: Path) -> Path:
    """InputError if something is there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("something is there already", str(out), "convert to a directory that is not there yet")
    return out


def to_dcp(index: StepIndex, out: Path) -> None:
    """With the state of the optimizer, if it was saved."""
    dcp.write(fresh(out), index)


def to_hf(index: StepIndex, out: Path) -> None:
    """Weights, in files of at most 4 GiB, which is what is held of those that transformers stores as they are."""
    make_directory(fresh(out))
    form = _format(index.folder, list(index.parameters))
    metas = {n: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for n, s in index.parameters.items()}
    stored = form.stored(metas)
    own = {id(tensor): name for name, tensor in metas.items()}
    as_it_is = {key: own[id(tensor)] for key, tensor in stored.items() if id(tensor) in own}
    others = [name for name in metas if name not in as_it_is.values()]
    made = form.stored({name: _whole(index, name) for name in others})
    shards = list(_shards(stored))
    files: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        file = SINGLE[0] if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: made[key] if key in made else _whole(index, as_it_is[key]) for key in keys}
        tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        metadata = {"format": "pt", DIGESTS: json.dumps({key: digest(tensor) for key, tensor in tensors.items()})}
        published(out / file, partial(save_file, tensors, metadata=metadata))
        files |= dict.fromkeys(keys, file)
    if len(shards) > 1:
        table = {"metadata": {"total_size": sum(one.nbytes for one in stored.values())}, "weight_map": files}
        published(out / INDEX, lambda path: path.write_text(json.dumps(table, indent=2) + "\n"))
    for name in CONFIGS:
        if (index.folder / name).is_file():
            published(out / name, partial(shutil.copyfile, index.folder / name))


def _whole(index: StepIndex, name: str) -> torch.Tensor:
    return restoring.whole(index, index.parameters[name], repr(name))


def _shards(stored: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    keys: list[str] = []
    size = 0
    for key, tensor in stored.items():
        if keys and size + tensor.nbytes > SHARD:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += tensor.nbytes
    yield keys


def _format(folder: Path, names: list[str]) -> WeightLayout:
    """How transformers stores the model that config.json is of; without one, as it is."""
    model = _model(folder)
    return OWN if model is None else format_of(model, names)


def _model(folder: Path) -> Any:
    """Without values. None if there is no config.json, or not one of transformers'."""
    file = folder / CONFIGS[0]
    if not file.is_file():
        return None
    try:
        import transformers
    except ModuleNotFoundError:
        raise InputError(
            "transformers is not installed, which knows how weights of this model are named in files", str(file),
            'pip install "csc-compiler[hf]"',
        ) from None  # fmt: skip
    config = transformers.AutoConfig.from_pretrained(folder)
    name = (config.architectures or [""])[0]
    made = getattr(transformers, name, None)
    if made is None:
        return None
    with torch.device("meta"):
        return made._from_config(config, dtype=config.dtype)


def from_hf(path: Path, run: Path, step: int) -> tuple[Path, list[str]]:
    """Weights alone. Takes the memory of all of them."""
    model = None if path.is_file() else _model(path)
    if model is None:
        tensors = weights.read(path, [_spec(key, tensor) for key, tensor in weights.headers(path).items()])
    else:
        kept = model.state_dict()
        own = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}
        specs = [_spec(name, tensor) for name, tensor in own.items()]
        tensors = weights.read(path, specs, format=format_of(model, list(own)))
    folder = _written(tensors, None, run, step, type(model).__name__ if model is not None else "model")
    for name in CONFIGS:
        if path.is_dir() and (path / name).is_file():
            published(folder / name, partial(shutil.copyfile, path / name))
    return folder, []


def _spec(name: str, tensor: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), tensor.dtype, False, (), ())


def from_dcp(path: Path, run: Path, step: int, optimizer: str | None) -> tuple[Path, list[str]]:
    """With the state of the optimizer, of the kind that is named. Takes the memory of all of it."""
    found = dcp.read(path, optimizer)
    return _written(found.parameters, found.optimizer, run, step, "model"), found.left


def _written(
    tensors: Mapping[str, torch.Tensor], optimizer: dict[str, Any] | None, run: Path, step: int, model: str
) -> Path:
    """A checkpoint of one process."""
    fresh(run)
    trained = optimizer["parameters"] if optimizer is not None else {}
    pieces = [one for name, tensor in tensors.items() for one in divided(_piece(name, "", tensor, name in trained))]
    for name, state in trained.items():
        for key, tensor in state["tensors"].items():
            pieces += divided(_piece(name, key, tensor, True))
        state["tensors"] = {}
    has = ["weights", *(["optimizer"] if optimizer is not None else [])]
    about = {
        "step": step, "model": model, "mesh": "dp=1", "zero": 0, "processes": 1, "has": has,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "csc": csc.__version__, "torch": torch.__version__,
    }  # fmt: skip
    save = Save(folder_of(run, step), secrets.token_hex(4), (0, 1), about, list(tensors), None)
    return write(ProcessState(pieces, optimizer, {}), save, Meeting())


def _piece(name: str, key: str, tensor: torch.Tensor, trained: bool) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(name, key, shape, whole_box(shape), tensor.contiguous(), trained)
