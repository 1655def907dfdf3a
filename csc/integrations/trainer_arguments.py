"""What a compiled model makes of each field of transformers' TrainingArguments.

A field is *done* (the Trainer's own code does it, or the adapter does the same), *mapped* (it has a meaning that fits a
compiled model), *without effect* (what it tunes is not there; no number changes), or *refused* by name.

    FIELDS, ACCELERATOR            one line for each field of TrainingArguments, and of its accelerator_config
    table(arguments) -> text       of docs/trainer-arguments.md
    check(args, mesh, processes)   InputError for what is refused, and for a field that nobody has looked at
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, NoReturn

import transformers
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from csc.errors import InputError
from csc.ir.mesh import Mesh

DONE, MAPPED, NO_EFFECT, REFUSED = "done", "mapped", "without effect", "refused"


@dataclass(frozen=True)
class Argument:
    """kind: what happens. why: one line; of a refused one, what to do in its place."""

    kind: str
    why: str


def _all(kind: str, why: str, *names: str) -> dict[str, Argument]:
    return {name: Argument(kind, why) for name in names}


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
    **_all(
        REFUSED, f"dtypes are {_COMPILED}: load the model in bfloat16, or compile with `precision=`", "fp16", "bf16"
    ),
    **_all(
        REFUSED, "it would convert the parameters that train; evaluate a copy", "bf16_full_eval", "fp16_full_eval"
    ),
    "tf32": Argument(DONE, "torch's own switch, set before"),
    **_all(
        REFUSED, f"recomputation is {_COMPILED} (`recompute=`)",
        "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    ),
    **_all(
        REFUSED, "csc compiles the step; leave it out", "torch_compile", "torch_compile_backend", "torch_compile_mode"
    ),
    **_all(
        REFUSED, "it changes the model after it was compiled; apply it to the model before",
        "use_liger_kernel", "liger_kernel_config",
    ),
    "neftune_noise_alpha": Argument(
        REFUSED, "it hooks the embedding after the model was compiled; add the noise in the model's forward"
    ),
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
    rows = (f"| `{name}` | {one.kind} | {one.why} |\n" for name, one in arguments.items())
    return "| argument | | |\n| --- | --- | --- |\n" + "".join(rows)


def check(args: TrainingArguments, mesh: Mesh, processes: int) -> None:
    """InputError if an argument is refused, or is one that nobody has looked at, and says other than its default."""
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
    _check_combinations(args, mesh, processes)


def _check_combinations(args: TrainingArguments, mesh: Mesh, processes: int) -> None:
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.startswith(_WHOLE_MODEL):
        _refuse(
            f"optim={optimizer} wants the model itself",
            "pass optimizers=(optimizer, scheduler) with an optimizer over compiled.parameters()",
        )
    if not args.average_tokens_across_devices and mesh.dp > 1:
        _refuse(
            f"average_tokens_across_devices is False, and the mesh has dp={mesh.dp}: each replica would have a mean of "
            "its own",
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


def _accelerator(args: TrainingArguments) -> AcceleratorConfig:
    config: Any = args.accelerator_config  # made one by __post_init__
    return config if isinstance(config, AcceleratorConfig) else AcceleratorConfig()


def _refuse(what: str, remedy: str) -> NoReturn:
    raise InputError(what, "CompiledTrainer", remedy)
