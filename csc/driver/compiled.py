"""A compiled model: the programs for its batches, and the training loop's half of csc.

loss = compiled.train_step(batch)      .parameters()      .clip_grad_norm_(1.0)      .save(directory)
phase2 = compiled.with_options(freeze=["vision_tower"])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from csc.cache.features import FeatureCache
from csc.cache.store import store
from csc.capture.batch import split_batch
from csc.capture.guards import Match
from csc.capture.model_guards import ModelGuards
from csc.check.eager import Step
from csc.check.first import Checked
from csc.check.one_step import ComparedStep, step_of
from csc.check.when import checks
from csc.codegen.write import checked_ranks
from csc.driver import modes, persistence
from csc.driver.checkpoint import format_of
from csc.driver.compiler import Compiler, Progress, quiet
from csc.driver.dividing import Divide, Dividing
from csc.driver.entries import check_entries, fullest
from csc.driver.evaluation import evaluated, options_for
from csc.driver.instead import INSTEAD, instead
from csc.driver.options import changed
from csc.driver.persistence import Saved
from csc.driver.planned import beside, planned_memory
from csc.driver.program_set import ProgramSet
from csc.driver.share import Divided, Share, place
from csc.errors import InputError
from csc.ir.program import Options, Program
from csc.passes.recompute import AUTO, saves_of
from csc.planning.problem import Problem
from csc.runtime.batches import Microbatches
from csc.runtime.meeting import COMPILATION, EVALUATION, FIRST_STEP, STEP, STEPS
from csc.runtime.prefetch import ahead
from csc.runtime.stepping import make_optimizer
from csc.runtime.timelines import gathered, timeline
from csc.runtime.trainer import Trainer
from csc.runtime.words import Said
from csc.simulation.timeline import Timeline

log = logging.getLogger("csc")
SETTLED = 2  # steps until memory is what it will be: the first one warms up

Factory = Callable[[], nn.Module]
Example = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class CompiledModel:
    """A model as per-rank programs. Holds one program for all batches of a kind; all of them share the parameters.

    Attributes:
        metrics: Of the last `train_step`: loss, tokens, samples, seconds, tokens_per_second, samples_per_second,
            peak_memory and planned_memory (bytes), mfu where the hardware profile says what a device can do, and
            grad_norm once it was clipped or asked for. Seconds, rates and memory are this process'; the others are the
            same on every rank.
        options: What it was compiled with: mesh, frozen patterns, schedule, and so on.
        progress: Called with the name of each step of a compilation.
    """

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
        features: FeatureCache | None = None,
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
        self._features = features
        self._before: Trainer | None = None  # what trained these parameters before `with_options`
        self._was: ModelGuards | None = None  # the model when the compiler captured it, for other options
        self._made: ProgramSet | None = None
        self._training: ProgramSet | None = None  # of what this evaluates
        self._evaluating: CompiledModel | None = None
        self._nothing = nn.Parameter(torch.empty(0))
        self._planned: tuple[Trainer | None, float | None] = (None, None)  # bytes that the plan of a trainer expects
        self.options = options
        self.metrics: dict[str, float] = {}
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
    def _programs(self) -> ProgramSet:
        if self._made is None:
            met = self._training.met if self._training is not None else None
            self._made = ProgramSet(
                self.compiler, self._directory, self._before, self.checks, self._was, self._timeout, met,
                self._training, self._features,
            )  # fmt: skip
        return self._made

    @property
    def model(self) -> nn.Module:
        """The eager model. Its parameters are those that train (in one process: all of them)."""
        return self.compiler.model

    @property
    def example(self) -> Example:
        """The example batch.

        Raises:
            InputError: None was given.
        """
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

        Args:
            directory: Where the new program is written; None: a temporary directory.
            check: As for `csc.compile`; None: as for this one.
            **changes: Options of `csc.compile` that decide the program.

        Returns:
            Another CompiledModel, which trains the same parameters.

        Raises:
            InputError: An option is unknown or wrong.
        """
        options = changed(self.options, **changes)
        home = Path(directory) if directory is not None else None
        checked = self._check if check is None else check
        other = CompiledModel(
            self._model, options, self._example, home, self.compiler, self._cache, checked, self._timeout
        )
        other.progress = self.progress
        other._dividing, other._features = self._dividing, self._features
        other._before = self._programs.trained
        other._was = self._programs.guards.model
        return other

    def history(self, batch: Any = None, microbatches: int | None = None) -> list[Program]:
        """The Program after capture and each pass, for a batch's first microbatch (the example's by default).

        The cache has the finished program and the traced graphs, not what lies between: the model is traced for it.
        """
        options = self._options(microbatches)
        ready = self._ready(self.example if batch is None else batch, options)
        return self._current_programs().compiled.history(fullest(ready), options, self.progress)

    def prepare(self) -> None:
        """Compile for the example batch, unless the cache has the program."""
        self._current_programs().compiled.prepare(self.microbatch, self.options, self.progress)

    def _options(self, microbatches: int | None) -> Options:
        return replace(self.options, microbatches=microbatches or self.options.microbatches)

    @property
    def program(self) -> Program:
        """The finished Program for the example batch."""
        return self._current_programs().compiled.finished(self.microbatch, self.options, self.progress)

    def of_first(self, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        """What `make` returns on the first rank, on every rank. All ranks call it; errors are raised on all."""
        return self._programs.of_first(make, self.options)

    def problem(self, microbatch: Mapping[str, Any]) -> Problem:
        """What this microbatch takes of every region: seconds and bytes for planners. It is traced, not compiled.

        Regions for which `recompute="auto"` decided keep what it decided for the example.
        """
        options = self.options
        if any(choice == AUTO for _, choice in options.recompute):
            options = replace(options, recompute=saves_of(self.program))
        return self._current_programs().compiled.problem(microbatch, options, self.progress)

    def divided(self, microbatch: Mapping[str, Any]) -> Program:
        """The Program of a microbatch after pass `split`: F, B and W of every region, which is what is costed."""
        return self._current_programs().compiled.divided(microbatch, self.options, self.progress)[1]

    @property
    def microbatch(self) -> dict[str, Any]:
        """The example's first microbatch of those with the most entries; all of the example if none has all entries."""
        found = fullest(self._ready(self.example, self.options))
        if isinstance(self.example, (list, tuple)):
            return found
        tensors, extra = split_batch(self.example)
        return found if found.keys() >= tensors.keys() else {**tensors, **extra}

    def write(self, directory: str | Path, with_weights: bool = False, ranks: Iterable[int] | None = None) -> Path:
        """Write the program directory for the example batch, for `python -m csc.run`.

        Args:
            directory: Where to; a program that is there is replaced.
            with_weights: Also write the parameters, as safetensors.
            ranks: Write the files of these ranks alone, and what they share with others: a directory that runs them.

        Returns:
            The directory.

        Raises:
            InputError: Something else is there, the mesh does not have a rank, or the program holds for what this
                batch decides alone: a directory asks nothing.
        """
        wanted = None if ranks is None else checked_ranks(self.options.mesh, ranks)
        if self._features is not None:
            raise InputError(
                "its steps take the features of a frozen encoder, which csc.run neither makes nor keeps",
                str(directory),
                "compile without cache_features to write a directory",
            )
        home = Path(directory)
        programs = self._current_programs()
        guards = programs.compiled.finished(self.microbatch, self.options, self.progress).guards
        if guards is not None and guards.decisions:
            raise InputError(
                f"the model decides by its batch, and a directory is for one answer: {'; '.join(guards.answers)}",
                str(directory),
                "train with compiled.train_step, which asks every batch; or pass the answer in as a plain value",
            )
        return programs.compiled.write(self.microbatch, self.options, home, self.progress, with_weights, wanted)

    def _ready(self, batch: Any, options: Options, parts: int | None = None) -> list[dict[str, Any]]:
        """The microbatches of a global batch, replica after replica; a list of them as it is. parts: how many, where it
        is not a global one.
        """
        if isinstance(batch, (list, tuple)):
            return [tensors | extra for tensors, extra in map(split_batch, batch or [None])]
        return self.cut(batch, options.microbatches * options.mesh.dp if parts is None else parts)

    def cut(self, batch: Any, parts: int) -> list[dict[str, Any]]:
        """A batch as `parts` microbatches of as many samples each, with what belongs to these.

        Raises:
            InputError: An entry cannot be divided.
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

        Args:
            batch: As for `train_step`; None: the example.
            microbatches: As for `train_step`.
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
        """Compare the example's program with eager PyTorch, unless that was done.

        Returns:
            What it gave, in a sentence.

        Raises:
            DifferenceError: It does not train what eager PyTorch trains.
        """
        if any(parameter.is_meta for parameter in self.model.parameters()):
            ready = self._ready(self.example, self.options)
            return str(self._current_programs().check_by_layer(ready, self.options, self.progress))
        self.trainer()
        return str(self._programs.checking.latest or Checked(skipped="that was done before, as the cache knows"))

    def step_without_chance(self, batch: Any) -> Step:
        """Loss and gradients of one step in which random numbers are constants, unchecked; `.grad` stays as it is. For
        comparisons, in one process.
        """
        self._check_batch(batch)
        return step_of(self.trainer(batch, check=False), self.complete(batch))

    def microbatches(self, batch: Any) -> list[dict[str, Any]]:
        """What a step divides a batch into, replica after replica."""
        return self._ready(batch, self.options)

    @property
    def dp_rank(self) -> int:
        """Which share of the samples this process loads for `train_step(batch, local=True)`, of `dp_size`: that of its
        replica under torchrun. Processes of one replica load the same.
        """
        return place(self.options.mesh)[0]

    @property
    def dp_size(self) -> int:
        """How many shares there are: under torchrun the mesh's dp; one process alone loads all samples."""
        return place(self.options.mesh)[1]

    @property
    def needs(self) -> frozenset[str]:
        """The entries of a batch that have to be loaded in this process; the others, features that only other ranks
        read, may be left out of a local batch. All ranks call it: the example's program is made if there is none.
        """
        read = self._current().needs | self._programs.on_the_host | self._programs.encoded
        tensors, _ = split_batch(fullest(self.example) if isinstance(self.example, (list, tuple)) else self.example)
        return frozenset(name for name, one in tensors.items() if name in read or not one.is_floating_point())

    def complete(self, batch: Any) -> list[dict[str, Any]]:
        """The microbatches of a batch as the runtime takes them.

        Raises:
            InputError: One does not fit its program.
        """
        trainer = self.trainer(batch, check=False)
        return self._complete(self._programs.match(self._ready(batch, self.options)), trainer)

    def gather(self) -> nn.Module:
        """Bring what any rank has trained or loaded into `model`, in every process; returns it. All ranks call it.

        For what needs the whole model: evaluation, `generate`, `save_pretrained` (PEFT's writes adapters alone).
        """
        trained = self._programs.trained
        if trained is not None:
            trained.collect(dict(self.model.named_parameters()))
        return self.model

    def train_step(self, batch: Any, microbatches: int | None = None, local: bool = False) -> torch.Tensor:
        """Forward and backward of the whole batch; gradients go to `.grad` as autograd would put them.

        If the model has a method `check_batch(batch)`, it is called first: what a compiled step cannot decide, because
        it depends on values of the batch, is decided there, by raising.

        Args:
            batch: The global batch, the same on every rank, or a list of ready microbatches (replica by replica), which
                may differ in length. Another length is compiled once, from the same trace.
            microbatches: How many, instead of those of the options.
            local: The batch has the samples of this process' replica alone (share `dp_rank` of `dp_size`), as many as
                that has and of any size; loss and gradients are those of all of them together. Features that the
                process does not need (`needs`) may be left out, or on the meta device. In one process, which runs all
                replicas, it is the global batch. What a loader of `csc.balanced` yields is local.

        Returns:
            The loss of the whole batch: a tensor without dimensions, the same on every rank.

        Raises:
            InputError: The batch does not fit: other keys or dtypes than the example's, ids beyond the vocabulary.
            StepFailed: Another rank cannot do the step. Then no gradient is touched on any, and the next is in order.
            RankLost: Another rank ended, or was silent for `timeout` seconds.
            DifferenceError: A new program does not train what eager PyTorch trains.
        """
        with torch.enable_grad():  # as a forward that is trained runs, also where the caller is in no_grad
            return self._step(STEP, batch, self._options(microbatches), local)

    def compile_for(self, batch: Any, microbatches: int | None = None, local: bool = False) -> None:
        """Make the programs of a batch's microbatches, and compare them with eager PyTorch, without a step: later steps
        of these sizes start at once. All ranks call it.

        Args:
            batch: As for `train_step`.
            microbatches: As for `train_step`.
            local: As for `train_step`.

        Raises:
            CscError: As `train_step` before anything is computed.
        """
        with torch.enable_grad(), self._agreed(COMPILATION, batch, self._options(microbatches), local):
            pass

    def _step(self, operation: str, batch: Any, options: Options, local: bool) -> torch.Tensor:
        with self._agreed(operation, batch, options, local) as (trainer, dealt, flags, compared):
            self._steps += 1
            loss = compared.keep(trainer) if compared is not None else trainer.run(dealt, flags)
            self._measure(trainer)
            return loss

    @contextmanager
    def _agreed(
        self, operation: str, batch: Any, options: Options, local: bool
    ) -> Iterator[tuple[Trainer, Microbatches, int, ComparedStep | None]]:
        """Within the context all ranks are about to make the step of a batch: its trainer, the microbatches, and the
        flags that any rank has said; and the step itself, if the check has made it just now.
        """
        programs = self._programs
        meeting = programs.meeting(options)
        divided = batch if isinstance(batch, Divided) else Divided()
        share = Share(options.mesh, options.microbatches, meeting, local or batch is divided, divided.said)

        def ready_from(given: Any) -> list[dict[str, Any]]:
            modes.refuse_eval(self._programs.guards.model, self.model)
            modes.refuse_torch(self._programs.guards.model, operation)
            return self._ready(given, options, share.parts)

        def prepare(ready: list[dict[str, Any]]) -> tuple[Said, tuple[Trainer, Microbatches] | None]:
            self._check_batch(ready if share.own else batch, share.own)
            changed = self._has_changed()
            with programs.compiling:
                matches = [] if changed else programs.match(ready)
                trainer = None if changed else programs.handed_out(matches, options)
                if trainer is None:
                    if not changed:
                        log.info("no program for this batch yet: %s", programs.missing(matches, options))
                    return share.waits(ready, changed), None
                return known(ready, matches, trainer, share.known)

        def known(
            ready: list[dict[str, Any]], matches: Sequence[Match], made: Trainer, say: Any
        ) -> tuple[Said, tuple[Trainer, Microbatches]]:
            self._check_cut(batch, made, share.parts)
            said, dealt = made.ready(self._complete(matches, made), local=share.own)
            return say(ready, said, programs.decides(matches, options)), (made, dealt)

        with meeting.turn(operation):
            compared: list[ComparedStep] = []
            ready, found, heard = share.agree(operation, lambda: ready_from(batch), prepare)
            served = share.served(heard) and found is not None
            due = served and self._check is not True and self._check and self._steps % self._check == 0
            if due or not served:
                meeting.began()  # what is made now has meetings of its own
                programs = self._current_programs()
                everyone = share.of_all(ready)
                if share.own and self._example is None:
                    self._example = everyone
                whole = everyone if share.own else batch
                with programs.checking.compared_steps() as compared:
                    made = programs.trainer(everyone, options, self.progress, whole, self._full(everyone))
                    if due:
                        self.gather()
                        programs.check(programs.match(everyone), options, whole, self.progress)
                found, heard = meeting.heard(
                    FIRST_STEP, lambda: known(ready, self._programs.match(ready), made, share.first)
                )
            assert found is not None
            programs.use(found[0])
            if operation not in STEPS or compared:
                meeting.began()
            yield (*found, share.flags(heard), compared[-1] if compared else None)

    def _measure(self, trainer: Trainer) -> None:
        """The metrics of the step, with the planned memory; the log has both once the first steps are over."""
        self.metrics = {**trainer.metrics, **self._programs.feature_counts()}
        if self._planned[0] is not trainer:
            self._planned = (trainer, planned_memory(trainer.program, trainer.transport.ranks))
        planned = self._planned[1]
        if planned is not None:
            self.metrics["planned_memory"] = planned
            if self._steps == SETTLED:
                log.info(beside(self.metrics, trainer.device.type))

    def eval_step(self, batch: Any, microbatches: int | None = None, local: bool = False) -> torch.Tensor:
        """The loss of a batch as the model in eval mode computes it (no dropout), without gradients.

        Forward-only programs, cut as those that train, run pipelined: no rank has the whole model, nothing is saved,
        `.grad` stays as it is. The model is captured once more for it, in eval mode, at the first call. All ranks call
        it. The model's own mode is as before afterwards.

        Args:
            batch: As for `train_step`.
            microbatches: As for `train_step`.
            local: As for `train_step`.

        Returns:
            The loss of the whole batch: a tensor without dimensions, the same on every rank.

        Raises:
            InputError: As for `train_step`.
        """
        own = self._evaluation
        with evaluated(self.model), torch.no_grad():
            return own._step(EVALUATION, batch, own._options(microbatches or self.options.microbatches), local)

    @property
    def _evaluation(self) -> CompiledModel:
        """What evaluates, for the training programs of now. All ranks call it."""
        self._current()
        training = self._programs
        if self._evaluating is None or self._evaluating._training is not training:
            options = options_for(self.options)
            compiler = Compiler(self.model, store() if self._cache else None, gradients=False)
            made = CompiledModel(
                self._model, options, self._example, None, compiler, self._cache, self._check, self._timeout
            )
            made.progress, made._dividing, made._training = self.progress, self._dividing, training
            self._evaluating = made
        return self._evaluating

    def _has_changed(self) -> bool:
        """Whether programs are for the model as it was."""
        return bool(self._programs.guards.changed())

    def _current_programs(self) -> ProgramSet:
        """The programs of the model as it is: compiled anew where it has changed since, without tracing where only
        what trains has.
        """
        programs = self._programs
        was = programs.guards.model
        if was is None or was.holds():
            return programs
        changed = was.changed()
        if changed:
            log.info("%s has changed since it was compiled: %s", type(self.model).__name__, changed)
            if changed.structure:
                self._compiler = Compiler(self.model, store() if self._cache else None, self._training is None)
            self._before = None if changed.parameters else programs.trained
            self._was = None
            self._made = ProgramSet(
                self.compiler, self._directory, self._before, self.checks, None, self._timeout, programs.met,
                self._training, self._features,
            )  # fmt: skip
        else:
            programs.look()
        return self._programs

    def _check_cut(self, batch: Any, trainer: Trainer, parts: int) -> None:
        if parts > 1 and not isinstance(batch, (list, tuple)):
            whole = {item.name for item in trainer.program.manifest.inputs if item.whole}
            self._dividing.check(batch, parts, self.compiler, whole)

    def _complete(self, matches: Sequence[Match], trainer: Trainer) -> list[dict[str, Any]]:
        """Microbatches as the runtime takes them. InputError if one's placeholders do not fit its features."""
        return [trainer.reads(one) for one in self._programs.checked_places(matches)]

    def ahead(self, batches: Iterable[Any], depth: int = 1) -> Iterator[Any]:
        """The batches, in order, each with its context-parallel plans made while the batch before is trained on:

            for batch in compiled.ahead(loader):
                loss = compiled.train_step(batch)

        One thread fetches and plans; an error of the loader is raised in place of its batch. Plans and results are
        those of `train_step` alone: a batch that is changed after all, or has a length that was not compiled yet, is
        planned in its step; so is that of a model whose own code runs before the step (see docs/models.md). Without cp
        it only fetches ahead.

        Args:
            batches: A loader, or anything that gives batches.
            depth: How many batches ahead.

        Yields:
            The batches.

        Raises:
            InputError: depth is less than 1.
        """
        if depth < 1:
            raise InputError(f"depth is {depth}", "ahead", "pass a whole number of at least 1")
        if self._example is not None:
            self.trainer()  # what batches are planned for

        def prepare(batch: Any) -> None:
            if self._programs.replays:  # which change the model for a while
                return
            ready = self._ready(batch, self.options)
            with self._programs.compiling:
                matches = self._programs.match(ready)
                trainer = self._programs.serves(matches, self.options)
                if trainer is None:
                    return
                complete = self._complete(matches, trainer)
            trainer.prepare(complete, depth)

        return ahead(batches, prepare, depth)

    def timeline(self, batch: Any, microbatches: int | None = None) -> Timeline:
        """One `train_step` that also records when every rank ran what; see `csc timeline`. All ranks call it.

        A first step is slower than later ones (memory, kernels and imports are new): if this model has made none, one
        is made before, whose gradients are dropped.

        Args:
            batch: As for `train_step`.
            microbatches: As for `train_step`.

        Returns:
            Times in seconds since the step began, of the first replica. Gradients are added as by `train_step`. On a
                GPU an action's time is that of its launch.
        """
        if not self._steps:
            self._warm_up(batch, microbatches)
        trainer = self.trainer(batch, microbatches)
        before, trainer.trace = trainer.trace, True
        try:
            self.train_step(batch, microbatches)
        finally:
            trainer.trace = before
        return timeline(gathered(trainer.timeline), trainer.program.manifest)

    def _warm_up(self, batch: Any, microbatches: int | None) -> None:
        """A step that leaves gradients and random numbers as they were."""
        held = [(parameter, parameter.grad) for parameter in self.parameters()]
        state = torch.get_rng_state()
        self.zero_grad()
        try:
            self.train_step(batch, microbatches)
        finally:
            torch.set_rng_state(state)
            for parameter, gradient in held:
                parameter.grad = gradient

    def _check_batch(self, batch: Any, own: bool = False) -> None:
        """own: there is no example in it for other ranks."""
        if self._example is None and own:
            return
        if self._example is None:
            self._example = batch
        check_entries(self.example, batch, self.model)

    def _current(self) -> Trainer:
        return self._programs.last or self.trainer()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what trains on this process' ranks, under the model's own names. With `zero`, of several
        processes each has its shard of each parameter, with the gradient of that.
        """
        return self._current().named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What trains on this process' ranks; give it to an optimizer.

        On a rank of frozen layers only: one parameter without elements, since torch.optim refuses an empty list.
        """
        own = list(self._current().parameters())
        return iter(own or [self._nothing])

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], parameters: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer over what trains on this process' ranks: `compiled.optimizer(torch.optim.AdamW, lr=1e-4)`.

        make: a class of torch.optim or like one, or a function from parameters to an optimizer. parameters: as torch
        takes them (groups, or pairs with names), out of `parameters()` or `named_parameters()`; None: all. options:
        for `make`. Where ranks divide parameters (tp, zero), it is tried out first whether the optimizer works entry by
        entry. Returns torch's own object. InputError if it does not, or is given parameters of another process.
        """
        own = self.parameters() if parameters is None else parameters
        return make_optimizer(self._current(), make, own, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this process' parameters."""
        self._current().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients, over all ranks. All ranks call it.

        Args:
            max_norm: The largest 2-norm that all gradients together may have.

        Returns:
            The norm before: a tensor without dimensions, the same on every rank.
        """
        norm = self._current().clip_grad_norm_(max_norm)
        self.metrics["grad_norm"] = float(norm)
        return norm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This process' parameters by name, or what it trains of them."""
        return self._current().state_dict()

    def load(self, path: str | Path, loader: Any = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read the weights of this process' ranks from safetensors: a file, or a directory as `save` or HF write it.

        Of a directory's shards only the tensors that these ranks hold are read, and those that the step does not use
        (where they are there), so that a later `save` has them right. All ranks call it.

        A model on the meta device stays there, and each rank makes its own parameters only. What the step does not use
        is then kept by the rank that saves it.

        Args:
            path: A safetensors file, or a directory with one or with shards and an index.
            loader: Put where it was when `save(directory, loader=...)` wrote `path`.
            optimizer: Given the state that `save(directory, optimizer=...)` wrote there, on whatever mesh.

        Raises:
            InputError: A tensor is missing, of another shape or dtype, or damaged; or the optimizer's state is of
                another optimizer or of other weights, which are loaded then.
        """
        persistence.load(path, self._saved(loader, optimizer))
        self._programs.look()  # what the step does not use may have got values for the first time

    def save(self, directory: str | Path, loader: Any = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write the weights as safetensors; each rank writes what it owns. All ranks call it.

        Parameters that the step does not use are written as they are: the directory holds the whole model. Of a
        transformers model it is one that `from_pretrained` reads; else names are the model's own.

        Args:
            directory: Where to. What was saved there before is replaced once all is written.
            loader: Whose position is written too, of each share of the samples by one rank; anything with state_dict()
                and load_state_dict(), such as torchdata's StatefulDataLoader.
            optimizer: Whose state is written too, by the names of parameters: `load` gives it to an optimizer on any
                mesh.

        Raises:
            InputError: A file is where a directory is to be made, or it cannot be written.
        """
        persistence.save(directory, self._saved(loader, optimizer))

    def _saved(self, loader: Any, optimizer: torch.optim.Optimizer | None) -> Saved:
        trainer = self._current()
        trainers = [trainer]
        if dist.is_initialized() and dist.get_world_size() > 1:
            trainers += self._programs.trainers  # what those use is trained on another rank, not in this copy
        form = format_of(self.model, {spec.name for one in trainers for spec in one.program.manifest.parameters})
        return Saved(self.model, trainer, form, self.options.mesh, loader, optimizer)

    def save_adapter(self, directory: str | Path) -> None:
        """Write a PEFT model's adapters in PEFT's own format: adapter_model.safetensors and adapter_config.json.

        `PeftModel.from_pretrained(base_model, directory)` reads them. All ranks call it, the first one writes.

        Args:
            directory: Where to.

        Raises:
            InputError: The model is not PEFT's.
        """
        persistence.save_adapter(self.model, self.gather, directory)
