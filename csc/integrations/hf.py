"""A compiled model in transformers' Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import find_batch_size, gather_object, slice_tensors
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from csc import devices
from csc.api import compile as csc_compile
from csc.balance.balanced import balanced
from csc.checkpoints import restoring
from csc.checkpoints.files import find, read, unpacked
from csc.driver.checkpoint_manager import chosen, save_state
from csc.driver.compiled import CompiledModel
from csc.driver.programs import evaluated
from csc.driver.training_state import EXTRA, OPTIMIZER, RANDOM, SCHEDULER, WEIGHTS, State, take_up
from csc.errors import InputError, MissingPackage
from csc.runtime import weights

# --- Batches that several processes evaluate, each a share of them, with the results of one process ------------------
#
# accelerate fills up the last batch with samples of the first one, and a loss over a filled batch is another one. Here
# processes take full batches in turn; what is left behind the last full turn every process does by itself.


@dataclass
class Shares:
    """How processes share the batches that they evaluate: `count` full ones at a time, one each. What is left behind
    the last such round all of them do.
    """

    place: int
    count: int
    size: int  # samples of a full batch

    def mine(self, batches: Iterator[Any], is_full: Callable[[Any], bool]) -> Iterator[tuple[bool, Any]]:
        """(whether others have other batches of the same round, batch)."""
        while turn := list(islice(batches, self.count)):
            if len(turn) == self.count and is_full(turn[-1]):
                yield True, turn[self.place]
            else:
                for batch in turn:
                    yield False, batch


class Dealt:
    """Indices of the batches that a process evaluates: a batch sampler."""

    def __init__(self, batches: BatchSampler, shares: Shares) -> None:
        self.batches, self.shares = batches, shares
        self.batch_size, self.drop_last, self.sampler = batches.batch_size, batches.drop_last, batches.sampler

    def __iter__(self) -> Iterator[list[int]]:
        for _, batch in self.shares.mine(iter(self.batches), lambda batch: len(batch) == self.shares.size):
            yield batch

    def __len__(self) -> int:
        rounds = len(self.batches.sampler) // self.shares.size // self.shares.count  # type: ignore[arg-type]
        return rounds + len(self.batches) - rounds * self.shares.count


class EvaluationLoader:
    """What the Trainer's evaluation runs over in one of several processes, and how it gathers what comes of it."""

    def __init__(self, loader: Any, shares: Shares) -> None:
        self.loader, self.dataset, self.shares = loader, loader.dataset, shares
        self._is_dealt = not isinstance(self.dataset, IterableDataset)
        self._shared, self._samples = False, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        size = self.shares.size
        if self._is_dealt:
            rounds = len(self.loader.batch_sampler.batches.sampler) // size // self.shares.count
            batches: Iterator[tuple[bool, Any]] = ((i < rounds, batch) for i, batch in enumerate(self.loader))
        else:
            batches = self.shares.mine(iter(self.loader), lambda batch: find_batch_size(batch) == size)
        for self._shared, batch in batches:
            samples = find_batch_size(batch)
            self._samples = size if samples is None else samples
            yield batch

    def gathered(self, accelerator: Any, as_objects: bool, data: Any) -> Any:
        """Of the batch that was yielded last: from all processes, or where all have the same, of its samples."""
        if self._shared and self.shares.count > 1:
            return gather_object(data) if as_objects else accelerator.gather(data)
        return data[: self._samples] if as_objects else slice_tensors(data, slice(0, self._samples))


# --- A compiled model in transformers' Trainer -----------------------------------------------------------------------
#
#     trainer = CompiledTrainer(compiled, args=TrainingArguments(...), train_dataset=..., data_collator=...)
#     trainer.train()
#
# A step trains what the Trainer of the installed version would train: the batches of gradient accumulation are weighed
# as there. Where that is the mean over all their labels, they are microbatches of one `train_step`; otherwise each
# batch is a `train_step` of its own. Data, logging, schedulers, callbacks and resuming are the Trainer's.
# `trainer_arguments.FIELDS` says what becomes of each argument.
#
# Terms: *items* are what the Trainer counts for `num_items_in_batch`, the labels of all batches of a step.


try:
    import transformers
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils.memory import clear_device_cache
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import seed_worker

    from csc.integrations import trainer_arguments

except ModuleNotFoundError as error:
    raise MissingPackage.of(error, __name__) or error from error

ADAPTERS = "adapter_model.safetensors"  # of PEFT
STATE = "training_state"  # folder of a checkpoint: optimizer, scheduler, generators of random numbers
METRICS = ("seconds", "tokens_per_second", "samples_per_second", "peak_memory", "mfu")  # that logs carry
ITEMS = "num_items_in_batch"  # entry of a batch
ROUNDING = 1e-5  # of a loss that is computed twice in float32


class UseOfItems(IntEnum):
    """How a model's loss depends on the items that the Trainer passes to forward, as eager PyTorch shows."""

    UNKNOWN = 0  # no label, or no number
    BY_ITEMS = 1  # a sum over labels, divided by the items: all of the loss
    IGNORED = 2  # forward takes them, and the loss does not change
    PARTLY = 3  # a term is not divided by them; without them the loss of one batch is the same
    OTHERWISE = 4  # one batch has another loss with them than without


@dataclass(frozen=True)
class Waiting:
    """A batch of a step that is not complete, with its share: the factor of its loss. items: of all of the step, if the
    Trainer passes them to forward.
    """

    batch: Any
    share: float
    items: torch.Tensor | None


def compile_for(model: nn.Module, args: TrainingArguments, **options: Any) -> CompiledModel:
    """Compile a model as the Trainer would train it with these arguments.

    The Trainer changes a model before it trains: `bf16` puts autocast around forward, `gradient_checkpointing`
    recomputes layers, `neftune_noise_alpha` adds noise to embeddings. Here that is done before the model is compiled.

    Args:
        model: as `csc.compile`; its forward and the hooks of its embeddings are changed in place.
        args: those that `CompiledTrainer` will be given.
        options: of `csc.compile`; they go before what the arguments say (`precision="bf16"`, `recompute=`).

    Returns: the compiled model.
    Raises:
        InputError: `neftune_noise_alpha` is set, and the model does not say which are its input embeddings.
    """
    return csc_compile(model, **{**trainer_arguments.apply(args, model, options.get("precision")), **options})


class CompiledTrainer(Trainer):
    """transformers.Trainer whose training step is a compiled model's.

    per_device_train_batch_size is the global batch that `train_step` divides. Evaluation runs the eager model, which
    has the same parameters. Checkpoints are those of `compiled.save` (PEFT models: of `compiled.save_adapter`), with
    the optimizer's state for any mesh and number of processes. Under torchrun every process runs one rank, loads its
    replica's share of each global batch, and keeps the optimizer state of its own parameters. Logs carry the rates of
    `compiled.metrics` beside the loss.
    balance: arguments of `csc.balanced`, {"lengths": "length"}: steps are divided by what their samples cost.
    distributed_evaluation: evaluation runs the compiled model's ranks (`compiled.eval_step`), for the loss alone: no
    process has the whole model. A batch of `per_device_eval_batch_size` is divided as one of training.
    InputError for arguments that contradict the compiled program.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        args: TrainingArguments,
        balance: Mapping[str, Any] | None = None,
        distributed_evaluation: bool = False,
        **kwargs: Any,
    ) -> None:
        if not hasattr(Trainer, "_prepare_for_training"):
            raise InputError(
                f"transformers {transformers.__version__} has another Trainer than this adapter is for",
                "CompiledTrainer", "install a newer transformers (tested: 5.23), or call train_step in a loop",
            )  # fmt: skip
        trainer_arguments.check(args, compiled.options, compiled.model, args.world_size)
        if kwargs.get("model_init") is not None:
            raise InputError(
                "model_init is set, and the model is the compiled one", "CompiledTrainer",
                "leave it out; make the model, compile it, and pass the result",
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
        if distributed_evaluation and kwargs.get("compute_metrics") is not None:
            raise InputError(
                "compute_metrics is set, and the ranks' evaluation gives the loss alone", "CompiledTrainer",
                "leave distributed_evaluation out: the eager model then evaluates what all ranks have trained",
            )  # fmt: skip
        optimizer = kwargs.get("optimizers", (None, None))[0]
        if optimizer is not None:
            _check_optimizer(optimizer, compiled)
        if args.n_gpu > 1:
            args._n_gpu = 1  # as the Trainer does for a model that is parallel itself
        super().__init__(model=compiled.model, args=trainer_arguments.taken_up(args), **kwargs)
        self._balance, self._by_ranks = balance, distributed_evaluation
        self.compiled = compiled
        self._waiting: list[Waiting] = []
        self._use_of_items: UseOfItems | None = None  # None: not looked at yet
        self._example_items = _example_items(compiled)
        self._is_whole = False  # whether each process loads whole batches
        self._refuse_own_loss()

    def _refuse_own_loss(self) -> None:
        method = self.compute_loss
        if getattr(method, "__func__", method) is not Trainer.compute_loss:
            raise InputError(
                f"{type(self).__name__} has a compute_loss of its own, which a compiled step does not call",
                "CompiledTrainer", "compute the loss in the model's forward, and compile that",
            )  # fmt: skip

    # --- a step ----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Gather the batches of one optimizer step, then run them. Returns the loss of them all; 0 before the last."""
        batch: Any = inputs
        if not isinstance(inputs, list):  # of microbatches, divided by `balanced`
            batch = self._prepare_inputs(batch)
        self._waiting.append(self._weighed(batch, num_items_in_batch))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        waiting, self._waiting = self._waiting, []
        model.train()  # evaluation may have been between
        to_training = getattr(self.optimizer, "train", None)
        if callable(to_training):  # of optimizers that evaluate with other weights
            to_training()
        self.compiled.zero_grad()
        loss = self._run(self._runs(waiting))
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return loss.to(self.args.device)

    def _weighed(self, batch: Any, items: Any) -> Waiting:
        """As the Trainer's training_step and compute_loss weigh it."""
        passed = self.model_accepts_loss_kwargs and items is not None
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        share = 1.0 if (passed if scaled is None else scaled) else 1.0 / self.current_gradient_accumulation_steps
        if passed and self._use_of_items in (None, UseOfItems.UNKNOWN) and self._example_items is None:
            self._use_of_items = self._agreed_use(batch)
            self._refuse_use(self._use_of_items)
        return Waiting(batch, share, torch.as_tensor(items) if passed else None)

    def _runs(self, waiting: list[Waiting]) -> list[list[Waiting]]:
        """What is one `train_step` each: all batches of the same items, where those make a mean over them; otherwise
        one batch. Several runs of items are left by a stream that ended in the middle of a step.
        """
        if self._example_items is None:
            adds_up = self._use_of_items in (UseOfItems.BY_ITEMS, UseOfItems.UNKNOWN)
        else:
            loss = self.compiled.trainer(check=False).program.manifest.loss
            adds_up = loss.weight == "sum" and not loss.divisors
        runs: list[list[Waiting]] = []
        for batch in waiting:
            before = runs[-1][-1] if runs else None
            if adds_up and before is not None and batch.items is not None and batch.items is before.items:
                runs[-1].append(batch)
            else:
                runs.append([batch])
        return runs

    def _run(self, runs: list[list[Waiting]]) -> torch.Tensor:
        """The loss. Gradients are kept divided by the share of the last run, and multiplied by it at the end."""
        losses, share = [], runs[0][0].share
        for run in runs:
            if run[0].share != share:
                self._scale_gradients(share / run[0].share)
                share = run[0].share
            losses.append((share, self._together(run)))
        self._scale_gradients(share)
        total = sum((share * loss.double() for share, loss in losses), torch.zeros((), dtype=torch.float64))
        return total.to(losses[0][1].dtype)

    def _together(self, waiting: list[Waiting]) -> torch.Tensor:
        batches = [self._with_items(batch) for batch in waiting]
        options, local = self.compiled.options, self._is_local
        if len(batches) == 1:
            return self.compiled.train_step(batches[0], local=local)
        replicas = 1 if local else options.mesh.dp
        ready = _microbatches(self.compiled.cut, batches, replicas, options.microbatches)
        return self.compiled.train_step(ready, options.microbatches * len(batches), local)

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        for parameter in self.compiled.parameters():
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)

    @property
    def _is_local(self) -> bool:
        return self.compiled.dp_size > 1 and not self._is_whole

    def _with_items(self, waiting: Waiting) -> Any:
        """The batch with its items, if the model was compiled for them."""
        example = self._example_items
        if example is None or waiting.items is None:
            return waiting.batch
        return {**waiting.batch, ITEMS: waiting.items.to(example).reshape(example.shape)}

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The Trainer's, which adds those of all processes up: ranks of one replica have the same."""
        items = super()._get_num_items_in_batch(batch_samples, device)
        if items is None or not self.args.average_tokens_across_devices or self.args.world_size == 1:
            return items
        return items / self._copies

    @property
    def _copies(self) -> int:
        """Processes that load the same samples."""
        return self.args.world_size // (1 if self._is_whole else self.compiled.dp_size)

    def _agreed_use(self, batch: Any) -> UseOfItems:
        use = torch.tensor([int(self._seen_use(batch))], device=self.args.device)
        return UseOfItems(int(self.accelerator.gather(use).max()))

    def _seen_use(self, batch: Mapping[str, Any]) -> UseOfItems:
        """By eager forwards of the sample with the most labels, all of them counted: with the items, with twice as
        many, and without.
        """
        model, labels = self.compiled.model, batch["labels"]
        if any(parameter.is_meta for parameter in model.parameters()):
            return UseOfItems.BY_ITEMS if self._is_known_to_divide else UseOfItems.PARTLY
        try:
            samples = self.compiled.cut(batch, len(labels))
        except InputError:  # its entries cannot be divided so far
            samples = [dict(batch)]
        sample = max(samples, key=lambda sample_batch: int(sample_batch["labels"].ne(-100).sum()))
        sample = {**sample, "labels": torch.where(sample["labels"] == -100, 0, sample["labels"])}
        with self._counting_alone():
            items = torch.as_tensor(super()._get_num_items_in_batch([sample], self.args.device))
        with evaluated(model), devices.forked(self.args.device), torch.no_grad():
            plain = _loss(model(**sample))
            losses = [_loss(model(**sample, **{ITEMS: items * many})) for many in (1, 2)]
        once, twice = (float(loss) for loss in losses)
        return _use(float(plain), once, twice, max(ROUNDING, 4 * torch.finfo(plain.dtype).eps))

    @property
    def _is_known_to_divide(self) -> bool:
        """Of a model without weights in this process, which cannot be tried out."""
        routes = getattr(getattr(self.compiled.model, "config", None), "output_router_logits", False)
        return bool(getattr(self, "_loss_shifts_labels", False)) and not routes

    def _refuse_use(self, use: UseOfItems) -> None:
        several = self.args.gradient_accumulation_steps > 1
        remedy = (
            f"compile with the items in the example: example={{**batch, '{ITEMS}': torch.tensor(labels)}}, and "
            "each step passes them as the Trainer does"
        )
        kind = type(self.compiled.model).__name__
        if use is UseOfItems.OTHERWISE:
            raise InputError(
                f"the Trainer passes {ITEMS} to {kind}.forward, whose loss is another one with it: it counts other "
                "labels than the Trainer", "CompiledTrainer", remedy,
            )  # fmt: skip
        if use is UseOfItems.PARTLY and several:
            raise InputError(
                f"the Trainer passes {ITEMS} to {kind}.forward, which divides a part of its loss by it (not a router's "
                f"loss, say), and adds up {self.args.gradient_accumulation_steps} batches", "CompiledTrainer", remedy,
            )  # fmt: skip

    @contextmanager
    def _counting_alone(self) -> Iterator[None]:
        """Within, the items are those of this process' batch, and losses are divided by these."""
        before = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's, with the rates of the last step beside the loss."""
        if "loss" in logs:
            metrics = self.compiled.metrics
            logs.update({f"step_{name}": metrics[name] for name in METRICS if name in metrics})
        super().log(logs, start_time)

    # --- data ------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Of the sampler's order, which is the same in every process, each one's share: that of its replica. Of a
        stream every process loads whole batches.
        """
        if self._balance is not None:
            return self._balanced(self._balance)
        if self.args.world_size == 1:
            return super().get_train_dataloader()
        dataset: Any = self.train_dataset
        self._is_whole = isinstance(dataset, IterableDataset)
        place, shares = (0, 1) if self._is_whole else (self.compiled.dp_rank, self.compiled.dp_size)
        order: dict[str, Any] = {}
        if not self._is_whole:
            self._check_shares(dataset, shares)
            order = {"sampler": self._get_train_sampler(), "drop_last": self.args.dataloader_drop_last}
        workers = self.args.dataloader_num_workers
        loader = DataLoader(
            dataset, batch_size=self._train_batch_size, **order, **self._loading("training"),
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=place),
        )  # fmt: skip
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return prepare_data_loader(
            loader, self.args.device, num_processes=shares, process_index=place, split_batches=shares > 1,
            even_batches=False, put_on_device=True, dispatch_batches=False, use_seedable_sampler=True, data_seed=seed,
        )  # fmt: skip

    def _loading(self, description: str) -> dict[str, Any]:
        """Arguments of a DataLoader, as the Trainer passes them."""
        names = (
            "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order",
        )  # fmt: skip
        settings = {name: f"dataloader_{name}" for name in names}
        settings_given = {
            name: getattr(self.args, argument) for name, argument in settings.items() if hasattr(self.args, argument)
        }
        return {
            **settings_given,
            "collate_fn": self._get_collator_with_removed_columns(self.data_collator, description),
        }

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """The Trainer's; to evaluate in several processes, this one's share of the batches."""
        if is_training or self.args.world_size == 1:
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        place, count = (0, 1) if self._by_ranks else (self.args.process_index, self.args.world_size)
        shares = Shares(place, count, batch_size)
        if isinstance(dataset, IterableDataset):
            loader = DataLoader(dataset, batch_size=batch_size, **self._loading(description))
        else:
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            order = sampler if sampler is not None else SequentialSampler(dataset)
            batches = BatchSampler(order, batch_size, self.args.dataloader_drop_last)
            loader = DataLoader(dataset, batch_sampler=Dealt(batches, shares), **self._loading(description))
        ready = prepare_data_loader(
            loader, self.args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False,
        )  # fmt: skip
        made = EvaluationLoader(ready, shares)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders = {**getattr(self, "_eval_dataloaders", {}), dataloader_key: made}
        return made

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of a step: the batch is the global one."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def _balanced(self, balance: Mapping[str, Any]) -> Any:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        settings = {
            "shuffle": self.args.train_sampling_strategy == "random", "seed": seed,
            "drop_last": self.args.dataloader_drop_last, "num_workers": self.args.dataloader_num_workers,
            "collate": self._get_collator_with_removed_columns(self.data_collator, description="training"),
        }  # fmt: skip
        return balanced(self.train_dataset, self.compiled, batch_size=self._train_batch_size, **{**settings, **balance})

    def floating_point_ops(self, inputs: Any) -> int:
        """The Trainer's, of each replica once; 0 of a step that is divided already."""
        return 0 if isinstance(inputs, list) else super().floating_point_ops(inputs) // self._copies

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """The Trainer's, of each replica once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(_flat(inputs) if isinstance(inputs, list) else inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._copies

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
        self._refuse_own_loss()
        self._waiting.clear()  # of a training that was cut off
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

    def _take_up(self, checkpoint: str, *parts: str) -> None:
        state, folder = self._training_state(*parts), _folder(checkpoint)
        step = chosen(state.saved.trainer.transport.meeting, lambda: find(folder), folder)
        assert step is not None
        take_up(state, step)

    def _training_state(self, *parts: str) -> State:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # without what accelerate puts around it
        return State(self.compiled.saved(None, optimizer), self.lr_scheduler, {}, parts)

    # --- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """By the eager model, with what all ranks have trained, or by the ranks (`distributed_evaluation`). The loss is
        that of one process.
        """
        if not self._by_ranks:
            self.compiled.gather()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """By the eager model, in any case."""
        self.compiled.gather()
        before, self._by_ranks = self._by_ranks, False
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._by_ranks = before

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """The Trainer's; of the ranks the loss alone."""
        if not self._by_ranks:
            return super().prediction_step(model, inputs, *args, **kwargs)
        batch = self._prepare_inputs(inputs)
        samples, options = find_batch_size(batch), self.compiled.options
        if samples is not None and samples < options.mesh.dp:
            raise InputError(
                f"a batch of evaluation has {samples} samples, and the mesh has dp={options.mesh.dp}",
                "CompiledTrainer",
                "choose per_device_eval_batch_size so that the last batch has a sample for each replica, or set "
                "dataloader_drop_last=True",
            )
        microbatches = (
            options.microbatches if samples is None else min(options.microbatches, samples // options.mesh.dp)
        )
        items = self._get_num_items_in_batch([batch], self.args.device) if self._example_items is not None else None
        whole = self._with_items(Waiting(batch, 1.0, None if items is None else torch.as_tensor(items)))
        return self.compiled.eval_step(whole, microbatches).to(self.args.device), None, None

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's. A batch's loss is divided by its own labels, not by those of the batches that other processes
        have at the time.
        """
        before = self.gather_function
        if isinstance(dataloader, EvaluationLoader):
            self.gather_function = partial(dataloader.gathered, self.accelerator, self.args.eval_use_gather_object)
        accelerator: Any = self.accelerator
        accelerator.prepare_model = _as_it_is  # accelerate's writes to the model, which was compiled without that
        try:
            with self._counting_alone():
                return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.gather_function = before
            del accelerator.prepare_model

    def compute_loss_context_manager(self) -> Any:
        """The Trainer's; in bfloat16 where that is asked for, and the model does not do it by itself."""
        contexts = ExitStack()
        contexts.enter_context(super().compute_loss_context_manager())
        if trainer_arguments.computes_in_bf16(self.args, self.compiled.model):
            contexts.enter_context(torch.autocast(self.args.device.type, torch.bfloat16))
        return contexts

    # --- optimizer -------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that the arguments name, over what trains in the compiled model."""
        if self.optimizer is None:
            kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args)
            if not isinstance(kind, type) or not arguments.keys().isdisjoint({"params", "model", "optimizer_dict"}):
                raise InputError(
                    f"optim={self.args.optim} wants the model itself", "CompiledTrainer",
                    "pass optimizers=(optimizer, scheduler) with an optimizer over compiled.parameters()",
                )  # fmt: skip
            decaying = set(self.get_decay_parameter_names(self.compiled.model))
            named = list(self.compiled.named_parameters())
            rest = [p for n, p in named if n not in decaying] if named else list(self.compiled.parameters())
            groups = [
                {"params": [p for n, p in named if n in decaying], "weight_decay": self.args.weight_decay},
                {"params": rest, "weight_decay": 0.0},
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


def _as_it_is(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return model


def _example_items(compiled: CompiledModel) -> torch.Tensor | None:
    """The items in the example that the model was compiled for, if it has them."""
    try:
        example = compiled.example
    except InputError:  # there is none: the first batch will be it
        return None
    for batch in example if isinstance(example, (list, tuple)) else [example]:
        items = batch.get(ITEMS) if isinstance(batch, Mapping) else None
        if isinstance(items, torch.Tensor):
            return items
    return None


def _loss(outputs: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def _use(plain: float, once: float, twice: float, rounding: float) -> UseOfItems:
    """Of losses without items, with the right number, and with twice as many."""
    if not all(map(math.isfinite, (plain, once, twice))) or not once:
        return UseOfItems.UNKNOWN
    if not math.isclose(plain, once, rel_tol=10 * rounding):
        return UseOfItems.OTHERWISE
    if math.isclose(once, twice, rel_tol=rounding):
        return UseOfItems.IGNORED
    return UseOfItems.BY_ITEMS if math.isclose(once, 2 * twice, rel_tol=rounding) else UseOfItems.PARTLY


def _check_optimizer(optimizer: torch.optim.Optimizer, compiled: CompiledModel) -> None:
    """InputError if it steps other parameters than those that a compiled step gives gradients to."""
    parameters = set(map(id, compiled.parameters()))
    if any(id(parameter) not in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError(
            "the optimizer has parameters that are not those of this process' ranks: they would not be trained",
            "CompiledTrainer", "make it by compiled.optimizer(torch.optim.AdamW, ...), or over compiled.parameters()",
        )  # fmt: skip


def _flat(microbatches: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Their tokens, one behind the other."""
    names = set.intersection(*(set(batch) for batch in microbatches))
    return {name: torch.cat([batch[name].flatten() for batch in microbatches]) for name in names}


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
    cut: Callable[[Any, int], list[dict[str, Any]]], batches: list[Mapping[str, Any]], replicas: int, count: int
) -> list[dict[str, Any]]:
    """Every batch cut into `count` microbatches per replica; replica after replica, as train_step wants them."""
    ready: list[list[dict[str, Any]]] = [[] for _ in range(replicas)]
    for batch in batches:
        microbatches = cut(batch, count * replicas)
        for replica, of_replica in enumerate(ready):
            of_replica += microbatches[replica * count : (replica + 1) * count]
    return [microbatch for of_replica in ready for microbatch in of_replica]


# --- A trainer as a script has made it, with a compiled model in the place of its own --------------------------------
#
# Its model, arguments, data, collator, callbacks are taken over. A compiled step calls nothing of a subclass: its loss
# has to be the model's own, as a batch shows, and methods that change a step are refused by name.

STEPS = (
    "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs",
    "get_decay_parameter_names", "get_train_dataloader", "_get_train_sampler", "_prepare_inputs", "training_step",
)  # fmt: skip
WITHOUT_NUMBERS = {"training_step": "trl"}  # methods that a library's trainers have for memory alone


def compiled_trainer(
    trainer: Trainer, balance: Mapping[str, Any] | None = None, distributed_evaluation: bool = False, **options: Any
) -> CompiledTrainer:
    """A trainer as it was made, with its model compiled: `compiled_trainer(SFTTrainer(...), mesh="pp=2").train()`.

    Args:
        trainer: transformers' Trainer, or one derived from it whose loss is the one that its model returns (TRL's
            SFTTrainer with `loss_type="nll"`). It is not to be used afterwards.
        balance, distributed_evaluation: of `CompiledTrainer`.
        options: of `csc.compile`; `example` is a batch of the first samples if it is not given.

    Returns: the trainer to train with.
    Raises:
        InputError: The trainer's loss on the example is not the model's; or it has methods of its own in a step.
    """
    _refuse_own_methods(trainer)
    example = options.pop("example", None)
    if example is None:
        samples: Any = trainer.train_dataset  # the first ones: in all processes the same
        rows = list(islice(samples, trainer.args.per_device_train_batch_size))
        collator: Any = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
        example = trainer._prepare_inputs(collator(rows))
    _check_own_loss(trainer, example)
    model: Any = trainer.model
    compiled = compile_for(model, trainer.args, example=example, **options)
    compiled_one = CompiledTrainer(
        compiled, trainer.args, balance, distributed_evaluation, train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset, data_collator=trainer.data_collator,
        processing_class=trainer.processing_class, compute_metrics=trainer.compute_metrics,
        preprocess_logits_for_metrics=trainer.preprocess_logits_for_metrics,
        optimizers=(trainer.optimizer, trainer.lr_scheduler), optimizer_cls_and_kwargs=trainer.optimizer_cls_and_kwargs,
    )  # fmt: skip
    known = {type(callback) for callback in compiled_one.callback_handler.callbacks}
    for callback in trainer.callback_handler.callbacks:
        if type(callback) not in known:
            compiled_one.add_callback(callback)
    if trainer.args.gradient_accumulation_steps > 1 and (
        compiled_one.model_accepts_loss_kwargs != trainer.model_accepts_loss_kwargs
    ):
        raise InputError(
            f"{type(trainer).__name__} weighs the batches of gradient_accumulation_steps otherwise than the Trainer "
            f"does for {type(trainer.model).__name__}", "compiled_trainer",
            "leave it out; compile with as many microbatches, and take a larger batch",
        )  # fmt: skip
    return compiled_one


def _refuse_own_methods(trainer: Trainer) -> None:
    for name in STEPS:
        for kind in type(trainer).__mro__[: type(trainer).__mro__.index(Trainer)]:
            library = kind.__module__.partition(".")[0]
            if name in vars(kind) and WITHOUT_NUMBERS.get(name) != library:
                raise InputError(
                    f"{kind.__name__} has a {name} of its own, which a compiled step does not call",
                    "compiled_trainer",
                    "compile the model with compile_for, and write the method in a class derived from CompiledTrainer",
                )
    if trainer.compute_loss_func is not None:
        raise InputError(
            "compute_loss_func is set, and the loss is part of the compiled program", "compiled_trainer",
            "compute the loss in the model's forward",
        )  # fmt: skip


def _check_own_loss(trainer: Trainer, example: Any) -> None:
    """InputError if a subclass computes another loss than the model, as eager PyTorch shows on the example."""
    if type(trainer).compute_loss is Trainer.compute_loss:
        return
    model: Any = trainer.model
    losses = []
    with evaluated(model), devices.forked(trainer.args.device), torch.no_grad():
        for loss_of in (lambda batch: trainer.compute_loss(model, batch), lambda batch: _loss(model(**batch))):
            loss: Any = loss_of(dict(example))
            losses.append(float(loss))
    rounding = max([ROUNDING, *(torch.finfo(p.dtype).eps for p in model.parameters() if p.dtype.is_floating_point)])
    if not math.isclose(*losses, rel_tol=10 * rounding):
        raise InputError(
            f"{type(trainer).__name__}'s loss of the example is {losses[0]:.6g}, and its model's own {losses[1]:.6g}",
            "compiled_trainer",
            "compute the trainer's loss in a module's forward, and give that compiled to CompiledTrainer with the "
            "trainer's data and collator; examples/dpo.py does so",
        )
