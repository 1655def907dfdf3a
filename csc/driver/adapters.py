"""Adapters of PEFT in a checkpoint of training, and as PEFT's own files.

Terms: the *base* is the model without its adapters, whose config.json lies beside the checkpoint. A model that PEFT has
wrapped names parameters of both in its own way.

    note_adapters(model, folder)               adapters.json: PEFT's configuration of each; nothing for other models
    write_adapters(index, out, tell)           what `PeftModel.from_pretrained(base, out)` reads, and the base, which
                                               `from_pretrained` of its class reads, in out/base_model
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csc.checkpoints import restoring
from csc.checkpoints.files import StepIndex
from csc.checkpoints.writing import ADAPTERS
from csc.driver.checkpoint import write_config
from csc.driver.notices import notice
from csc.driver.pretrained_files import model_of, write_pretrained
from csc.errors import InputError, MissingPackage
from csc.runtime.loaded_program import read_json
from csc.runtime.meeting import first_line
from csc.runtime.weights import flushed, published

BASE = "base_model"
ITS_CONFIG = "adapter_config.json"  # as PEFT calls it


def note_adapters(model: Any, folder: Path) -> None:
    """And the base's configuration. A configuration that PEFT cannot write is no error of a save: a line says so."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        (folder / ADAPTERS).unlink(missing_ok=True)  # of another model that was saved there
        return
    try:
        told = {name: _told(config) for name, config in model.peft_config.items()}
    except Exception as error:  # PEFT says all kinds of things
        notice(
            f"{folder.name} does not tell its adapters, and `csc checkpoint convert` names weights as the model does: "
            f"{type(error).__name__}: {first_line(error)}"
        )
        return
    write_config(model.get_base_model(), folder)
    published(folder / ADAPTERS, lambda path: path.write_text(json.dumps(told, indent=2) + "\n"))


def _told(config: Any) -> Any:
    with tempfile.TemporaryDirectory(prefix="csc-") as made:
        config.save_pretrained(made)
        return json.loads((Path(made) / ITS_CONFIG).read_text())


def write_adapters(index: StepIndex, out: Path, tell: Callable[[str], None]) -> None:
    """Adapters are read at once, the base's weights tensor by tensor. With a base that is not of transformers, which
    nothing here can make, all in the model's own names. InputError if PEFT makes no such model, or a parameter is
    missing.
    """
    made = model_of(index.folder)
    if made is None:
        write_pretrained(index, out, tell)
        return
    wrapped, of_base = _wrapped(index.folder, made)
    own = {name: stored for name, stored in index.parameters.items() if name not in of_base}
    base = {of_base[name]: stored for name, stored in index.parameters.items() if name in of_base}
    lacking = [name for name, _ in wrapped.named_parameters() if name not in index.parameters]
    if lacking:
        raise InputError(
            f"it has no parameter {lacking[0]!r}, and {len(lacking) - 1} more that {ADAPTERS} tells of",
            str(index.folder), "take another checkpoint, or save_adapter of the compiled model where it is trained",
        )  # fmt: skip
    tell(f"adapters, {sum(one.nbytes() for one in own.values()) / 1e9:.1f} GB")
    values = {name: restoring.whole(index, stored, repr(name)) for name, stored in own.items()}
    wrapped.save_pretrained(str(out), state_dict=values)
    for file in out.iterdir():
        flushed(file)
    write_pretrained(replace(index, parameters=base), out / BASE, tell)


def _wrapped(folder: Path, base: Any) -> tuple[Any, Mapping[str, str]]:
    """The model of a base, without values, and what parameters and buffers of the base are called in it: {there: in the
    base}.
    """

    def fail(what: str) -> InputError:
        return InputError(what, str(folder / ADAPTERS), "take another copy of it, or an older checkpoint")

    told = read_json(folder / ADAPTERS, fail)
    try:
        from peft import PeftConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise MissingPackage.of(error, "checkpoint convert") or error from error
    base.name_or_path = None  # PEFT would put the checkpoint's folder for a name that is not known
    names = {id(tensor): name for name, tensor in _tensors(base)}
    wrapped: Any = None
    try:
        with tempfile.TemporaryDirectory(prefix="csc-") as made, torch.device("meta"):
            for adapter, config in told.items():
                (Path(made) / ITS_CONFIG).write_text(json.dumps(config))
                given = PeftConfig.from_pretrained(made)
                if isinstance(getattr(given, "init_lora_weights", None), str):
                    given.init_lora_weights = True  # the base has been changed for it: not once more where it is read
                if wrapped is None:
                    wrapped = get_peft_model(base, given, adapter_name=adapter)
                else:
                    wrapped.add_adapter(adapter, given)
    except Exception as error:  # PEFT says all kinds of things
        raise fail(f"PEFT makes no model of it: {first_line(error)}") from error
    if wrapped is None:
        raise fail("it names no adapter")
    prompts = [name for name, config in wrapped.peft_config.items() if config.is_prompt_learning]
    if prompts:
        raise InputError(
            f"the adapter {prompts[0]!r} is of prompts, which PEFT makes from a model with values",
            str(folder), "write it with save_adapter of the compiled model, or convert to dcp",
        )  # fmt: skip
    return wrapped, {name: names[id(tensor)] for name, tensor in _tensors(wrapped) if id(tensor) in names}


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
