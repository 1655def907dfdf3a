"""The options of a compilation, from what users write.

Accepted forms: mesh as of csc.Mesh.of; freeze and cuts a name or a list of names; stages a list of names or of lists
of names; hardware and memory one for all pipeline ranks, or a list with one for each, or that as a text with commas;
memory in bytes or as "40GB" or "40GiB"; recompute a choice for all regions, or a mapping from patterns over
regions to choices or lists of values (see csc.passes.recompute); context a mapping from components to numbers of ranks;
passes a line, or a sequence of passes, whose fields are the options of these names (csc.passes.pipeline).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from csc.driver.user_files import load_named
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Choice, Options
from csc.passes import pipeline

UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)} | {
    f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)
}  # fmt: skip

OTHERS = (
    "example",
    "directory",
    "cache",
    "check",
    "timeout",
    "divide",
    "cache_features",
    "encode_ahead",
    "widths",
)  # of csc.compile, which are no fields
LEVELS = (0, 1, 2, 3)  # of what data-parallel ranks divide
CHOICES = ("none", "selective", "elementwise", "full", "auto")
SHORT = 60  # characters of a value that a sentence names
BF16 = "precision='bf16', which computes in bfloat16 with the model's parameters as master weights"
AXES = "mesh=csc.Mesh(dp=2, pp=2), with axes dp, pp, cp and tp"
NONE = "none: "  # csc has no such option
OTHERS_SAY = {  # by names, how other libraries call what csc has under another name, and what that is
    "output output_dir out": "directory=, where the program is written",
    "dtype torch_dtype bf16 amp mixed_precision autocast bf16_full_eval": BF16,
    "fp16 half fp8 grad_scaler loss_scale": f"{BF16}: there is no fp16, and so no loss scale",
    "device device_map device_ids local_rank": "none: put the model on its device before csc.compile",
    (
        "gradient_accumulation_steps accumulate_grad_batches grad_accum gradient_accumulation "
        "num_microbatches n_microbatches micro_batches chunks_per_batch"
    ): "microbatches=, of which a step adds up the gradients",
    "batch_size micro_batch_size per_device_train_batch_size train_batch_size": "none: the loader says how "
    "many samples a batch has, and microbatches= into how many parts it is divided",
    "gradient_checkpointing activation_checkpointing ac remat": "recompute='selective' or 'full'",
    "fsdp fsdp2 ddp strategy deepspeed zero_stage sharding_strategy parallelize_plan": "mesh='dp=2,pp=2', and "
    "zero=1, 2 or 3 for what dp ranks divide",
    (
        "dp pp cp tp ep dp_size pp_size cp_size tp_size num_stages world_size ranks tensor_parallel "
        "pipeline_parallel data_parallel context_parallel device_mesh parallelism"
    ): AXES,
    "backend mode fullgraph options": "fuse=True for Inductor, cuda_graphs=True for what mode='reduce-overhead' does",
    "dynamic": "none: each size of microbatches is compiled from one trace",
    "loss loss_fn criterion compute_loss": "none: the model's forward returns the loss",
    "optimizer lr learning_rate weight_decay": "none: compiled.optimizer(torch.optim.AdamW, lr=1e-4) makes "
    "the optimizer",
    "max_grad_norm gradient_clip_val clip": "none: compiled.clip_grad_norm_(max_norm) comes after train_step",
    "trainable frozen freeze_modules requires_grad train_only": "freeze=['vision_tower'], what is frozen",
    "example_inputs sample_inputs inputs batch args kwargs": "example=, a batch of the loader",
    "pad_to_multiple_of max_length max_seq_len bucket_sizes buckets": "widths=, to which microbatches are padded",
    "max_memory memory_limit": "memory='40GB', for each rank",
    "cpu_offload offload": "none: there is no offload here; recompute= and zero= take less memory",
    "split_points split_spec partition": "cuts=, or stages=",
    "pipeline_schedule schedule_name": "schedule=",
    "use_cache cache_dir": "cache=, True or False; CSC_CACHE_DIR says where",
    "verify validate": "check=",
}


def changed(options: Options, **changes: Any) -> Options:
    """The options with these changes, checked. None is what each field's own default means."""
    unknown = changes.keys() - READERS.keys()
    if unknown:
        raise InputError(f"there is no option {', '.join(sorted(unknown))}", "options", _instead(sorted(unknown)))
    read = {
        name: getattr(Options(), name) if value is None else READERS[name](name, value)
        for name, value in changes.items()
    }
    if read.get("passes") is not None:
        read |= _of_passes(read, {name for name, value in changes.items() if value is not None})
    found = replace(options, **read)
    _check_ranks(found)
    _check_stages(found)
    if found.passes is not None:
        pipeline.check(found)
    return found


def _of_passes(read: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The passes, and what they say of options as these. given: the options that are given beside them."""
    by_passes = pipeline.said_of_options(read["passes"])
    for name, value in by_passes.items():
        by_passes[name] = READERS[name](name, value)
        if name in given and read[name] != by_passes[name]:
            raise InputError(
                f"{name} is given twice: as an option {shown(read[name])}, and by pass {pipeline.OWNERS[name]} "
                f"{shown(by_passes[name])}", "passes", "give it once",
            )  # fmt: skip
    return {**by_passes, "passes": pipeline.plain(read["passes"])}


def closed(options: Options) -> Options:
    """The options, whose mesh is no open one. InputError: it is, and the model has a mesh already."""
    mesh = options.mesh
    if mesh.is_open:
        raise InputError(
            f"{mesh} is a mesh that csc has to choose, and this model has one", "mesh",
            f"csc.compile(compiled.model, mesh=csc.Mesh({mesh}), example=batch) chooses; so does "
            f"`csc plan --devices {mesh.size}`",
        )  # fmt: skip
    return options


def _instead(names: Sequence[str]) -> str:
    """What to write for options that there are not."""
    if all(name in OTHERS for name in names):
        return "give it to csc.compile" if len(names) == 1 else "give them to csc.compile"
    hints = [hint if len(names) == 1 else f"{name}: {hint}" for name in names if (hint := _nearest(name))]
    listed = f"Options are {', '.join(READERS)}; of csc.compile also {', '.join(OTHERS)}"
    return " ".join([*(f"{hint}{'' if hint.endswith('?') else '.'}" for hint in hints), listed])


def _nearest(name: str) -> str:
    """What csc calls an option of another library, or one that is misspelt; "" for others."""
    if name in OTHERS:
        return "Give it to csc.compile"
    remedy = next((remedy for names, remedy in OTHERS_SAY.items() if name.lower() in names.split()), None)
    if remedy is not None and remedy.startswith(NONE):
        return remedy.removeprefix(NONE)[0].upper() + remedy.removeprefix(NONE)[1:]
    if remedy is not None:
        return f"Use {remedy}"
    close = difflib.get_close_matches(name, [*READERS, *OTHERS], n=1)
    return f"did you mean {close[0]}?" if close else ""


def _check_ranks(options: Options) -> None:
    """InputError where something is said of each pipeline rank, and there are more or fewer."""
    for name in ("hardware", "memory"):
        value = getattr(options, name)
        if isinstance(value, tuple) and len(value) != options.mesh.pp and not options.mesh.is_open:
            raise InputError(
                f"{name} is given for {len(value)} pipeline ranks, and the mesh has pp={options.mesh.pp}", name,
                "give one for each pipeline rank, or one for all",
            )  # fmt: skip


def _check_stages(options: Options) -> None:
    """InputError if the mesh says which stages are whose, and an option says what they hold."""
    stage_options = {
        "stages": options.stages,
        "cuts": options.cuts,
        "placement": options.placement,
        "chunks": options.chunks,
    }
    twice = next((name for name, value in stage_options.items() if value not in (None, 1)), None)
    if options.mesh.own("pp") and twice is not None:
        raise InputError(
            f"{options.mesh} gives components pipeline stages of their own, and {twice} says what stages hold too",
            twice, "give one of the two",
        )  # fmt: skip


def _each(option: str, value: Any, read: Callable[[str, Any], Any]) -> Any:
    """What holds for all pipeline ranks, or a tuple with an entry for each."""
    if isinstance(value, str) and "," in value:
        value = [item.strip() for item in value.split(",")]
    if not isinstance(value, (list, tuple)):
        return read(option, value)
    if not value or "" in value:
        raise InputError(f"{option} is {value!r}", "compile", "give one for each pipeline rank")
    return tuple(read(option, item) for item in value)


def of_fewer(options: Options) -> Options:
    """Those of the program with which ranks with mirrors go on that have lost one: a pipeline of a rank fewer, or
    several, as short as they can be and no shorter than before, since each holds the model; with zero=3 a replica
    fewer. csc plans the stages, and the microbatches of a step are shared out anew. InputError: they cannot be.
    """
    mesh, count = options.mesh, options.microbatches
    total, ranks = mesh.dp * count, mesh.size - 1
    if mesh.pp == 1:
        mesh = replace(mesh, dp=ranks)
        if total % ranks:
            raise InputError(
                f"{total} microbatches of a step cannot be shared out evenly among the {ranks} ranks that are left "
                "when one is lost", "compile", f"use microbatches={-(-count // ranks) * ranks}",
            )  # fmt: skip
    else:
        depths = (pp for pp in range(min(mesh.pp, ranks), ranks + 1) if not (ranks % pp or total % (ranks // pp)))
        pp = next(depths)  # one pipeline of all, if nothing else
        mesh = replace(mesh, dp=ranks // pp, pp=pp)
    count = total // mesh.dp
    return replace(
        options, mesh=mesh, microbatches=count, cuts=None, stages=None, placement=None, chunks=None, schedule="auto"
    )  # fmt: skip


def refuse_beside_survive(options: Options, features: bool = False, mirror: bool = False) -> None:
    """InputError for options with which a rank cannot be lost. features: some come before a step. mirror: ranks
    go on as fewer.
    """
    shards = "all replicas meet in each stage, and none finishes alone; a lost rank's shards are nowhere else"
    of_each = any(isinstance(given, tuple) for given in (options.hardware, options.memory))
    fewer = "the others go on as a mesh of a rank fewer"
    refused = {
        f"zero={options.zero}": (
            options.zero >= 3 and not mirror, shards,
            "use zero=2, whose shards several replicas have; or csc.Survive(1, mirror=True)",
        ),
        "fuse=True": (options.fuse, "ranks meet while functions are compiled", ""),
        "cuda_graphs=True": (options.cuda_graphs, "what was recorded is for the ranks of the start", ""),
        "encode_ahead or cache_features": (features, "a rank has features that others lack", ""),
        "hardware= or memory= for each rank": (
            mirror and of_each, f"{fewer}, and which one is lost is not known before", "give one for all ranks",
        ),
        "passes=": (mirror and options.passes is not None, f"they say how the model is cut, and {fewer}", ""),
        f"mesh=csc.Mesh({options.mesh})": (
            mirror and options.mesh.is_open, "mirror=True is for pipelines", f"use mesh='pp={options.mesh.size}'",
        ),
    }  # fmt: skip
    for option, (is_on, why, instead) in refused.items():
        if is_on:
            raise InputError(
                f"with {option} a rank cannot be lost: {why}", "compile",
                f"{instead or f'leave {option} out'}; or leave survive= out",
            )  # fmt: skip


def shown(value: object) -> str:
    """A value as a sentence names it: in a line, and not a long one."""
    text = repr(value)
    return text if len(text) <= SHORT and "\n" not in text else f"a {type(value).__name__}"


def _listed(option: str, value: Any) -> list[Any]:
    """What is given one by one, but for texts. InputError for what cannot be looked through, a module too."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InputError(f"{option} is {shown(value)}", "compile", "pass a list")
    return list(value)


def _names(option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else _listed(option, value)
    for item in listed:
        if not isinstance(item, str) or not item:
            raise InputError(
                f"{option} holds {shown(item)}, which is no name", "compile",
                "pass names as a list of strings: `csc explain` lists components and regions",
            )  # fmt: skip
    return tuple(listed)


def _stages(option: str, value: Sequence[str | Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    if isinstance(value, str):
        raise InputError(f"{option} is the text {value!r}", "compile", "pass a list with an entry for each stage")
    return tuple(_names(option, stage) for stage in _listed(option, value))


def _placement(option: str, value: Sequence[int]) -> tuple[int, ...]:
    listed = _listed(option, value)
    if not all(isinstance(rank, int) and rank >= 0 for rank in listed):
        raise InputError(f"{option} is {shown(value)}", "compile", "pass the pipeline rank of each stage")
    return tuple(listed)


def _positive(option: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{option} is {value!r}", "compile", "pass a whole number of at least 1")
    return value


def _chunk(option: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{option} is {value!r}", "compile", "pass the tokens of a chunk, or 0 for whole logits")
    return value


def _bytes(option: str, value: int | str) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value)
        if match is None or match[2] not in UNITS:
            raise InputError(f"{option} is {value!r}", "compile", "write bytes, or a size such as 40GB or 40GiB")
        value = int(float(match[1]) * UNITS[match[2]])
    return _positive(option, value)


def _recompute(option: str, value: str | Mapping[str, Any] | Sequence[Any]) -> tuple[tuple[str, Choice], ...]:
    if isinstance(value, str):
        value = {"*": value}
    if not isinstance(value, (Mapping, list, tuple)):
        raise InputError(f"{option} is {shown(value)}", "compile", f"use one of {', '.join(CHOICES)}")
    pairs = list(value.items()) if isinstance(value, Mapping) else [tuple(pair) for pair in value]
    read: list[tuple[str, Choice]] = []
    for pattern, choice in pairs:
        if isinstance(choice, str) and choice not in CHOICES:
            raise InputError(f"{option} is {choice!r}", "compile", f"use one of {', '.join(CHOICES)}")
        if not isinstance(pattern, str) or not isinstance(choice, (str, list, tuple)):
            raise InputError(
                f"{option} holds {pattern!r}: {choice!r}", "compile",
                "map names or globs of regions to a choice, or to a list of values to keep",
            )  # fmt: skip
        read.append((pattern, choice if isinstance(choice, str) else _names(option, choice) if choice else ()))
    return tuple(read)


def _precision(option: str, value: str) -> str:
    if value not in ("model", "bf16"):
        raise InputError(f"{option} is {value!r}", "compile", "use 'bf16', or 'model' for that of the parameters")
    return value


def _loss_weight(option: str, value: str) -> str:
    if value not in ("auto", "tokens", "mean", "sum"):
        raise InputError(f"{option} is {value!r}", "compile", "use 'auto', 'tokens', 'mean' or 'sum'")
    return value


def _context(option: str, value: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, Mapping):
        raise InputError(f"{option} is {value!r}", "compile", "map components to ranks, as {'vision_tower': 2}")
    return tuple((*_names(option, name), _positive(f"{option} of {name}", ranks)) for name, ranks in value.items())  # type: ignore[misc]


def _switch(option: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{option} is {value!r}", "compile", "pass True or False")
    return value


def _zero(option: str, value: int) -> int:
    if value not in LEVELS or isinstance(value, bool):
        raise InputError(
            f"{option} is {value!r}", "compile",
            f"use {', '.join(map(str, LEVELS[:-1]))} or {LEVELS[-1]}: see docs/zero.md",
        )  # fmt: skip
    return value


READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "mesh": lambda _, mesh: Mesh.of(mesh),
    "freeze": _names,
    "cuts": _names,
    "stages": _stages,
    "placement": _placement,
    "schedule": lambda _, name: str(name),
    "chunks": _positive,
    "hardware": lambda option, value: _each(option, value, lambda _, name: str(name)),
    "memory": lambda option, value: _each(option, value, _bytes),
    "microbatches": _positive,
    "loss_weight": _loss_weight,
    "precision": _precision,
    "keep_fp32": _names,
    "loss_chunk": _chunk,
    "recompute": _recompute,
    "context": _context,
    "fuse": _switch,
    "cuda_graphs": _switch,
    "zero": _zero,
    "sequence_parallel": _switch,
    "replicate": _names,
    "passes": lambda _, given: pipeline.given(given, load_named),
}
