"""Checkpoints of training from and to other formats: Hugging Face's safetensors, torch.distributed.checkpoint.

Terms: a directory of Hugging Face has config.json beside its weights, by which transformers names and shapes them in
its own way; without one, names are the model's own. `save` puts that file into a checkpoint, too. What is converted is
read and written tensor by tensor, and is there whole or not at all.

    kind(path) -> CSC | HF | DCP               InputError for something else
    convert(source, out, to, step, optimizer, tell) -> Conversion
                                               tell: is called with what is being written
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from csc.checkpoints import converting, dcp, files
from csc.checkpoints.converting import Contents
from csc.checkpoints.files import FILE, saved
from csc.checkpoints.writing import ADAPTERS, CONFIGS, staged
from csc.driver.adapters import write_adapters
from csc.driver.checkpoint import format_of
from csc.driver.pretrained_files import model_of, write_pretrained
from csc.errors import InputError
from csc.runtime import weights
from csc.runtime.specs import ParameterSpec
from csc.runtime.weights import INDEX, SINGLE, published

CSC, HF, DCP = "csc", "hf", "dcp"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Conversion:
    """What was made. left: keys that a checkpoint has no place for."""

    made: Path
    left: list[str]


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


def convert(
    source: Path, out: Path, to: str, step: int | None = None, optimizer: str | None = None, tell: Tell = lambda _: None
) -> Conversion:
    """step: which of a run, or of the new checkpoint. optimizer: the class whose state a DCP directory has. InputError
    if one of the two is no checkpoint of csc, something cannot be read, or `out` has something: nothing is made then.
    """
    here = kind(source)
    if (here == CSC) == (to == CSC):
        raise InputError(
            f"it is {here}, and --to is {to}", str(source),
            "convert a checkpoint of csc to hf or dcp, and either of them to csc",
        )  # fmt: skip
    if step is not None and step < 0:
        raise InputError(f"step is {step}", "convert", "give a number of at least 0")
    with staged(out) as stage:
        if here == HF:
            folder, left = _from_hf(source, stage, step or 0, tell)
            return Conversion(out / folder.name, left)
        if here == DCP:
            found = dcp.read(source, optimizer)
            about = {name: one.about for name, one in found.parameters.items()}
            made = Contents(about, ((name, one.load()) for name, one in found.parameters.items()), found.optimizer)
            return Conversion(out / converting.write(stage, step or 0, made, "model", tell).name, found.left)
        index = files.read(files.find(source, step))
        if not index.parameters:
            raise InputError(
                f"it has {', '.join(index.has)}, and no weights", str(index.folder),
                "weights are beside it: CompiledTrainer writes them as from_pretrained reads them",
            )  # fmt: skip
        if to == DCP:
            dcp.write(stage, index, tell)
        elif (index.folder / ADAPTERS).is_file():
            write_adapters(index, stage, tell)
        else:
            write_pretrained(index, stage, tell)
        return Conversion(out, [])


def _from_hf(path: Path, run: Path, step: int, tell: Tell) -> tuple[Path, list[str]]:
    """Weights alone; and what the files have that the model does not."""
    model, there = None if path.is_file() else model_of(path), weights.headers(path)
    about, form = dict(there), weights.OWN
    if model is not None:
        kept = model.state_dict()
        about = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}
        form = format_of(model, list(about))
    given = weights.each(path, [_spec(name, tensor) for name, tensor in about.items()], format=form)
    named: Any = type(model).__name__ if model is not None else "model"
    folder = converting.write(run, step, Contents(about, given), named, tell)
    for name in CONFIGS:
        if path.is_dir() and (path / name).is_file():
            published(folder / name, partial(shutil.copyfile, path / name))
    return folder, [key for one in form.groups(there) if about.keys().isdisjoint(one.names) for key in one.keys]


def _spec(name: str, tensor: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), tensor.dtype, False, (), ())
