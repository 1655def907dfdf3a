"""A compiled model on disk: weights, the optimizer's state, a loader's position, the configuration, adapters.

Every rank calls these functions, for the same directory; each reads and writes what its ranks hold.

    load(directory, saved)        save(directory, saved)        saved: what there is to be read, or written
    save_adapter(model, gather, directory)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from csc.driver import loader_state
from csc.driver.checkpoint import format_of, on_meta, put_rest, read_rest, write_config
from csc.driver.program_set import ProgramSet
from csc.driver.share import place
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.runtime import optimizer
from csc.runtime.meeting import NOTHING, Said
from csc.runtime.trainer import Trainer
from csc.runtime.weights import WeightLayout


@dataclass(frozen=True)
class Saved:
    """form: how the files name the model's tensors. loader, optimizer: None: not saved, or left as it is."""

    model: nn.Module
    trainer: Trainer
    form: WeightLayout
    mesh: Mesh
    loader: Any
    optimizer: torch.optim.Optimizer | None
    look: Callable[[], None]  # to call once the model has other values

    @classmethod
    def of(
        cls,
        model: nn.Module,
        trainer: Trainer,
        programs: ProgramSet,
        mesh: Mesh,
        loader: Any,
        optimizer: torch.optim.Optimizer | None,
    ) -> Saved:
        """programs: the trainer's; of the others the parameters are trained, too."""
        trainers = [trainer]
        if dist.is_initialized() and dist.get_world_size() > 1:
            trainers += programs.trainers  # what those use is trained on another rank, not in this copy
        form = format_of(model, {spec.name for one in trainers for spec in one.program.manifest.parameters})
        return cls(model, trainer, form, mesh, loader, optimizer, programs.look)


def load(path: str | Path, saved: Saved) -> None:
    """Read it all, or raise InputError; the optimizer's state is read behind the weights that it belongs to."""
    positions: list[Any] = []
    meeting = saved.trainer.transport.meeting

    def rest() -> tuple[Said, dict[str, torch.Tensor]]:
        if saved.loader is not None:
            loader_state.check(saved.loader)
            positions.append(loader_state.read(path, place(saved.mesh)))
        keeps = 0 in saved.trainer.transport.ranks or not on_meta(saved.form)
        return NOTHING, read_rest(path, saved.form) if keeps else {}

    found = meeting.hold("load", rest)
    saved.trainer.load(path, saved.form)
    put_rest(saved.model, saved.form, found)
    if saved.optimizer is not None:
        optimizer.load(path, saved.optimizer, saved.trainer)
    for position in positions:
        saved.loader.load_state_dict(position)
    saved.look()  # what the step does not use may have got values for the first time


def save(directory: str | Path, saved: Saved) -> None:
    """Write it all. InputError, on every rank, if one cannot."""

    def config() -> tuple[Said, None]:
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_config(saved.model, directory)
        if saved.loader is not None and saved.trainer.speaks:
            loader_state.write(saved.loader, directory, place(saved.mesh))
        return NOTHING, None

    if saved.loader is not None:
        loader_state.check(saved.loader)
    saved.trainer.save(directory, saved.form)
    if saved.optimizer is not None:
        optimizer.save(directory, saved.optimizer, saved.trainer)
    saved.trainer.transport.meeting.hold("the configuration of what is saved", config)


def save_adapter(model: nn.Module, gather: Callable[[], nn.Module], directory: str | Path) -> None:
    """Write a PEFT model's adapters; gather: the model with the weights of all ranks. InputError if it has none."""
    if not hasattr(model, "peft_config"):
        raise InputError(
            f"{type(model).__name__} has no adapters", "save_adapter",
            "save all weights with save(directory), or make the model with peft.get_peft_model",
        )  # fmt: skip
    whole = gather()
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or dist.get_rank() == 0:
        whole.save_pretrained(str(directory))  # type: ignore[operator]
    if not alone:
        dist.barrier()
