"""A compiled model in transformers' Trainer.

    trainer = CompiledTrainer(compiled, args=TrainingArguments(...), train_dataset=..., data_collator=...)
    trainer.train()

One optimizer step is one `train_step`: the batches of gradient accumulation are its microbatches, weighted so that
gradients are those of all of them together. Data, logging, schedulers, callbacks and resuming are the Trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from csc.balance.balanced import balanced
from csc.checkpoints import restoring
from csc.checkpoints.as_json import unpacked
from csc.checkpoints.step_index import find, read
from csc.driver.checkpoint_folder import chosen, save_state
from csc.driver.compiled import CompiledModel
from csc.driver.training_state import EXTRA, OPTIMIZER, RANDOM, SCHEDULER, WEIGHTS, State, take_up
from csc.errors import InputError, MissingPackage
from csc.runtime import weights

try:
    import transformers
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer, TrainingArguments
except ModuleNotFoundError as error:
    raise MissingPackage.of(error, __name__) or error from error

# Arguments that change what the model computes, or how: the compiled program has its own say in that.
REFUSED = ("fp16", "bf16", "gradient_checkpointing", "torch_compile", "fsdp", "deepspeed", "label_smoothing_factor")
ADAPTERS = "adapter_model.safetensors"  # of PEFT
STATE = "training_state"  # folder of a checkpoint: optimizer, scheduler, generators of random numbers
METRICS = ("seconds", "tokens_per_second", "samples_per_second", "peak_memory", "mfu")  # that logs carry


class CompiledTrainer(Trainer):
    """transformers.Trainer whose training step is a compiled model's.

    per_device_train_batch_size is the global batch that `train_step` divides. Evaluation runs the eager model, which
    has the same parameters. Checkpoints are those of `compiled.save` (PEFT models: of `compiled.save_adapter`), with
    the optimizer's state for any mesh and number of processes. Under torchrun every process runs one rank, loads its
    replica's share of each global batch, and keeps the optimizer state of its own parameters. Logs carry the rates of
    `compiled.metrics` beside the loss.
    balance: arguments of `csc.balanced`, {"lengths": "length"}: steps are divided by what their samples cost.
    InputError for arguments that contradict the compiled program.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        args: TrainingArguments,
        balance: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not hasattr(Trainer, "_prepare_for_training"):
            raise InputError(
                f"transformers {transformers.__version__} has another Trainer than this adapter is for",
                "CompiledTrainer", "install a newer transformers (tested: 5.23), or call train_step in a loop",
            )  # fmt: skip
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
        if compiled.encodes_ahead:
            raise InputError(
                "the model is compiled with encode_ahead=True, and the Trainer does not say which batch follows",
                "CompiledTrainer",
                "compile with cache_features=DIR instead, or call train_step in a loop over compiled.ahead(loader)",
            )
        if balance is not None and args.gradient_accumulation_steps > 1:
            raise InputError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, and balance divides one batch",
                "CompiledTrainer", "leave it out; compile with as many microbatches, and take a larger batch",
            )  # fmt: skip
        super().__init__(model=compiled.model, args=args, **kwargs)
        self._balance = balance
        self.compiled = compiled
        self._waiting: list[Mapping[str, Any]] = []

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Gather the batches of one optimizer step, then run them. Returns the loss of them all; 0 before the last."""
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        model.train()  # evaluation may have been between
        self.compiled.zero_grad()
        options, local = self.compiled.options, self.compiled.dp_size > 1
        if len(batches) == 1:
            loss = self.compiled.train_step(batches[0], local=local)
        else:
            replicas = 1 if local else options.mesh.dp
            ready = _microbatches(self.compiled.cut, batches, replicas, options.microbatches)
            loss = self.compiled.train_step(ready, options.microbatches * len(batches), local)
        return loss.to(self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's, with the rates of the last step beside the loss."""
        if "loss" in logs:
            found = self.compiled.metrics
            logs.update({f"step_{name}": found[name] for name in METRICS if name in found})
        super().log(logs, start_time)

    def get_train_dataloader(self) -> Any:
        """Of the sampler's order, which is the same in every process, each one's share: that of its replica."""
        if self._balance is not None:
            return self._balanced(self._balance)
        if self.args.world_size == 1:
            return super().get_train_dataloader()
        dataset: Any = self.train_dataset
        place, shares = self.compiled.dp_rank, self.compiled.dp_size
        self._check_shares(dataset, shares)
        loader = DataLoader(
            dataset,
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=self.args.dataloader_num_workers,
            drop_last=self.args.dataloader_drop_last,
        )
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return prepare_data_loader(
            loader, self.args.device, num_processes=shares, process_index=place, split_batches=shares > 1,
            even_batches=False, put_on_device=True, dispatch_batches=False, use_seedable_sampler=True, data_seed=seed,
        )  # fmt: skip

    def _balanced(self, balance: Mapping[str, Any]) -> Any:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        given = {
            "shuffle": self.args.train_sampling_strategy == "random", "seed": seed,
            "drop_last": self.args.dataloader_drop_last, "num_workers": self.args.dataloader_num_workers,
            "collate": self._get_collator_with_removed_columns(self.data_collator, description="training"),
        }  # fmt: skip
        return balanced(self.train_dataset, self.compiled, batch_size=self._train_batch_size, **{**given, **balance})

    def floating_point_ops(self, inputs: Any) -> int:
        """The Trainer's; 0 of a step that is divided already."""
        return 0 if isinstance(inputs, list) else super().floating_point_ops(inputs)

    def _check_shares(self, dataset: Any, shares: int) -> None:
        """InputError if a batch leaves a replica without samples: then its data would end before the others'."""
        size = self._train_batch_size
        if size % shares:
            raise InputError(
                f"per_device_train_batch_size is {size}, the global batch, and the mesh has dp={shares}",
                "CompiledTrainer", f"make it a multiple of {shares}",
            )  # fmt: skip
        left = len(dataset) % size if hasattr(dataset, "__len__") else 0
        if left and not self.args.dataloader_drop_last and left <= size - size // shares:
            raise InputError(
                f"the last batch of an epoch has {left} of {size} samples, none for the last of {shares} replicas",
                "CompiledTrainer", "set dataloader_drop_last=True, or make the data a multiple of the batch",
            )  # fmt: skip

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """The Trainer's, but for wrapping the model: it is parallel already."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.optimizer = self.accelerator.prepare(self.create_optimizer())
        self.create_scheduler(num_training_steps=max_steps)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What any number of processes, at any mesh, can take up; the weights are beside it."""
        state = self._training_state(OPTIMIZER, SCHEDULER, RANDOM, EXTRA)
        beside = {WEIGHTS: _identity(output_dir)} if self.args.process_index == 0 else {}
        save_state(replace(state, extra=beside), _folder(output_dir), self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        """That is in the state above."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and _folder(checkpoint).is_dir():
            self._take_up(checkpoint, OPTIMIZER, SCHEDULER)
        elif checkpoint is not None and not self._is_known_to_trainer(checkpoint):
            raise InputError(
                f"it has no folder {STATE}: the save was cut off, or another program's", checkpoint,
                "resume from an older checkpoint that CompiledTrainer wrote; in one process also from one of the "
                "Trainer; weights alone are loaded with compiled.load(checkpoint)",
            )  # fmt: skip
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _is_known_to_trainer(self, checkpoint: str) -> bool:
        """Whether the eager Trainer wrote it, or nothing but weights was asked for."""
        alone = self.args.world_size == 1
        return self.args.save_only_model or (alone and (Path(checkpoint) / "optimizer.pt").is_file())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and _folder(checkpoint).is_dir():
            self._take_up(checkpoint, RANDOM)
        else:
            super()._load_rng_state(checkpoint)

    def _take_up(self, checkpoint: str, *what: str) -> None:
        state, folder = self._training_state(*what), _folder(checkpoint)
        found = chosen(state.saved.trainer.transport.meeting, lambda: find(folder), folder)
        assert found is not None
        take_up(state, found)

    def _training_state(self, *what: str) -> State:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # without what accelerate puts around it
        return State(self.compiled.saved(None, optimizer), self.lr_scheduler, {}, what)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """By the eager model, in every process, with what all ranks have trained."""
        self.compiled.gather()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As `evaluate`."""
        self.compiled.gather()
        return super().predict(*args, **kwargs)

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
            others = [p for n, p in named if n not in decaying] if named else list(self.compiled.parameters())
            groups = [
                {"params": [p for n, p in named if n in decaying], "weight_decay": self.args.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
            self.optimizer = self.compiled.optimizer(kind, groups, **arguments)
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
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        _check_pair(resume_from_checkpoint)
        self._load_weights(resume_from_checkpoint, model)

    def _load_weights(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if hasattr(self.compiled.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.compiled.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_weights(str(self.state.best_model_checkpoint))


def _folder(checkpoint: str) -> Path:
    return Path(checkpoint) / STATE


def _identity(checkpoint: str) -> str:
    """Of the weights, or adapters, that are there."""
    adapters = Path(checkpoint) / ADAPTERS
    return sha256(adapters.read_bytes()).hexdigest() if adapters.is_file() else weights.identity(Path(checkpoint))


def _check_pair(checkpoint: str) -> None:
    """InputError if weights and training state are of two saves: one to the same place was cut off between them."""
    if not _folder(checkpoint).is_dir():
        return
    state = restoring.state(read(find(_folder(checkpoint))), 0)
    then = unpacked(state.get(EXTRA, {})).get(WEIGHTS)
    if then is not None and then != _identity(checkpoint):
        raise InputError(
            f"its weights are not those that {STATE} was saved beside: a save to the same place was cut off",
            checkpoint, "resume from another checkpoint; the weights alone are loaded with compiled.load(checkpoint)",
        )  # fmt: skip


def _microbatches(
    cut: Callable[[Any, int], list[dict[str, Any]]], batches: list[Mapping[str, Any]], replicas: int, each: int
) -> list[dict[str, Any]]:
    """Every batch cut into `each` microbatches per replica; replica after replica, as train_step wants them."""
    ready: list[list[dict[str, Any]]] = [[] for _ in range(replicas)]
    for batch in batches:
        microbatches = cut(batch, each * replicas)
        for replica, own in enumerate(ready):
            own += microbatches[replica * each : (replica + 1) * each]
    return [microbatch for own in ready for microbatch in own]
