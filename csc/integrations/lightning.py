"""A compiled model as a LightningModule.

    module = CompiledModule(compiled, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), max_norm=1.0)
    lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1).fit(module, loader)

Under torchrun every process is a rank of the model and gets the same batches:

    lightning.Trainer(max_epochs=1, devices=1, strategy=OneRankEach(compiled)).fit(module, loader)

Optimization is manual in Lightning's words: `train_step` runs forward and backward, so Lightning's own backward,
gradient clipping and accumulation are not used. Subclass it to add validation, which sees the eager `model`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from csc.checkpoints.files import cut_off, find, folder_of, saved
from csc.checkpoints.writing import forgotten
from csc.driver.checkpoint_manager import chosen, save_state
from csc.driver.compiled import CompiledModel
from csc.driver.training_state import OPTIMIZER, RANDOM, WEIGHTS, State, take_up
from csc.errors import InputError, MissingPackage

try:
    from lightning import LightningModule
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError as error:
    raise MissingPackage.of(error, __name__) or error from error

METRICS = ("tokens_per_second", "samples_per_second", "peak_memory", "mfu")  # that are logged


class CompiledModule(LightningModule):
    """A compiled model that Lightning trains.

    optimizer: makes it from the parameters. scheduler: makes it from the optimizer; steps once a batch. max_norm: the
    2-norm that gradients are clipped to; None: as they are. local: the loader has the samples of this process' replica
    alone. Logs `train_loss` (and `grad_norm`), and the rates of `compiled.metrics`. Lightning's checkpoints hold the
    model's weights; `compiled.save` writes a directory for `from_pretrained`.
    InputError where Lightning would give its processes different batches, and for a model that encodes ahead.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        max_norm: float | None = None,
        local: bool = False,
    ) -> None:
        if compiled.encodes_ahead:
            raise InputError(
                "the model is compiled with encode_ahead=True, and Lightning does not say which batch follows",
                "CompiledModule",
                "compile with cache_features=DIR instead, or call train_step in a loop over compiled.ahead(loader)",
            )
        super().__init__()
        self.automatic_optimization = False
        self.compiled = compiled
        self.model = compiled.model
        self.max_norm, self.local = max_norm, local
        self._optimizer = optimizer
        self._scheduler = scheduler

    def configure_optimizers(self) -> Any:
        """Over what trains in the compiled model, of this process's rank."""
        if self.trainer.world_size > 1:
            raise InputError(
                f"Lightning started {self.trainer.world_size} processes, and would give each of them other data",
                "CompiledModule", "use devices=1, under torchrun with strategy=OneRankEach(compiled)",
            )  # fmt: skip
        optimizer = self.compiled.optimizer(self._optimizer)
        return optimizer if self._scheduler is None else ([optimizer], [self._scheduler(optimizer)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One `train_step` and one step of the optimizer and the scheduler."""
        loss = self.compiled.train_step(batch, local=self.local)
        if self.max_norm is not None:
            self.log("grad_norm", self.compiled.clip_grad_norm_(self.max_norm))
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.compiled.zero_grad()
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        self.log("train_loss", loss, prog_bar=True)
        metrics = self.compiled.metrics
        self.log_dict({name: metrics[name] for name in METRICS if name in metrics})
        return loss


class OneRankEach(SingleDeviceStrategy):
    """For torchrun: Lightning runs in every process as if it were alone, with all batches, and the first one writes.

    Beside a checkpoint `last.ckpt`, whose state_dict has the weights of all ranks, there is a folder `last.ckpt.csc`:
    weights, the optimizer's state and generators of random numbers, as all ranks have written them. `fit(...,
    ckpt_path=...)` reads that, with any number of processes and at any mesh. The folder's content is that of the step
    which the file tells: the one before stays until the file is written anew.
    """

    strategy_name = "csc_one_rank_each"

    def __init__(self, compiled: CompiledModel) -> None:
        parameter = next(compiled.model.parameters())
        super().__init__(device=parameter.device)
        self._compiled = compiled
        self._read: Path | None = None  # what is being loaded

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes checkpoints."""
        return int(os.environ.get("RANK", "0")) == 0

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of all ranks, in every process; all call it."""
        self._compiled.gather()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the folder beside the checkpoint has that of all ranks."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's file, and the folder beside it. All ranks call it."""
        step, beside = _step(checkpoint), _beside(filepath)
        save_state(self._state(WEIGHTS, OPTIMIZER, RANDOM), folder_of(beside, step), step)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            _forget_all(beside, but=step)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Lightning's file. InputError if there is no folder beside it, or not of its step."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        beside, step = _beside(checkpoint_path), _step(checkpoint)
        if not beside.is_dir():
            raise InputError(
                f"beside it is no folder {beside.name}", str(checkpoint_path),
                "take the folder along with the file, or load weights with compiled.load(directory)",
            )  # fmt: skip
        steps = saved(beside)
        if step not in steps:
            raise InputError(
                f"it is of step {step}, and the folder {beside.name} has {', '.join(map(str, steps)) or 'none'}",
                str(checkpoint_path), "take the folder that was written with the file, or another checkpoint",
            )  # fmt: skip
        self._read = steps[step]
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The weights that this process' ranks hold, from the folder."""
        self._take_up(WEIGHTS)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """That of what this process steps, from the folder, and what its generators draw next."""
        self._take_up(OPTIMIZER, RANDOM)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Lightning's file and the folder."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            _forget_all(_beside(filepath))

    def _state(self, *parts: str) -> State:
        optimizer = self.optimizers[0] if self.optimizers else None
        plain: Any = getattr(optimizer, "optimizer", optimizer)
        if plain is None:  # of a Trainer that does not train
            parts = tuple(part for part in parts if part != OPTIMIZER)
        return State(self._compiled.saved(None, plain), None, {}, parts)

    def _take_up(self, *parts: str) -> None:
        state, folder = self._state(*parts), self._read
        assert folder is not None
        step = chosen(state.saved.trainer.transport.meeting, lambda: find(folder), folder)
        assert step is not None
        take_up(state, step)

    def barrier(self, name: str | None = None) -> None:
        """Until every process is here."""
        if dist.is_initialized():
            dist.barrier()


def _beside(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}.csc")


def _step(checkpoint: Mapping[str, Any]) -> int:
    return int(checkpoint.get("global_step", 0))


def _forget_all(beside: Path, but: int | None = None) -> None:
    """Remove what is in the folder, but for a step, and the folder if nothing is left."""
    for folder in [*(one for step, one in saved(beside).items() if step != but), *cut_off(beside)]:
        forgotten(folder)
    if but is None:
        forgotten(beside)
