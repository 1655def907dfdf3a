"""Weights of a checkpoint as files of Hugging Face, which `from_pretrained` reads.

Terms: a *group* is some tensors of the files that some parameters make together (csc.runtime.weights.WeightLayout). One
is held at a time.

    model_of(folder) -> model                       that config.json is of, without values; None if there is none
    write_pretrained(index, out, tell)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from csc.checkpoints import files, restoring
from csc.checkpoints.files import StepIndex
from csc.checkpoints.writing import CONFIGS
from csc.driver.checkpoint import format_of
from csc.errors import InputError, installing
from csc.runtime.loaded_program import read_json
from csc.runtime.meeting import first_line
from csc.runtime.weights import INDEX, OWN, SINGLE, WeightLayout, published

SHARD = 4 * 2**30  # bytes of a file


class StoredGroup(NamedTuple):
    """Tensors of the files, as meta tensors, and the parameters that make them."""

    tensors: Mapping[str, torch.Tensor]
    names: tuple[str, ...]


def write_pretrained(index: StepIndex, out: Path, tell: Callable[[str], None]) -> None:
    """In files of at most 4 GiB. InputError if something cannot be read, or written."""
    model = model_of(index.folder)
    form = OWN if model is None else format_of(model, list(index.parameters))
    metas = {n: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for n, s in index.parameters.items()}
    groups = list(_groups(form, metas))
    made = _each(index, form, groups, tell)
    shards = list(_shards({key: tensor for one in groups for key, tensor in one.tensors.items()}))
    files_of: dict[str, str] = {}
    for number, about in enumerate(shards, 1):
        file = SINGLE[0] if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.write_each(out / file, about, (next(made) for _ in range(len(about))), in_header=True)
        files_of |= dict.fromkeys(about, file)
    if len(shards) > 1:
        table = {"metadata": {"total_size": sum(s.nbytes for a in shards for s in a.values())}, "weight_map": files_of}
        published(out / INDEX, lambda path: path.write_text(json.dumps(table, indent=2) + "\n"))
    for name in CONFIGS:
        if (index.folder / name).is_file():
            published(out / name, partial(shutil.copyfile, index.folder / name))


def _groups(form: WeightLayout, metas: Mapping[str, torch.Tensor]) -> Iterator[StoredGroup]:
    """Those that a conversion of their own parameters makes; the rest, if there is one, together."""
    stored = dict(form.stored(metas))
    left, of_rest = dict(stored), set(metas)
    for one in form.groups(stored):
        names = tuple(name for name in one.names if name in metas)
        tensors = {key: stored[key] for key in one.keys}
        made = form.stored({name: metas[name] for name in names})
        if _sizes(made) == _sizes(tensors) and tensors.keys() <= left.keys():
            yield StoredGroup(tensors, names)
            left = {key: tensor for key, tensor in left.items() if key not in tensors}
            of_rest -= set(names)
    if left:
        yield StoredGroup(left, tuple(name for name in metas if name in of_rest))


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}


def _each(
    index: StepIndex, form: WeightLayout, groups: list[StoredGroup], tell: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the files, group by group."""
    done, size = 0, sum(tensor.nbytes for one in groups for tensor in one.tensors.values())
    for one in groups:
        tell(f"{next(iter(one.tensors))}, {done / 1e9:.1f} of {size / 1e9:.1f} GB written")
        whole = {name: restoring.whole(index, index.parameters[name], repr(name)) for name in one.names}
        made = form.stored(whole)
        yield from ((key, made[key].contiguous()) for key in one.tensors)
        done += sum(tensor.nbytes for tensor in one.tensors.values())


def _shards(stored: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    found: dict[str, torch.Tensor] = {}
    size = 0
    for key, tensor in stored.items():
        if found and size + tensor.nbytes > SHARD:
            yield found
            found, size = {}, 0
        found[key] = tensor
        size += tensor.nbytes
    yield found


def model_of(folder: Path) -> Any:
    """None if there is no config.json, or not one of a model of transformers'. InputError if it cannot be read."""
    file = folder / CONFIGS[0]
    if not file.is_file():
        return None

    def fail(what: str) -> InputError:
        return InputError(what, str(file), "take another copy of it; without the file, names stay the model's own")

    read_json(file, fail)
    try:
        import transformers
    except ModuleNotFoundError:
        raise InputError(
            "transformers is not installed, which knows how weights of this model are named in files", str(file),
            installing("transformers"),
        ) from None  # fmt: skip
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        made = getattr(transformers, (config.architectures or [""])[0], None)
        if not isinstance(made, type) or not issubclass(made, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            return made._from_config(config, dtype=config.dtype)
    except Exception as error:  # transformers says all kinds of things
        raise fail(f"transformers makes no model of it: {first_line(error)}") from error
