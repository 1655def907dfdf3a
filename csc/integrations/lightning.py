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
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from csc.driver.compiled import CompiledModel
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
    InputError where Lightning would give its processes different batches.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        max_norm: float | None = None,
        local: bool = False,
    ) -> None:
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
        found = self.compiled.metrics
        self.log_dict({name: found[name] for name in METRICS if name in found})
        return loss


class OneRankEach(SingleDeviceStrategy):
    """For torchrun: Lightning runs in every process as if it were alone, with all batches, and the first one writes.

    Its checkpoints hold the weights of all ranks, and the first rank's optimizer: to go on training, load the weights
    and make a new optimizer, or train with HF's Trainer, whose checkpoints hold all of it.
    """

    strategy_name = "csc_one_rank_each"

    def __init__(self, compiled: CompiledModel) -> None:
        parameter = next(compiled.model.parameters())
        super().__init__(device=parameter.device)
        self._compiled = compiled

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes checkpoints."""
        return int(os.environ.get("RANK", "0")) == 0

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of all ranks, in every process; all call it."""
        self._compiled.gather()
        return super().lightning_module_state_dict()

    def barrier(self, name: str | None = None) -> None:
        """Until every process is here."""
        if dist.is_initialized():
            dist.barrier()
