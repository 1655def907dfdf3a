"""A compiled model in transformers' Trainer.

    trainer = CompiledTrainer(compiled, args=TrainingArguments(...), train_dataset=..., data_collator=...)
    trainer.train()

One optimizer step is one `train_step`: the batches of gradient accumulation are its microbatches, weighted so that
gradients are those of all of them together. Data, logging, schedulers, callbacks and resuming are the Trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from csc.api import CompiledModel
from csc.capture import pieces, split_batch
from csc.errors import InputError
from csc.runtime.launch import under_torchrun

# Arguments that change what the model computes, or how: the compiled program has its own say in that.
REFUSED = ("fp16", "bf16", "gradient_checkpointing", "torch_compile", "fsdp", "deepspeed", "label_smoothing_factor")


class CompiledTrainer(Trainer):
    """transformers.Trainer whose training step is a compiled model's.

    per_device_train_batch_size is the global batch that `train_step` divides. Evaluation runs the eager model, which
    shares its parameters. Checkpoints are those of `compiled.save` (PEFT models: of `compiled.save_adapter`).
    InputError for arguments that contradict the compiled program, and for more than one process.
    """

    def __init__(self, compiled: CompiledModel, args: TrainingArguments, **kwargs: Any) -> None:
        for name in REFUSED:
            if getattr(args, name, None):
                raise InputError(
                    f"{name} is set, which the compiled program knows nothing of", "CompiledTrainer",
                    "leave it out; dtypes, recomputation and parallelism are decided when the model is compiled",
                )  # fmt: skip
        if kwargs.get("compute_loss_func") is not None:
            raise InputError(
                "compute_loss_func is set, and the loss is part of the compiled program", "CompiledTrainer",
                "compute the loss in the model's forward, and compile that",
            )  # fmt: skip
        if under_torchrun() or (dist.is_initialized() and dist.get_world_size() > 1):
            raise InputError(
                "the Trainer gives each process other data, and all ranks of a compiled model need the same",
                "CompiledTrainer", "start it in one process, or call train_step in a loop of your own under torchrun",
            )  # fmt: skip
        super().__init__(model=compiled.model, args=args, **kwargs)
        self.compiled = compiled
        self._waiting: list[Mapping[str, Any]] = []

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Gather the batches of one optimizer step, then run them. Returns the loss of them all; 0 before the last."""
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        self.compiled.zero_grad()
        options = self.compiled.options
        if len(batches) == 1:
            loss = self.compiled.train_step(batches[0])
        else:
            ready = _microbatches(batches, options.mesh.dp, options.microbatches)
            loss = self.compiled.train_step(ready, microbatches=options.microbatches * len(batches))
        return loss.to(self.args.device)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that the arguments name, over what trains in the compiled model."""
        if self.optimizer is None:
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args)
            if not isinstance(kind, type) or not arguments.keys().isdisjoint({"params", "model", "optimizer_dict"}):
                raise InputError(
                    f"optim={self.args.optim} wants the model itself", "CompiledTrainer",
                    "pass optimizers=(optimizer, scheduler) with an optimizer over compiled.parameters()",
                )  # fmt: skip
            decaying = set(self.get_decay_parameter_names(self.compiled.model))
            named = list(self.compiled.named_parameters())
            groups = [
                {"params": [p for n, p in named if n in decaying], "weight_decay": self.args.weight_decay},
                {"params": [p for n, p in named if n not in decaying], "weight_decay": 0.0},
            ]
            self.optimizer = kind(groups, **arguments)
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self.compiled.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.compiled.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """What `from_pretrained` (of PEFT for adapters) reads."""
        directory = str(output_dir if output_dir is not None else self.args.output_dir)
        if hasattr(self.compiled.model, "peft_config"):
            self.compiled.save_adapter(directory)
        else:
            self.compiled.save(directory)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if hasattr(self.compiled.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.compiled.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


def _microbatches(batches: list[Mapping[str, Any]], replicas: int, each: int) -> list[dict[str, Any]]:
    """Every batch in `each` microbatches per replica; replica after replica, as train_step wants them."""
    ready: list[list[dict[str, Any]]] = [[] for _ in range(replicas)]
    for batch in batches:
        tensors, extra = split_batch(batch)
        cut = [piece | extra for piece in pieces(tensors, each * replicas)]
        for replica, own in enumerate(ready):
            own += cut[replica * each : (replica + 1) * each]
    return [microbatch for own in ready for microbatch in own]
