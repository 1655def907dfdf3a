"""A compiled model: the programs for its batches, and the training loop's half of csc.

loss = compiled.train_step(batch)      .parameters()      .clip_grad_norm_(1.0)      .save(directory)
phase2 = compiled.with_options(freeze=["vision_tower"])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from csc.cache.store import store
from csc.capture.batch import split_batch
from csc.capture.model_guards import State, autocasts
from csc.check.eager import Step
from csc.check.first import Checked
from csc.check.stepping import step_of
from csc.check.when import checks
from csc.codegen.write import checked_ranks
from csc.driver.checkpoint import format_of, on_meta, put_rest, read_rest, write_config
from csc.driver.compiler import Compiler, Progress, quiet
from csc.driver.dividing import Divide, Dividing
from csc.driver.entries import check_entries, fullest
from csc.driver.instead import INSTEAD, instead
from csc.driver.options import changed
from csc.driver.program_set import Serving
from csc.errors import InputError
from csc.ir.program import Options, Program
from csc.runtime.batches import sizes
from csc.runtime.meeting import FIRST_STEP
from csc.runtime.prefetch import ahead
from csc.runtime.timelines import gathered, timeline
from csc.runtime.trainer import Pieces, Trainer
from csc.runtime.weights import Format
from csc.runtime.words import NOTHING, Said
from csc.simulation.timeline import Timeline

log = logging.getLogger("csc")

Factory = Callable[[], nn.Module]
Example = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class CompiledModel:
    """A model as per-rank programs. Holds one program per batch signature; all of them share the parameters."""

    def __init__(
        self,
        model: nn.Module | Factory,
        options: Options,
        example: Example | Callable[[], Example] | None,
        directory: Path | None = None,
        compiler: Compiler | None = None,
        cache: bool = True,
        check: bool | int | None = None,
        timeout: float = 600.0,
        divide: Divide | None = None,
    ) -> None:
        self._model = model
        self._example = example
        self._directory = directory
        self._compiler = compiler
        self._cache = cache
        self._check = checks(check)
        self._steps = 0
        self._timeout = timeout
        self._dividing = Dividing(divide)
        self._before: Trainer | None = None  # what trained these parameters before `with_options`
        self._state: State | None = None  # of the model when the compiler captured it, for other options
        self._made: Serving | None = None
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
            if "_orig_mod" in dict(model.named_children()):
                raise InputError(
                    "the model is in torch.compile already, which names its parameters anew", "compile",
                    "pass the model itself: csc compiles it",
                )  # fmt: skip
            self._compiler = Compiler(model, store() if self._cache else None)
        return self._compiler

    @property
    def _serving(self) -> Serving:
        if self._made is None:
            self._made = Serving(self.compiler, self._directory, self._before, self.checks, self._state, self._timeout)
        return self._made

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

    def with_options(
        self, directory: str | Path | None = None, check: bool | int | None = None, **changes: Any
    ) -> CompiledModel:
        """The same model and traces with other options: mesh, freeze, cuts, stages, schedule, microbatches, and so on.

        A new frozen set is compiled without tracing again: `phase2 = phase1.with_options(freeze=["vision_tower"])`.
        directory: where the new program is written; None: a temporary directory. check: as for `csc.compile`; None: as
        for this one.
        """
        options = changed(self.options, **changes)
        home = Path(directory) if directory is not None else None
        checked = self._check if check is None else check
        other = CompiledModel(
            self._model, options, self._example, home, self.compiler, self._cache, checked, self._timeout
        )
        other.progress = self.progress
        other._dividing = self._dividing
        other._before = self._serving.trained
        other._state = self._serving.state
        return other

    def history(self, batch: Any = None, microbatches: int | None = None) -> list[Program]:
        """The Program after capture and each pass, for a batch's first microbatch (the example's by default).

        The cache has the finished program and the traced graphs, not what lies between: the model is traced for it.
        """
        options = self._options(microbatches)
        ready = self._ready(self.example if batch is None else batch, options)
        return self._current_programs().history(fullest(ready), options, self.progress)

    def prepare(self) -> None:
        """Compile for the example batch, unless the cache has the program."""
        self._current_programs().prepare(self.microbatch, self.options, self.progress)

    def _options(self, microbatches: int | None) -> Options:
        return replace(self.options, microbatches=microbatches or self.options.microbatches)

    @property
    def program(self) -> Program:
        """The finished Program for the example batch."""
        return self._current_programs().finished(self.microbatch, self.options, self.progress)

    @property
    def microbatch(self) -> dict[str, Any]:
        """The example's first microbatch of those with the most entries; all of the example if none has all entries."""
        found = fullest(self._ready(self.example, self.options))
        if isinstance(self.example, (list, tuple)):
            return found
        tensors, extra = split_batch(self.example)
        return found if found.keys() >= tensors.keys() else {**tensors, **extra}

    def write(self, directory: str | Path, with_weights: bool = False, ranks: Iterable[int] | None = None) -> Path:
        """Write the program directory for the example batch. InputError if something else is there, or if the program
        holds for what this batch decides alone: a directory asks nothing.

        ranks: write the files of these ranks alone, and what they share with others: a directory that runs them.
        InputError for a rank that the mesh does not have.
        """
        wanted = None if ranks is None else checked_ranks(self.options.mesh, ranks)
        home = Path(directory)
        programs = self._current_programs()
        decided = programs.finished(self.microbatch, self.options, self.progress).decided
        if decided:
            raise InputError(
                f"the model decides by its batch, and a directory is for one answer: {'; '.join(decided)}",
                str(directory),
                "train with compiled.train_step, which asks every batch; or pass the answer in as a plain value",
            )
        return programs.write(self.microbatch, self.options, home, self.progress, with_weights, wanted)

    def _ready(self, batch: Any, options: Options) -> list[dict[str, Any]]:
        """The microbatches of a global batch, replica after replica; a list of them as it is."""
        if isinstance(batch, (list, tuple)):
            return [tensors | extra for tensors, extra in map(split_batch, batch or [None])]
        return self.cut(batch, options.microbatches * options.mesh.dp)

    def cut(self, batch: Any, parts: int) -> list[dict[str, Any]]:
        """A batch as `parts` microbatches of as many samples each, with what belongs to these. InputError for an entry
        that cannot be divided.
        """
        return self._dividing.cut(batch, parts, self.compiler)

    # --- as an nn.Module --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **batch: Any) -> NoReturn:
        """Says what to call: a step is `train_step(batch)`."""
        raise InputError("a compiled model is not called", "compile", INSTEAD["forward"])

    def __getattr__(self, name: str) -> NoReturn:
        raise instead(name, dir(type(self)))

    def train(self, mode: bool = True) -> CompiledModel:
        """The model in training mode, as a step needs it, or with False in eval mode; returns this."""
        self.model.train(mode)
        return self

    def eval(self) -> CompiledModel:
        """The model in eval mode, for what is run of `gather()`; no step is taken until `train()`."""
        return self.train(False)

    # --- training ------------------------------------------------------------------------------------------------

    def trainer(self, batch: Any = None, microbatches: int | None = None, check: bool = True) -> Trainer:
        """The runtime for a batch (the example by default); the programs of its microbatches are emitted and loaded.

        check: False leaves out the comparison with eager PyTorch that new programs are due.
        """
        options = self._options(microbatches)
        batch = self.example if batch is None else batch
        ready = self._ready(batch, options)
        return self._current_programs().trainer(
            ready, options, self.progress, batch if check else None, self._full(ready)
        )

    def _full(self, ready: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The example's fullest microbatch if it has entries that all of these lack."""
        example = fullest(self.example) if isinstance(self.example, (list, tuple)) else self.example
        return None if fullest(ready).keys() >= split_batch(example)[0].keys() else self.microbatch

    @property
    def checks(self) -> bool:
        """Whether new programs are compared with eager PyTorch."""
        return bool(self._check)

    def check(self) -> str:
        """Compare the example's program with eager PyTorch, unless that was done; what it gave, in a sentence.

        DifferenceError if it does not train what eager PyTorch trains.
        """
        if any(parameter.is_meta for parameter in self.model.parameters()):
            ready = self._ready(self.example, self.options)
            return str(self._current_programs().check_by_layer(ready, self.options, self.progress))
        self.trainer()
        return str(self._serving.checking.latest or Checked(skipped="that was done before, as the cache knows"))

    def step_without_chance(self, batch: Any) -> Step:
        """Loss and gradients of one step in which random numbers are constants, unchecked; `.grad` stays as it is. For
        comparisons, in one process.
        """
        self._check_batch(batch)
        return step_of(self.trainer(batch, check=False), self.complete(batch))

    def microbatches(self, batch: Any) -> list[dict[str, Any]]:
        """What a step divides a batch into, replica after replica."""
        return self._ready(batch, self.options)

    def complete(self, batch: Any) -> list[dict[str, Any]]:
        """The microbatches of a batch as the runtime takes them. InputError if one does not fit its program."""
        return self._complete(self._ready(batch, self.options), self.trainer(batch, check=False))

    def gather(self) -> nn.Module:
        """Bring what any rank has trained or loaded into `model`, in every process; returns it. All ranks call it.

        For what needs the whole model: evaluation, `generate`, `save_pretrained` (PEFT's writes adapters alone).
        """
        trained = self._serving.trained
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
        Returns the loss of the whole batch (0-d tensor, the same on every rank). If one rank cannot do the step, all
        raise, no gradient is touched on any of them, and the next step is in order.
        """
        options = self._options(microbatches)
        serving = self._serving
        meeting = serving.meeting(options)

        def prepare() -> tuple[Said, tuple[list[dict[str, Any]], Trainer | None, Pieces]]:
            self._refuse_eval_mode()
            self._refuse_modes()
            self._check_batch(batch)
            ready = self._ready(batch, options)
            if self._has_changed():
                return Said((*sizes(ready), "the model has changed")), (ready, None, [])
            with serving.compiling:
                trainer = serving.handed_out(ready, options)
                if trainer is None:
                    return Said((*sizes(ready), "no program yet")), (ready, None, [])
                self._check_cut(batch, options, trainer)
                said, pieces = trainer.ready(self._complete(ready, trainer))
                return replace(said, signature=sizes(ready)), (ready, trainer, pieces)

        def prepare_new(made: Trainer) -> tuple[Said, Pieces]:
            self._check_cut(batch, options, made)
            return made.ready(self._complete(ready, made))

        with meeting.turn("train_step"):
            ready, trainer, pieces = meeting.hold("train_step", prepare)
            if trainer is None:
                serving = self._current_programs()
                ready = self._ready(batch, options)
                trainer = serving.trainer(ready, options, self.progress, batch, self._full(ready))
                pieces = meeting.hold(FIRST_STEP, partial(prepare_new, trainer))
            elif self._check is not True and self._check and self._steps % self._check == 0:
                self.gather()
                serving.check(ready, options, batch, self.progress)
                pieces = meeting.hold(FIRST_STEP, partial(prepare_new, trainer))
            self._steps += 1
            serving.use(trainer)
            return trainer.run(pieces)

    def _has_changed(self) -> bool:
        """Whether programs are for the model as it was."""
        state = self._serving.state
        return state is not None and not state.holds() and bool(state.changed())

    def _current_programs(self) -> Serving:
        """The programs of the model as it is: compiled anew where it has changed since, without tracing where only
        what trains has.
        """
        serving = self._serving
        if serving.state is None or serving.state.holds():
            return serving
        changed = serving.state.changed()
        if changed:
            log.info("%s has changed since it was compiled: %s", type(self.model).__name__, changed)
            if changed.structure:
                self._compiler = Compiler(self.model, store() if self._cache else None)
            self._before = None if changed.parameters else serving.trained
            self._state = None
            self._made = Serving(
                self.compiler, self._directory, self._before, self.checks, None, self._timeout, serving.met
            )
        else:
            serving.look()
        return self._serving

    def _refuse_eval_mode(self) -> None:
        state = self._serving.state
        if state is not None and state.was_training and not self.model.training:
            raise InputError(
                "the model has been put in eval mode since it was compiled", "train_step",
                "call compiled.train() before a training step",
            )  # fmt: skip

    def _refuse_modes(self) -> None:
        if torch.is_inference_mode_enabled():
            raise InputError(
                "torch.inference_mode is on: what is made in it trains nothing", "train_step",
                "call train_step outside of it; torch.no_grad does no harm",
            )  # fmt: skip
        state = self._serving.state
        if state is not None and not state.was_autocast and autocasts():
            raise InputError(
                "autocast is on, and was not when the model was compiled", "train_step",
                'compile with precision="bf16" and call train_step outside of torch.autocast',
            )  # fmt: skip

    def _check_cut(self, batch: Any, options: Options, trainer: Trainer) -> None:
        parts = options.microbatches * options.mesh.dp
        if parts > 1 and not isinstance(batch, (list, tuple)):
            whole = {item.name for item in trainer.program.manifest.inputs if item.whole}
            self._dividing.check(batch, parts, self.compiler, whole)

    def _complete(self, ready: Sequence[Mapping[str, Any]], trainer: Trainer) -> list[dict[str, Any]]:
        """Microbatches as the runtime takes them. InputError if one's placeholders do not fit its features."""
        return [trainer.reads(one) for one in self._serving.checked_places(ready)]

    def ahead(self, batches: Iterable[Any], depth: int = 1) -> Iterator[Any]:
        """The batches, in order, each with its context-parallel plans made while the batch before is trained on:

            for batch in compiled.ahead(loader):
                loss = compiled.train_step(batch)

        One thread fetches and plans up to `depth` batches ahead; an error of the loader is raised in place of its
        batch. Plans and results are those of `train_step` alone: a batch that is changed after all, or has a length
        that was not compiled yet, is planned in its step; so is that of a model whose own code runs before the step
        (see docs/models.md). Without cp it only fetches ahead.
        """
        if depth < 1:
            raise InputError(f"depth is {depth}", "ahead", "pass a whole number of at least 1")
        if self._example is not None:
            self.trainer()  # what batches are planned for

        def prepare(batch: Any) -> None:
            if self._serving.replays:  # which change the model for a while
                return
            ready = self._ready(batch, self.options)
            with self._serving.compiling:
                trainer = self._serving.serves(ready, self.options)
                if trainer is None:
                    return
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
        check_entries(self.example, batch, self.model)

    def _current(self) -> Trainer:
        return self._serving.last or self.trainer()

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

        def rest() -> tuple[Said, dict[str, torch.Tensor]]:
            return NOTHING, read_rest(path, form) if 0 in trainer.transport.ranks or not on_meta(form) else {}

        found = trainer.transport.meeting.hold("load", rest)
        trainer.load(path, form)
        put_rest(self.model, form, found)
        self._serving.look()  # what the step does not use may have got values for the first time

    def save(self, directory: str | Path) -> None:
        """Write the weights as safetensors; each rank writes what it owns. All ranks call it.

        Parameters that the step does not use are written as they are: the directory holds the whole model. Of a
        transformers model it is one that `from_pretrained` reads; else names are the model's own.
        """
        trainer = self._current()

        def config() -> tuple[Said, None]:
            if not dist.is_initialized() or dist.get_rank() == 0:
                write_config(self.model, directory)
            return NOTHING, None

        trainer.save(directory, self._format(trainer))
        trainer.transport.meeting.hold("the configuration of what is saved", config)

    def _format(self, trainer: Trainer) -> Format:
        trainers = [trainer]
        if dist.is_initialized() and dist.get_world_size() > 1:
            trainers += self._serving.trainers  # what those use is trained on another rank, not in this copy
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
