"""csc.compile: an ordinary model in, a trainable compiled model out.

    llava = csc.compile(model, mesh=csc.Mesh(pp=3), example=batch, freeze=["vision_tower"], microbatches=8)
    optimizer = torch.optim.AdamW(llava.parameters())
    for batch in loader:
        loss = llava.train_step(batch)
        optimizer.step(); optimizer.zero_grad()

The same code runs in one process (all ranks inside it) and under torchrun (one rank a process).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from csc.cache.feature_entries import FeatureCache
from csc.driver.batches import Divide
from csc.driver.compiled import CompiledModel
from csc.driver.model_programs import Example, Factory
from csc.driver.new_model import compiled_model, made_features
from csc.driver.options import READERS, changed
from csc.driver.user_files import load_named
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Pass
from csc.passes.pipeline import OWN, OWNERS, Pipeline, given, of_csc
from csc.runtime.launch import several_processes, speak_in_short
from csc.runtime.survival import Survive


def compile(
    model: nn.Module | Factory | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | str | Any = None,
    example: Example | Callable[[], Example] | None = None,
    freeze: Sequence[str] | None = None,
    cuts: Sequence[str] | None = None,
    stages: Sequence[str | Sequence[str]] | None = None,
    placement: Sequence[int] | None = None,
    schedule: str = "auto",
    chunks: int | None = None,
    hardware: str | Path | Sequence[str | Path] | None = None,
    memory: int | str | None = None,
    microbatches: int = 1,
    loss_weight: str = "auto",
    precision: str | None = None,
    keep_fp32: Sequence[str] | None = None,
    loss_chunk: int | None = None,
    recompute: str | Mapping[str, Any] | None = None,
    context: Mapping[str, int] | None = None,
    fuse: bool | None = None,
    cuda_graphs: bool | None = None,
    zero: int | None = None,
    sequence_parallel: bool | None = None,
    replicate: Sequence[str] | None = None,
    passes: str | Sequence[Pass] | None = None,
    directory: str | Path | None = None,
    cache: bool = True,
    check: bool | int | None = None,
    timeout: float = 600.0,
    divide: Divide | None = None,
    cache_features: str | Path | FeatureCache | None = None,
    encode_ahead: bool = False,
    widths: Sequence[int] | bool | None = None,
    survive: int | Survive | None = None,
    **misspelt: Any,
) -> Any:
    """Compile a model, or decorate a function that makes one.

    Args:
        model: An nn.Module whose forward takes the batch's entries as keyword arguments and returns a loss; or a
            function that makes one.
        mesh: csc.Mesh, a dict or string of axis sizes, or a torch DeviceMesh with axes among dp, pp, cp, tp.
            csc.Mesh(ranks=64): csc chooses the axes for the example, and microbatches, zero and recompute where they
            are not given; see docs/planning.md. Sizes by component: see docs/tensor.md.
        example: One global batch, a list of ready microbatches, or a function that makes either. csc takes names,
            dtypes and shapes from it.
        freeze: Components by name, or glob patterns over parameter names; None: what the model's `requires_grad` says.
        cuts: Names of the regions that open the second, third, ... stage, in order of execution.
        stages: For each stage the names or glob patterns of its regions. Neither this nor cuts: csc plans the stages.
        placement: The pipeline rank that runs each stage; None: as the schedule wants it.
        schedule: "auto", or one of gpipe, 1f1b, eager-1f1b, interleaved-1f1b, interleaved-zb, zb-h1, zb-h2, zb-v, or
            the path of a schedule file.
        chunks: Stages that each rank runs, for schedules that allow several.
        hardware: The profile that costs are computed for (see `csc cost`): a name or a .toml file; None: by the device.
            A list has one for each pipeline rank, where they differ: `["h100", "h100", "a100", "a100"]`.
        memory: The memory of one rank, in bytes or as "40GB"; None: that of `hardware`, if it is given. A list has one
            for each pipeline rank.
        microbatches: The number of microbatches in each replica's share of a step's batch.
        loss_weight: How microbatch losses combine: "auto" (from the graph), "tokens", "mean" or "sum".
        precision: "bf16": compute in bfloat16, with the model's float32 parameters as master weights; None: compute in
            the dtypes of the model.
        keep_fp32: Modules that stay in float32 under `precision`: components, parts of paths, or glob patterns.
        loss_chunk: The number of tokens whose logits exist at once, where a loss is the cross entropy of a linear
            layer. 0: all tokens. None: by their size (on a CPU in chunks from 256 MiB on, with `fuse` from 2 MiB on
            where a microbatch has as many tokens as the layer is wide); see docs/memory.md.
        recompute: The activations that F keeps for B: "none" recomputes nothing, "selective" what is cheap,
            "elementwise" what B's own kernels can absorb (the default with `fuse`), "full" all but the inputs of a
            region, "auto" the least that fits into `memory`. Or a mapping from names or globs of regions and
            components to one of these; see docs/memory.md.
        context: The number of cp ranks that share the tokens of an encoder, {"vision_tower": 2}: a divisor of cp.
            Other encoders run whole on every rank. All cp ranks share the tokens of the language model.
        fuse: Compile the functions of each template with Inductor, as torch.compile does. The first step takes longer,
            later ones less, and sums run in another order. On CPUs it needs a C++ compiler. None: False; see
            docs/fusing.md.
        cuda_graphs: Record the kernels of a stage on a GPU as CUDA graphs, with the same bits: for steps of many short
            kernels. It takes memory for each microbatch in flight. None: False; see docs/devices.md.
        zero: What data-parallel ranks shard: 1, the optimizer's state, which `compiled.optimizer` makes; 2, gradients
            too; 3, parameters too, frozen ones included. None: 0, nothing; see docs/zero.md.
        sequence_parallel: With tp: its ranks also divide the tokens between divided products (norms, additions,
            dropout), which takes less memory. Sums become a reduce-scatter and an all-gather. None: False; see
            docs/tensor.md.
        replicate: With tp: operators (`"mine::route"`) that every rank computes from whole operands and whole weights.
            Other operators without a rule are an error; see docs/tensor.md.
        passes: The passes that run, your own among them: `csc.pipeline().after("split", Mine())`, or a line as
            `csc passes` shows it. None: csc's own. See docs/writing-a-pass.md.
        directory: The directory of the program; None: a temporary one, removed at exit.
        cache: Read programs from the cache on disk, and write them there; see docs/cache.md.
        check: Compare a program with eager PyTorch before its first step, on that step's batch (docs/check.md has the
            cost). A number n: and at every n-th step. None: True, or False with CSC_CHECK=0.
        timeout: Seconds of silence after which another process counts as lost.
        divide: Which rows of the batch belong to which sample, where the batch does not show it. A mapping from
            entries to "samples" (a row each), "whole" (for every microbatch), the dimension of samples
            ({"position_ids": 1}), or a function from the batch to each sample's number of rows. Or one function from
            the batch and a number to that number of microbatches. See docs/guide.md.
        cache_features: A directory for the features of a frozen encoder, from which later epochs and runs read them.
            The program is planned without the encoder. csc.FeatureCache(directory, limit=bytes) sets another limit
            than 100 GB; see docs/features.md.
        encode_ahead: Compute a frozen encoder's features of the next batch during a step, on ranks that would wait,
            where that batch is known (`train_step(batch, ahead=following)`, or `for batch in compiled.ahead(loader)`).
            The program is planned without the encoder. See docs/features.md.
        widths: The widths, in tokens, to which microbatches of text are padded, so that a few programs serve all: a
            list; True: csc's own, at most an eighth wider than the rows; False: no padding. None: csc's own where a
            trial with eager PyTorch gives the same loss and gradients to rounding. The example's widths are kept. See
            docs/data.md.
        survive: The number of ranks that may be killed in training, at once or one after the other. The others finish
            the step and train on, with the same samples in each step. It needs more replicas (dp) than that.
            csc.Survive(1, copies=1) also keeps finished work of a lost replica; with csc.Survive(1, mirror=True) one
            pipeline, or zero=3, survives, too. None: none; see docs/survive.md.
        **misspelt: No other argument is accepted; the error names the nearest one.

    Returns:
        A CompiledModel; without a model, a decorator that makes one. An instance is compiled at once, a function on
            first use. Of several processes the first one compiles for all of them, on first use.

    Raises:
        InputError: An argument is wrong, or the model cannot be compiled. The error names the place and the remedy.
    """
    speak_in_short()
    options = changed(
        Options(), mesh=Mesh() if mesh is None else mesh, freeze=freeze, cuts=cuts, stages=stages, placement=placement,
        schedule=schedule, chunks=chunks, hardware=hardware, memory=memory, microbatches=microbatches,
        loss_weight=loss_weight, precision=precision, keep_fp32=keep_fp32, loss_chunk=loss_chunk, recompute=recompute,
        context=context, fuse=fuse, cuda_graphs=cuda_graphs, zero=zero, sequence_parallel=sequence_parallel,
        replicate=replicate, passes=passes, **misspelt,
    )  # fmt: skip

    features = made_features(cache_features, encode_ahead)
    options = replace(options, features=features is not None)

    def build(target: nn.Module | Factory) -> CompiledModel:
        home = Path(directory) if directory is not None else None
        return compiled_model(
            target, options, example, home, cache=cache, check=check, timeout=timeout, divide=divide,
            features=features, widths=widths, survive=survive,
        )  # fmt: skip

    if model is None:
        return build
    compiled = build(model)
    if isinstance(model, nn.Module) and example is not None and not several_processes():
        compiled.prepare()
    return compiled


def pipeline(line: str | None = None, **options: Any) -> Pipeline:
    """The passes of a compilation, as a tuple to change and to hand to `csc.compile(..., passes=)`.

    Args:
        line: Passes as text, as `csc passes` and `str(pipeline)` show them; None: csc's own, in csc's order.
        **options: Options of `csc.compile` that a pass decides: `freeze=["vision_tower"]` is a field of pass `freeze`.

    Returns:
        A tuple, with `before(name, *passes)`, `after(name, *passes)`, `replaced(name, *passes)` and `without(*names)`.

    Raises:
        InputError: The line cannot be read, with the column; or there is no pass with such an option.
    """
    steps = given(line, load_named) if line is not None else OWN
    for name in options:
        if name not in OWNERS:
            raise InputError(
                f"{name} is no option of a pass", "csc.pipeline",
                "give it to csc.compile" if name in READERS else f"those of passes are {', '.join(OWNERS)}",
            )  # fmt: skip
    chosen = changed(Options(), **options)
    said = {name: getattr(chosen, name) for name in options}
    return Pipeline(_saying(step, said) if of_csc(step) else step for step in steps)


def _saying(step: Pass, options: Mapping[str, Any]) -> Pass:
    """A pass, with those of the options that are its own."""
    return replace(step, **{one.name: options[one.name] for one in fields(step) if one.name in options})
