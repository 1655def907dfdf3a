"""A compiled model as a LightningModule.

    module = CompiledModule(compiled, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), max_norm=1.0)
    lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1).fit(module, loader)

Optimization is manual in Lightning's words: `train_step` runs forward and backward, so Lightning's own backward,
gradient clipping and accumulation are not used. Subclass it to add validation, which sees the eager `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning import LightningModule
from torch import nn

from csc.api import CompiledModel
from csc.errors import InputError


class CompiledModule(LightningModule):
    """A compiled model that Lightning trains.

    optimizer: makes it from the parameters. scheduler: makes it from the optimizer; steps once a batch. max_norm: the
    2-norm that gradients are clipped to; None: as they are. Logs `train_loss` (and `grad_norm`). Lightning's
    checkpoints hold the model's weights; `compiled.save` writes a directory for `from_pretrained`.
    InputError for more than one device: start torchrun with a loop of your own for that.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        max_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.compiled = compiled
        self.model = compiled.model
        self.max_norm = max_norm
        self._optimizer = optimizer
        self._scheduler = scheduler

    def configure_optimizers(self) -> Any:
        """Over what trains in the compiled model."""
        if self.trainer.world_size > 1:
            raise InputError(
                f"Lightning started {self.trainer.world_size} processes, and would give each of them other data",
                "CompiledModule", "use devices=1, or call train_step in a loop of your own under torchrun",
            )  # fmt: skip
        optimizer = self._optimizer(self.compiled.parameters())
        return optimizer if self._scheduler is None else ([optimizer], [self._scheduler(optimizer)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One `train_step` and one step of the optimizer and the scheduler."""
        loss = self.compiled.train_step(batch)
        if self.max_norm is not None:
            self.log("grad_norm", self.compiled.clip_grad_norm_(self.max_norm))
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.compiled.zero_grad()
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        self.log("train_loss", loss, prog_bar=True)
        return loss
