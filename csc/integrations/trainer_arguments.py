"""What a compiled model makes of each field of transformers' TrainingArguments.

A field is *done* (the Trainer's own code does it, or the adapter does the same), *mapped* (it has a meaning that fits a
compiled model), *without effect* (what it tunes is not there; no number changes), or *refused* by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from types import MethodType
from typing import Any, NoReturn

import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from csc.capture.module_tree import embedding_of
from csc.errors import InputError
from csc.ir.program import Options

DONE, MAPPED, NO_EFFECT, REFUSED = "done", "mapped", "without effect", "refused"


@dataclass(frozen=True)
class Argument:
    """kind: what happens. why: one line; of a refused one, what to do in its place."""

    kind: str
    why: str


def _all(kind: str, why: str, *names: str) -> dict[str, Argument]:
    return {name: Argument(kind, why) for name in names}


_COMPILE_FOR = "compile it with csc.integrations.hf.compile_for(model, args, ...)"
_COMPILED = "decided when the model is compiled; leave it out"
FIELDS: Mapping[str, Argument] = {
    # batches and steps
    "per_device_train_batch_size": Argument(MAPPED, "the global batch that one `train_step` divides, on any mesh"),
    **_all(DONE, "the Trainer's loop", "num_train_epochs", "max_steps"),
    "gradient_accumulation_steps": Argument(MAPPED, "batches of one step, weighed as the Trainer weighs them"),
    "average_tokens_across_devices": Argument(
        MAPPED, "True: a mean over all replicas; False is refused with dp > 1, where each would have a mean of its own"
    ),
    "max_grad_norm": Argument(DONE, "over all ranks, as over one process; 0: none"),
    "label_smoothing_factor": Argument(REFUSED, "compute it in the model's forward, and compile that"),
    "auto_find_batch_size": Argument(
        REFUSED, "choose the batch before: `csc plan` says what fits, and a failed step is not tried again"
    ),
    # optimizer and schedule
    **_all(DONE, "the optimizer's", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    "weight_decay": Argument(DONE, "in the Trainer's two groups of parameters, of this process' ranks"),
    "optim": Argument(MAPPED, "any that works entry by entry; GaLore, Apollo and LOMO want the model and are refused"),
    "optim_target_modules": Argument(REFUSED, "for GaLore and Apollo, which want the whole model"),
    **_all(DONE, "the Trainer's schedule", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    # how the model computes
    "bf16": Argument(
        MAPPED, "`compile_for` puts autocast around forward, as the Trainer does; or compile with `precision='bf16'`"
    ),
    "fp16": Argument(REFUSED, "there is no loss scale; use bf16=True"),
    **_all(
        REFUSED, "it would convert the parameters that train; evaluate a copy", "bf16_full_eval", "fp16_full_eval"
    ),
    "tf32": Argument(DONE, "torch's own switch, set before"),
    **_all(
        MAPPED, "`compile_for` compiles with `recompute='full'`; or compile with another `recompute=`",
        "activation_checkpointing", "gradient_checkpointing",
    ),
    **_all(
        NO_EFFECT, "of torch's checkpoints; the program recomputes in its backward by itself",
        "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs",
    ),
    **_all(
        REFUSED, "csc compiles the step; leave it out, and compile with `fuse=True` for Inductor's kernels",
        "torch_compile", "torch_compile_backend", "torch_compile_mode"
    ),
    **_all(
        REFUSED, "it changes the model after it was compiled; apply it to the model before",
        "use_liger_kernel", "liger_kernel_config",
    ),
    "neftune_noise_alpha": Argument(MAPPED, "`compile_for` adds the noise to embeddings before it compiles"),
    "use_cache": Argument(DONE, "goes to the model's config, for evaluation"),
    "torch_empty_cache_steps": Argument(DONE, "after the step in place of before its backward"),
    # parallelism
    **_all(REFUSED, f"parallelism is {_COMPILED} (`mesh=`, `zero=`)", "fsdp", "deepspeed", "parallelism_config"),
    "fsdp_config": Argument(NO_EFFECT, "the Trainer reads it with `fsdp` alone"),
    **_all(
        NO_EFFECT, "there is no DistributedDataParallel: the program reduces gradients",
        "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
    ),
    **_all(DONE, "of the process group, if it is not there yet", "ddp_backend", "ddp_timeout"),
    "local_rank": Argument(NO_EFFECT, "torchrun says it"),
    "use_cpu": Argument(DONE, "the device is also what the model is compiled for"),
    "accelerator_config": Argument(MAPPED, "see below, field by field"),
    # logs
    **_all(
        DONE, "the Trainer's",
        "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "log_level",
        "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
        "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics",
    ),
    "logging_nan_inf_filter": Argument(MAPPED, "of evaluation; a training loss that is not finite is an error"),
    "include_num_input_tokens_seen": Argument(DONE, "each replica's tokens count once, however many ranks it has"),
    # evaluation: the eager model, with what all ranks have trained
    **_all(
        DONE, "the Trainer's, with the eager model",
        "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "prediction_loss_only",
        "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
        "batch_eval_metrics", "label_names",
    ),
    "per_device_eval_batch_size": Argument(
        DONE, "several processes share the batches, and give what one process gives, to the last one"
    ),
    # checkpoints
    **_all(
        DONE, "the Trainer's, with `compiled.save`",
        "output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "load_best_model_at_end",
        "metric_for_best_model", "greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint",
    ),
    "save_on_each_node": Argument(
        MAPPED, "one process: no difference; several: refused, since all ranks write parts of one checkpoint"
    ),
    "enable_jit_checkpoint": Argument(
        MAPPED, "one process: the Trainer's; several: refused, since a signal reaches ranks at different steps"
    ),
    "resume_from_checkpoint": Argument(DONE, "read by scripts: `train(resume_from_checkpoint=...)` is what resumes"),
    **_all(
        DONE, "the Trainer's: it uploads what is in the output directory",
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
    ),
    # seeds and data
    "seed": Argument(DONE, "the Trainer's; dropout's masks are those of the compiled program"),
    **_all(DONE, "the Trainer's", "full_determinism", "remove_unused_columns", "length_column_name"),
    "data_seed": Argument(DONE, "the order is that of one process, on any number of them"),
    **_all(
        DONE, "the data loader's, in every process",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
    ),
    "dataloader_drop_last": Argument(DONE, "with dp needed where the last batch leaves a replica without samples"),
    "train_sampling_strategy": Argument(
        MAPPED, "the Trainer's; `batch_rebalance` on several processes is refused: `balance=` divides by cost"
    ),
    # scripts
    **_all(DONE, "read by scripts, not by the Trainer", "do_train", "do_eval", "do_predict"),
    "debug": Argument(REFUSED, "it hooks the eager model's layers, which a compiled step does not run"),
}  # fmt: skip
ACCELERATOR: Mapping[str, Argument] = {
    "split_batches": Argument(MAPPED, "what csc does in any case: the batch is global"),
    "dispatch_batches": Argument(MAPPED, "one process: accelerate's; several: refused, each loads its own share"),
    "even_batches": Argument(NO_EFFECT, "no sample is repeated to fill a batch, on any number of processes"),
    "use_seedable_sampler": Argument(MAPPED, "several processes: False is refused, orders would differ"),
    "non_blocking": Argument(DONE, "accelerate's"),
    "gradient_accumulation_kwargs": Argument(
        MAPPED, "`num_steps` is `gradient_accumulation_steps`; `sync_each_batch` changes no number"
    ),
    "use_configured_state": Argument(DONE, "accelerate's"),
}  # fmt: skip
_WHOLE_MODEL = ("galore", "apollo", "lomo", "adalomo")  # optimizers


def table(arguments: Mapping[str, Argument]) -> str:
    """In Markdown, a row for each argument."""
    rows = (f"| `{name}` | {argument.kind} | {argument.why} |\n" for name, argument in arguments.items())
    return "| argument | | |\n| --- | --- | --- |\n" + "".join(rows)


def check(args: TrainingArguments, options: Options, model: nn.Module, processes: int) -> None:
    """InputError if an argument is refused, or is one that nobody has looked at, and says other than its default; or if
    the compiled model does not do what it says.
    """
    plain: list[TrainingArguments] = []

    def is_set(field: Field[Any]) -> bool:
        value = getattr(args, field.name)
        if value == (field.default if field.default_factory is MISSING else field.default_factory()):
            return False
        if not plain:  # what __post_init__ makes of defaults
            plain.append(TrainingArguments(args.output_dir, report_to="none", use_cpu=args.use_cpu))
        return bool(value != getattr(plain[0], field.name))

    for field in fields(TrainingArguments):
        known = FIELDS.get(field.name)
        if known is None and is_set(field):
            _refuse(
                f"{field.name} is set, an argument of transformers {transformers.__version__} that csc does not know",
                "leave it out, or train in a loop of your own with compiled.train_step",
            )
        if known is not None and known.kind == REFUSED and getattr(args, field.name) and is_set(field):
            _refuse(f"{field.name} is set, which the compiled program knows nothing of", known.why)
    for name, value in _accelerator(args).to_dict().items():
        if name not in ACCELERATOR and value != getattr(AcceleratorConfig(), name, None):
            _refuse(f"accelerator_config has {name}, which csc does not know", "leave it out")
    _check_compiled(args, options, model)
    _check_combinations(args, options, processes)


def _check_compiled(args: TrainingArguments, options: Options, model: nn.Module) -> None:
    """What was decided when the model was compiled."""
    if _precision(args) not in ("no", "bf16"):
        _refuse(f"mixed_precision is {_precision(args)}", "use bf16=True: there is no loss scale")
    if _precision(args) == "bf16" and options.precision != "bf16" and not _computes_in_autocast(model):
        _refuse(
            "bf16 is set, and the compiled model computes in the dtypes of its parameters",
            f"{_COMPILE_FOR}, or with precision='bf16'; leave bf16 out for a model in bfloat16 that is to compute so "
            "throughout",
        )
    if _recomputes(args) and all(choice == "none" for _, choice in options.recompute):
        _refuse(
            "gradient_checkpointing is set, and the model was compiled without recompute=",
            f"{_COMPILE_FOR}, or with recompute='selective' or 'full'",
        )
    if _noise(args) != getattr(_embedding(model), NOISE, None):
        _refuse(
            f"neftune_noise_alpha is {args.neftune_noise_alpha}, and the compiled model's embeddings have "
            f"{getattr(_embedding(model), NOISE, 'no')} noise",
            _COMPILE_FOR,
        )


def _check_combinations(args: TrainingArguments, options: Options, processes: int) -> None:
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.startswith(_WHOLE_MODEL):
        _refuse(
            f"optim={optimizer} wants the model itself",
            "pass optimizers=(optimizer, scheduler) with an optimizer over compiled.parameters()",
        )
    if not args.average_tokens_across_devices and options.mesh.dp > 1:
        _refuse(
            f"average_tokens_across_devices is False, and the mesh has dp={options.mesh.dp}: each replica would have a "
            "mean of its own",
            "leave it out: a step is the mean over the labels of all replicas",
        )
    if processes == 1:
        return
    several = {
        "save_on_each_node": "all ranks write parts of one checkpoint; give them a directory that they share",
        "enable_jit_checkpoint": "a signal reaches ranks at different steps; save with save_strategy='steps'",
    }
    for name, remedy in several.items():
        if getattr(args, name, False):
            _refuse(f"{name} is set, with {processes} processes", remedy)
    if str(getattr(args, "train_sampling_strategy", "")) == "batch_rebalance":
        _refuse(
            f"train_sampling_strategy is batch_rebalance, with {processes} processes: it divides among processes, not "
            "replicas", "pass balance={'lengths': ...}, which divides steps by what their samples cost",
        )  # fmt: skip
    if _accelerator(args).dispatch_batches:
        _refuse("accelerator_config has dispatch_batches", "leave it out: each process loads its replica's share")
    if not _accelerator(args).use_seedable_sampler:
        _refuse(
            "accelerator_config has use_seedable_sampler=False, and the order would differ between processes",
            "leave it out",
        )


# --- What the Trainer does to a model before it trains, done before it is compiled -----------------------------------

NOISE = "neftune_noise_alpha"  # attribute of the embedding, as transformers calls it


def apply(args: TrainingArguments, model: nn.Module, precision: str | None) -> dict[str, Any]:
    """Put on the model what the arguments ask for; the options of csc.compile that they ask for.

    Args:
        precision: csc.compile's own; with "bf16" no autocast is put around the model.
    """
    if _precision(args) == "bf16" and precision != "bf16" and not _computes_in_autocast(model):
        _put_in_autocast(model)
    alpha, embedding = _noise(args), _embedding(model)
    if alpha is not None:
        if embedding is None:
            _refuse(
                f"neftune_noise_alpha is {alpha}, and {type(model).__name__} has no get_input_embeddings",
                "leave it out, or add the noise in the model's forward",
            )
        if getattr(embedding, NOISE, None) is None:
            embedding.register_forward_hook(_noisy)
        setattr(embedding, NOISE, alpha)
    return {"recompute": "full"} if _recomputes(args) else {}


def taken_up(args: TrainingArguments) -> TrainingArguments:
    """For the Trainer, which would write to the model that was compiled."""
    rest = copy(args)
    rest.activation_checkpointing = rest.gradient_checkpointing = False
    rest.neftune_noise_alpha = None
    return rest


def computes_in_bf16(args: TrainingArguments, model: nn.Module) -> bool:
    """Whether evaluation has to put autocast around the model, as the Trainer does."""
    return _precision(args) == "bf16" and not _computes_in_autocast(model)


def _precision(args: TrainingArguments) -> str:
    """As accelerate's launcher may say it, too."""
    return "bf16" if args.bf16 else str(getattr(args, "mixed_precision", "no") or "no")


def _recomputes(args: TrainingArguments) -> bool:
    return bool(args.gradient_checkpointing or getattr(args, "activation_checkpointing", False))


def _noise(args: TrainingArguments) -> float | None:
    return args.neftune_noise_alpha


def _embedding(model: nn.Module) -> Any:
    """None: the model does not say."""
    base: Any = model.base_model.model if hasattr(model, "peft_config") else model  # type: ignore[union-attr]
    return embedding_of(base, "input")


def _noisy(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
    """NEFTune's, drawn as transformers draws it, without a bound that has to be read from a tensor."""
    if not module.training:
        return output
    bound = module.neftune_noise_alpha / math.sqrt(output.size(1) * output.size(2))
    return output + (2 * torch.rand_like(output) - 1) * bound


def _computes_in_autocast(model: nn.Module) -> bool:
    """Whether accelerate has put autocast around forward, or `_put_in_autocast`."""
    return "_original_forward" in vars(model)


def _put_in_autocast(model: Any) -> None:
    """As accelerate's `prepare`, which then leaves the model as it is."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    forward = getattr(model.forward, "__func__", None)
    model._original_forward = model.forward
    if forward is None:  # put in the model's place by a function
        model.forward = convert_outputs_to_fp32(torch.autocast(device, torch.bfloat16)(model.forward))
    else:
        model.forward = MethodType(convert_outputs_to_fp32(torch.autocast(device, torch.bfloat16)(forward)), model)
    model._is_accelerate_prepared = True


def _accelerator(args: TrainingArguments) -> AcceleratorConfig:
    config: Any = args.accelerator_config  # made one by __post_init__
    return config if isinstance(config, AcceleratorConfig) else AcceleratorConfig()


def _refuse(fault: str, remedy: str) -> NoReturn:
    raise InputError(fault, "CompiledTrainer", remedy)
