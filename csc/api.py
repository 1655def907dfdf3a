"""csc.compile: an ordinary model in, a trainable compiled model out.

    llava = csc.compile(model, mesh=csc.Mesh(pp=3), example=batch, freeze=["vision_tower"], microbatches=8)
    optimizer = torch.optim.AdamW(llava.parameters())
    for batch in loader:
        loss = llava.train_step(batch)
        optimizer.step(); optimizer.zero_grad()

The same code runs in one process (all ranks inside it) and under torchrun (one rank a process).
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from csc.capture import device_of, pieces, split_batch
from csc.checkpoint import format_of, on_meta, put_rest, read_rest, write_config
from csc.codegen.write import checked_ranks
from csc.compiler import Compiler, Progress, quiet
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.options import changed
from csc.passes.runner import TRACING
from csc.passes.shapes import shapes
from csc.placeholders import Places, places_for_features
from csc.runtime.ahead import ahead
from csc.runtime.launch import setup_distributed, under_torchrun
from csc.runtime.program import load
from csc.runtime.recording import gathered, timeline
from csc.runtime.trainer import Trainer
from csc.runtime.weights import Format
from csc.simulation.timeline import Timeline

log = logging.getLogger("csc")

Factory = Callable[[], nn.Module]
Example = Mapping[str, Any] | Sequence[Mapping[str, Any]]


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
    hardware: str | Path | None = None,
    memory: int | str | None = None,
    microbatches: int = 1,
    loss_weight: str = "auto",
    precision: str | None = None,
    keep_fp32: Sequence[str] | None = None,
    recompute: str | Mapping[str, Any] | None = None,
    context: Mapping[str, int] | None = None,
    directory: str | Path | None = None,
) -> Any:
    """Compile a model, or decorate a function that makes one.

    model: an nn.Module whose forward takes the batch's entries as keyword arguments and returns a loss; or a factory.
    mesh: csc.Mesh, a dict or string of axis sizes, or a torch DeviceMesh with axes among dp, pp, cp, tp.
    example: one global batch, or a list of ready microbatches (or a function that makes it): names, dtypes and shapes
    are taken from it.
    freeze: component names or glob patterns over parameter names; None: `requires_grad` as the model has it.
    cuts: names of the regions that open the second, third, ... stage, in order of execution.
    stages: for each stage the names or glob patterns of its regions. Neither this nor cuts: csc plans the stages.
    placement: the pipeline rank that runs each stage; None: as the schedule wants it.
    schedule: "auto", or one of gpipe, 1f1b, eager-1f1b, interleaved-1f1b, interleaved-zb, zb-h1, zb-h2, zb-v, or the
    path of a schedule file.  chunks: stages that each rank runs, for schedules that allow several.
    hardware: the profile that costs are computed for (see `csc cost`): a name or a .toml file; None: by the device.
    memory: what one rank may hold, in bytes or as "40GB"; None: what `hardware` has, if it is given.
    microbatches: how many a step divides each replica's share of the batch into.
    loss_weight: how microbatch losses combine: "auto" (from the graph), "tokens", "mean" or "sum".
    precision: "bf16": compute in bfloat16, with the model's float32 parameters as master weights; None: as they are.
    keep_fp32: components, parts of paths or globs of modules that compute in float32 all the same.
    recompute: what F keeps for B: "none" (all that B reads), "selective", "full" (what enters a region) or "auto" (as
    `memory` asks), or a mapping from names or globs of regions and components to one of these; see docs/memory.md.
    context: over how many cp ranks the tokens of a component are spread, {"vision_tower": 2}: a divisor of cp. Encoders
    that are not named run whole on every rank; the language model is spread over all of cp.
    directory: where the program is written; None: a temporary directory, removed at exit.

    Returns a CompiledModel. An instance is compiled now, a factory on first use. Raises InputError for bad arguments.
    """
    options = changed(
        Options(),
        mesh=mesh if mesh is not None else Mesh(),
        freeze=freeze,
        cuts=cuts,
        stages=stages,
        placement=placement,
        schedule=schedule,
        chunks=chunks,
        hardware=hardware,
        memory=memory,
        microbatches=microbatches,
        loss_weight=loss_weight,
        precision=precision,
        keep_fp32=keep_fp32,
        recompute=recompute,
        context=context,
    )

    def build(target: nn.Module | Factory) -> CompiledModel:
        return CompiledModel(target, options, example, Path(directory) if directory is not None else None)

    if model is None:
        return build
    compiled = build(model)
    if isinstance(model, nn.Module) and example is not None:
        compiled.history()
    return compiled


class CompiledModel:
    """A model as per-rank programs. Holds one program per batch signature; all of them share the parameters."""

    def __init__(
        self,
        model: nn.Module | Factory,
        options: Options,
        example: Example | Callable[[], Example] | None,
        directory: Path | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self._model = model
        self._example = example
        self._directory = directory
        self._compiler = compiler
        self._histories: dict[Any, list[Program]] = {}
        self._trainers: dict[int, Trainer] = {}  # by the number of microbatches
        self._served: dict[int, set[Any]] = {}  # the signatures that each has a program for
        self._places: dict[Any, Places] = {}  # of placeholders, by signature
        self._compiling = threading.Lock()
        self._temporary: tempfile.TemporaryDirectory | None = None  # removed with this object
        self._last: Trainer | None = None
        self._before: Trainer | None = None  # what trained these parameters before `with_options`
        self._nothing = nn.Parameter(torch.empty(0))
        self.options = options
        self.progress: Progress = quiet

    # --- what it is made of --------------------------------------------------------------------------------------

    @property
    def compiler(self) -> Compiler:
        """The compiler of the model; a factory is called here, once."""
        if self._compiler is None:
            model = self._model if isinstance(self._model, nn.Module) else self._model()
            if not isinstance(model, nn.Module):
                raise InputError(
                    f"the factory returned a {type(model).__name__}",
                    "compile",
                    "return the nn.Module to be trained",
                )
            self._compiler = Compiler(model)
        return self._compiler

    @property
    def model(self) -> nn.Module:
        """The eager model. Its parameters are those that train (in one process: all of them)."""
        return self.compiler.model

    @property
    def example(self) -> Example:
        """The example batch. InputError if none was given."""
        if callable(self._example):
            self._example = self._example()
        if self._example is None:
            raise InputError(
                "there is no example batch",
                "compile",
                "pass example=batch, one batch as your data loader makes it",
            )
        return self._example

    def with_options(self, directory: str | Path | None = None, **changes: Any) -> CompiledModel:
        """The same model and traces with other options: mesh, freeze, cuts, stages, schedule, microbatches, and so on.

        A new frozen set is compiled without tracing again: `phase2 = phase1.with_options(freeze=["vision_tower"])`.
        directory: where the new program is written; None: a temporary directory.
        """
        options = changed(self.options, **changes)
        home = Path(directory) if directory is not None else None
        other = CompiledModel(self._model, options, self._example, home, self.compiler)
        other.progress = self.progress
        other._before = self._last or self._before
        return other

    def history(self, batch: Any = None, microbatches: int | None = None) -> list[Program]:
        """The Program after capture and each pass, for a batch's first microbatch (the example's by default)."""
        options = self._options(microbatches)
        return self._history(self._ready(self.example if batch is None else batch, options)[0], options)

    def _options(self, microbatches: int | None) -> Options:
        return replace(self.options, microbatches=microbatches or self.options.microbatches)

    def _history(self, microbatch: Mapping[str, Any], options: Options) -> list[Program]:
        """The same for a microbatch. The first program decides how all others are cut and placed, and in which order
        they run.
        """
        key = (self._signature(microbatch), options.microbatches)
        if key not in self._histories:
            if self._histories:
                earlier = next(iter(self._histories.values()))[-1]
                alike = (h[-1] for (_, count), h in self._histories.items() if count == options.microbatches)
                options = replace(
                    options,
                    cuts=None,
                    stages=tuple(stage.regions for stage in earlier.stages),
                    placement=tuple(stage.rank for stage in earlier.stages),
                    schedule=next((program.schedule or options.schedule for program in alike), options.schedule),
                )
            history = self.compiler.compile(microbatch, options, self.progress)
            key = (self._signature(microbatch), options.microbatches)  # the capture may have shown what else decides
            self._histories[key] = history
        return self._histories[key]

    def _signature(self, microbatch: Mapping[str, Any]) -> Any:
        return self.compiler.signature(self.compiler.complete(microbatch))

    @property
    def program(self) -> Program:
        """The finished Program for the example batch."""
        return self.history()[-1]

    @property
    def microbatch(self) -> dict[str, Any]:
        """The example's first microbatch."""
        return self._ready(self.example, self.options)[0]

    def write(self, directory: str | Path, with_weights: bool = False, ranks: Iterable[int] | None = None) -> Path:
        """Write the program directory for the example batch. InputError if something else is there.

        ranks: write the files of these ranks alone, and what they share with others: a directory that runs them.
        InputError for a rank that the mesh does not have.
        """
        wanted = None if ranks is None else checked_ranks(self.options.mesh, ranks)
        program = self.program
        first = self.compiler.complete(self.microbatch)
        return self.compiler.emit(program, self.options, Path(directory), first, with_weights, wanted)

    def _ready(self, batch: Any, options: Options) -> list[dict[str, Any]]:
        """The microbatches of a global batch, replica after replica; a list of them as it is."""
        if isinstance(batch, (list, tuple)):
            return [tensors | extra for tensors, extra in map(split_batch, batch or [None])]
        tensors, extra = split_batch(batch)
        return [piece | extra for piece in pieces(tensors, options.microbatches * options.mesh.dp)]

    # --- training ------------------------------------------------------------------------------------------------

    def trainer(self, batch: Any = None, microbatches: int | None = None) -> Trainer:
        """The runtime for a batch (the example by default); the programs of its microbatches are emitted and loaded."""
        options = self._options(microbatches)
        self._last = self._serving(self._ready(self.example if batch is None else batch, options), options)
        return self._last

    def _serving(self, ready: Sequence[Mapping[str, Any]], options: Options) -> Trainer:
        """The runtime with a program for each of these microbatches; missing ones are compiled."""
        with self._compiling:
            return self._made_to_serve(ready, options)

    def _made_to_serve(self, ready: Sequence[Mapping[str, Any]], options: Options) -> Trainer:
        count = options.microbatches
        served = self._served.setdefault(count, set())
        for microbatch in ready:
            if self._signature(microbatch) in served:
                continue
            self._join_group()
            self._gather_weights()
            start = time.perf_counter()
            program = self._history(microbatch, options)[-1]
            directory = self._program_directory(sum(map(len, self._served.values())))
            own = [dist.get_rank()] if dist.is_initialized() and dist.get_world_size() > 1 else None
            self.compiler.emit(program, options, directory, self.compiler.complete(microbatch), ranks=own)
            loaded = load(directory, own)
            if count in self._trainers:
                self._trainers[count].add(loaded)
            else:
                self._trainers[count] = Trainer(loaded, weights=dict(self.model.named_parameters()))
            served.add(self._signature(microbatch))
            shaped = self._history(microbatch, options)[1 + TRACING.index(shapes)]
            self._places[self._signature(microbatch)] = places_for_features(shaped)
            sizes = {name: list(value.shape) for name, value in microbatch.items() if isinstance(value, torch.Tensor)}
            log.info("a program for microbatches of %s, made in %.1f s", sizes, time.perf_counter() - start)
        return self._trainers[count]

    def _program_directory(self, index: int) -> Path:
        """Where the program of the index-th signature goes; every process of a group writes its own."""
        if self._directory is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="csc-")
        home = self._directory or Path(self._temporary.name) / "program"  # type: ignore[union-attr]
        rank = f"-rank{dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else ""
        return home.with_name(f"{home.name}{rank}{f'-{index}' if index else ''}")

    def _join_group(self) -> None:
        if under_torchrun() and not dist.is_initialized():
            setup_distributed(device_of(self.model).type)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1 and world != self.options.mesh.size:
            raise InputError(
                f"{world} processes were started and the mesh has {self.options.mesh.size} ranks", "mesh",
                f"start with --nproc-per-node {self.options.mesh.size}, or change the mesh",
            )  # fmt: skip

    def _gather_weights(self) -> None:
        """Under torchrun: bring every parameter up to date on every rank, from the rank that trained it.

        A new partition may give a parameter to another rank, whose copy has not been trained.
        """
        if self._before is None or self._trainers or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._before.collect(dict(self.model.named_parameters()))
        self._before = None

    def gather(self) -> nn.Module:
        """Bring what any rank has trained or loaded into `model`, in every process; returns it. All ranks call it.

        For what needs the whole model: evaluation, `generate`, `save_pretrained` (PEFT's writes adapters alone).
        """
        trained = self._last or self._before
        if trained is not None:
            trained.collect(dict(self.model.named_parameters()))
        return self.model

    def train_step(self, batch: Any, microbatches: int | None = None) -> torch.Tensor:
        """Forward and backward of the whole batch; gradients go to `.grad` as autograd would put them.

        batch: the global batch, the same on every rank, or a list of ready microbatches (replica by replica), which may
        differ in length. Another length is compiled once, from the same trace; other keys or dtypes than the example's
        are an InputError.
        If the model has a method `check_batch(batch)`, it is called first: what a compiled step cannot decide, because
        it depends on values of the batch, is decided there, by raising.
        Returns the loss of the whole batch (0-d tensor, the same on every rank).
        """
        self._check_batch(batch)
        options = self._options(microbatches)
        ready = self._ready(batch, options)
        self._last = trainer = self._serving(ready, options)
        return trainer.train_step(self._complete(ready, trainer))

    def _complete(self, ready: Sequence[Mapping[str, Any]], trainer: Trainer) -> list[dict[str, Any]]:
        """Microbatches as the runtime takes them. InputError if one's placeholders do not fit its features."""
        manifest = trainer.program.manifest
        used = {item.name for item in manifest.inputs} | manifest.fixed.keys()
        complete = [self.compiler.complete(microbatch) for microbatch in ready]
        for number, microbatch in enumerate(complete):
            name = f"microbatch {number}" if len(complete) > 1 else "the batch"
            self._places[self.compiler.signature(microbatch)].check(microbatch, name)
        return [{n: v for n, v in one.items() if n in used} for one in complete]

    def ahead(self, batches: Iterable[Any], depth: int = 1) -> Iterator[Any]:
        """The batches, in order, each with its context-parallel plans made while the batch before is trained on:

            for batch in compiled.ahead(loader):
                loss = compiled.train_step(batch)

        One thread fetches and plans up to `depth` batches ahead; an error of the loader is raised in place of its
        batch. Plans and results are those of `train_step` alone: a batch that is changed after all, or has a length
        that was not compiled yet, is planned in its step. Without cp it only fetches ahead.
        """
        if depth < 1:
            raise InputError(f"depth is {depth}", "ahead", "pass a whole number of at least 1")
        if self._example is not None:
            self.trainer()  # what batches are planned for

        def prepare(batch: Any) -> None:
            ready, count = self._ready(batch, self.options), self.options.microbatches
            with self._compiling:  # a step may be learning what decides which program a batch needs
                served = self._served.get(count, set())
                if not all(self._signature(microbatch) in served for microbatch in ready):
                    return
                trainer = self._trainers[count]
                complete = self._complete(ready, trainer)
            trainer.prepare(complete, depth)

        return ahead(batches, prepare, depth)

    def timeline(self, batch: Any, microbatches: int | None = None) -> Timeline:
        """One `train_step` that also records when every rank ran what; see `csc timeline`. All ranks call it.

        Times are seconds since the step began, of the first replica. Gradients are added as by `train_step`. On a GPU
        an action's time is that of its launch.
        """
        trainer = self.trainer(batch, microbatches)
        before, trainer.trace = trainer.trace, True
        try:
            self.train_step(batch, microbatches)
        finally:
            trainer.trace = before
        return timeline(gathered(trainer.timeline), trainer.program.manifest)

    def _check_batch(self, batch: Any) -> None:
        if self._example is None:
            self._example = batch
        example = self.example
        expected, extra = split_batch(example[0] if isinstance(example, (list, tuple)) else example)
        for microbatch in batch if isinstance(batch, (list, tuple)) else [batch]:
            found, other = split_batch(microbatch)
            for name in expected.keys() | found.keys():
                if name not in found:
                    raise InputError(f"the batch has no entry {name!r}", "train_step", _keys_remedy(expected))
                if name not in expected:
                    raise InputError(
                        f"the batch has an entry {name!r} that the example had not",
                        "train_step",
                        _keys_remedy(expected),
                    )
                if found[name].dtype != expected[name].dtype:
                    raise InputError(
                        f"the batch entry {name!r} is {found[name].dtype}, the example's was {expected[name].dtype}",
                        "train_step", f"convert it with .to({expected[name].dtype}), or compile with such an example",
                    )  # fmt: skip
            if other.keys() != extra.keys() or any(repr(other[name]) != repr(extra[name]) for name in extra):
                raise InputError(
                    f"the batch's plain values are {other!r}, the example's were {extra!r}", "train_step",
                    "values that are no tensors are compiled in: compile again with an example that has these",
                )  # fmt: skip
            own = getattr(self.model, "check_batch", None)
            if callable(own):
                own({**found, **other})

    def _current(self) -> Trainer:
        return self._last if self._last is not None else self.trainer()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what trains on this process' ranks, under the model's own names."""
        return self._current().named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What trains on this process' ranks; give it to an optimizer.

        On a rank of frozen layers only: one parameter without elements, since torch.optim refuses an empty list.
        """
        own = list(self._current().parameters())
        return iter(own or [self._nothing])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this process' parameters."""
        self._current().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients, over all ranks, to at most this 2-norm. Returns the norm before."""
        return self._current().clip_grad_norm_(max_norm)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This process' parameters by name."""
        return self._current().state_dict()

    def load(self, path: str | Path) -> None:
        """Read the weights of this process' ranks from safetensors: a file, or a directory as `save` or HF write it.

        Of a directory's shards only the tensors that these ranks hold are read, and those that the step does not use
        (where they are there), so that a later `save` has them right. InputError if one is missing or of another shape
        or dtype.

        A model on the meta device stays there, and each rank makes its own parameters only. What the step does not use
        is then kept by the rank that saves it.
        """
        trainer = self._current()
        form = self._format(trainer)
        found = read_rest(path, form) if 0 in trainer.transport.ranks or not on_meta(form) else {}
        trainer.load(path, form)
        put_rest(self.model, form, found)

    def save(self, directory: str | Path) -> None:
        """Write the weights as safetensors; each rank writes what it owns. All ranks call it.

        Parameters that the step does not use are written as they are: the directory holds the whole model. Of a
        transformers model it is one that `from_pretrained` reads; else names are the model's own.
        """
        trainer = self._current()
        trainer.save(directory, self._format(trainer))
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_config(self.model, directory)

    def _format(self, trainer: Trainer) -> Format:
        trainers = [trainer]
        if dist.is_initialized() and dist.get_world_size() > 1:
            trainers += self._trainers.values()  # what those use is trained on another rank, not in this copy
        return format_of(self.model, {spec.name for one in trainers for spec in one.program.manifest.parameters})

    def save_adapter(self, directory: str | Path) -> None:
        """Write a PEFT model's adapters in PEFT's own format: adapter_model.safetensors and adapter_config.json.

        `PeftModel.from_pretrained(base_model, directory)` reads them. All ranks call it, the first one writes.
        InputError if the model is not PEFT's.
        """
        if not hasattr(self.model, "peft_config"):
            raise InputError(
                f"{type(self.model).__name__} has no adapters", "save_adapter",
                "save all weights with save(directory), or make the model with peft.get_peft_model",
            )  # fmt: skip
        model = self.gather()
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if alone or dist.get_rank() == 0:
            model.save_pretrained(str(directory))  # type: ignore[operator]
        if not alone:
            dist.barrier()


def _keys_remedy(expected: Mapping[str, Any]) -> str:
    return f"give the entries of the example: {', '.join(sorted(expected))}; or compile with another example"
