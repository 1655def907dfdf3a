"""The programs of a model as it is now, and the batches that it is given to run on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csc.cache.model_entries import Packed, packed_bytes, packed_from
from csc.cache.store import store
from csc.capture.batch import device_of, placed, split_batch
from csc.capture.model_guards import Changed, ModelGuards
from csc.check.compiling import checks
from csc.check.eager import Snapshot
from csc.driver.batches import Dividing, Widths, check_entries, fullest, widths_of, with_longest_of_all
from csc.driver.compiler import Compiler, Progress, quiet
from csc.driver.programs import MadeFeatures, ProgramSet
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options
from csc.runtime.parameters import OwnParameters
from csc.runtime.survival import Survival, Survive
from csc.runtime.trainer import Trainer
from csc.temporary import TemporaryFolder
from csc.torch_private.process_state import process_state_kept

# --- Models that another library has in its hands already ------------------------------------------------------------


WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")  # have .module
PARALLEL = "pass the model itself: the mesh says what is parallel, zero= what data-parallel ranks divide"


def refuse_wrapped(model: nn.Module) -> None:
    """InputError for a model whose parameters or calls are not its own any more."""
    name = type(model).__name__
    if "_orig_mod" in dict(model.named_children()):
        raise InputError(
            "the model is in torch.compile already, which names its parameters anew", "compile",
            "pass the model itself: csc compiles it",
        )  # fmt: skip
    if name in WRAPPERS:
        raise InputError(f"the model is in {name} already", "compile", f"{PARALLEL}; here it is model.module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("the model is compiled by TorchScript already", "compile", "pass the model itself")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                "this module is compiled by TorchScript already",
                path,
                "put the module itself in the model's place for it",
            )
    for path, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise InputError(
                f"the parameter {path!r} is a DTensor: the model is divided over ranks already (fully_shard, "
                "parallelize_module)", "compile", PARALLEL,
            )  # fmt: skip


# --- The programs of a model as it is now ----------------------------------------------------------------------------
#
# The compiler and the set of programs are made anew where the model has changed.


log = logging.getLogger("csc")

Factory = Callable[[], nn.Module]


@dataclass(frozen=True)
class Settings:
    """cache: whether programs are kept on disk. check: whether new ones are compared with eager PyTorch; a number: and
    at steps of which it is a divisor. timeout: seconds without an answer until a process counts as lost. features:
    how those of frozen encoders come before a step. axes: along which dimension samples of an entry lie, as is told.
    survive: which ranks may die.
    """

    cache: bool
    check: bool | int
    timeout: float = 600.0
    features: MadeFeatures | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    survive: Survive | None = None

    @property
    def failures(self) -> int:
        """The number of ranks that may be killed."""
        return 0 if self.survive is None else self.survive.failures


class ModelPrograms:
    """With one set of options.

    progress: called with the name of each step of a compilation. before: what trained these parameters until now. was:
    the model when the compiler captured it, for other options. training: the programs that train what these evaluate.
    """

    def __init__(
        self,
        model: nn.Module | Factory,
        settings: Settings,
        directory: Path | None = None,
        compiler: Compiler | None = None,
        before: Trainer | None = None,
        was: ModelGuards | None = None,
        training: ProgramSet | None = None,
    ) -> None:
        self._model, self.settings, self._directory = model, settings, directory
        self._compiler, self._before, self._was = compiler, before, was
        self._set: ProgramSet | None = None
        self._ended: Survival | None = None
        self._held: OwnParameters | None = None
        self.training = training
        self.progress: Progress = quiet
        self.chosen: tuple[Mesh, str] | None = None  # the mesh, if csc chose it, and how

    @property
    def name(self) -> str:
        """Of the model's class, or of the function that will make it."""
        model = self._compiler.model if self._compiler is not None else self._model
        return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "a function")

    @property
    def compiler(self) -> Compiler:
        """The compiler of the model; a factory is called here, once."""
        if self._compiler is None:
            model = self._model if isinstance(self._model, nn.Module) else self._model()
            if not isinstance(model, nn.Module):
                raise InputError(
                    f"the factory returned a {type(model).__name__}", "compile", "return the nn.Module to be trained"
                )
            refuse_wrapped(model)
            self._compiler = self._compiler_of(model, self.training is None)
        return self._compiler

    def _compiler_of(self, model: nn.Module, gradients: bool) -> Compiler:
        return Compiler(model, store() if self.settings.cache else None, gradients, axes=self.settings.axes)

    @property
    def set(self) -> ProgramSet:
        """The programs, of the model as it was when they were last asked for."""
        if self._set is None:
            training = self.training
            self._set = ProgramSet(
                self.compiler, self._directory, self._before, bool(self.settings.check), self._was,
                self.settings.timeout, training.met if training is not None else None, training,
                self.settings.features, self.settings.survive, self._held,
            )  # fmt: skip
            self._held = None
        return self._set

    def current(self) -> ProgramSet:
        """The programs of the model as it is: compiled anew where it has changed since, without tracing where only
        what trains has.
        """
        programs = self.set
        was = programs.guards.model
        if was is None or was.holds():
            return programs
        changed = was.changed()
        if changed:
            model = self.compiler.model
            log.info("%s has changed since it was compiled: %s", type(model).__name__, changed)
            self._warn_of_new(changed)
            if changed.structure:
                self._compiler = self._compiler_of(model, self.training is None)
            self._before = None if changed.parameters else programs.trained
            self._was = None
            self._set = ProgramSet(
                self.compiler, self._directory, self._before, bool(self.settings.check), None,
                self.settings.timeout, programs.met, self.training, self.settings.features, self.settings.survive,
            )  # fmt: skip
        else:
            programs.look()
        return self.set

    def _warn_of_new(self, changed: Changed) -> None:
        """An optimizer has the parameters that it was given, and what it lacks stays as it is without a word."""
        flags = {name: parameter.requires_grad for name, parameter in self.compiler.model.named_parameters()}
        new = [name for name in changed.trainable if flags.get(name)]
        if new:
            log.warning(
                "%s trains now%s: an optimizer that was made from compiled.parameters() before does not have it. Make "
                "another, or add it (optimizer.add_param_group)",
                new[0], f", and {len(new) - 1} more" if len(new) > 1 else "",
            )  # fmt: skip

    def changed(self, microbatch: Mapping[str, Any] | None = None) -> Changed:
        """What of the model is not as its programs assume. Where that is nothing, though values were replaced by equal
        ones, the guards are for these from now on, and cost microseconds again. microbatch: on which to ask the model
        whether it has changed by itself.
        """
        was = self.set.guards.model
        if was is None or was.holds():
            return Changed()
        changes, ignored = was.changed(), frozenset[str]()
        if microbatch is not None and was.by_itself(changes):
            changes, ignored = self._but_own(was, changes, microbatch)
        if not changes:
            self.set.look(ignored)
        return changes

    def _but_own(
        self, was: ModelGuards, changes: Changed, microbatch: Mapping[str, Any]
    ) -> tuple[Changed, frozenset[str]]:
        """(Changes without those that forward makes; what it writes whenever it runs). A forward writes counters and
        what it returned last, and makes tables on demand; a user who runs the model has these, and one who puts
        another table in the place of the model's has changed it.
        """
        model = self.compiler.model
        tensors, extra = split_batch(microbatch)

        def run() -> None:
            with torch.no_grad():
                model(**placed(tensors, device_of(model)), **extra)

        try:
            with process_state_kept(), Snapshot(model).in_training():
                run()
                between = ModelGuards(model)
                run()
                ignored = frozenset(between.changed().structure)
                left = Changed(tuple(text for text in changes.structure if text not in ignored))
            with process_state_kept(), Snapshot(model).in_training():
                return Changed() if left and was.makes_the_same(left, run) else left, ignored
        except Exception as reason:  # the user's model
            log.info("whether the model changes by itself is not known, as it fails: %s", reason)
            return changes, frozenset()

    def start_again(self, held: OwnParameters | None, survive: Survive | None) -> None:
        """What ranks share is built anew: others have come, or one is gone. The store of those that were left is still
        asked. held: what this process goes on to step; None: what the model has. survive: from now on.
        """
        self._ended = None if self._set is None else self._set.survival
        self._set, self._before, self._was, self._held = None, None, None, held
        self.settings = replace(self.settings, survive=survive)

    def standby(self, microbatch: Mapping[str, Any], options: Options, later: Options) -> Packed:
        """The program of later options, on every rank, for when it is needed. All ranks call it, with those of now.
        InputError if there is none.
        """
        other = self.after(None, False)

        def make() -> dict[str, bytes]:
            with TemporaryFolder() as folder:
                try:
                    made = other.set.compiled.packed(microbatch, later, Path(folder) / "program", self.progress)
                except InputError as error:  # of a mesh that the user has not written
                    raise InputError(
                        f"when a rank of {options.mesh} is lost the others would go on as {later.mesh}, which cannot "
                        f"be: {error.what}", error.where,
                        "use a mesh of which one rank fewer can be one for this model, or microbatches that shorter "
                        "pipelines can share out evenly; or leave mirror=True out",
                    ) from error  # fmt: skip
                return packed_bytes(made[1], self.compiler.model)

        return packed_from(self.set.of_first(make, options), self.compiler.model)

    def after(self, directory: Path | None, check: bool | int | None) -> ModelPrograms:
        """For other options of the same model: the same traces, the same parameters. check: None: as before."""
        settings = self.settings if check is None else replace(self.settings, check=checks(check))
        programs = self.set
        made = ModelPrograms(
            self._model, settings, directory, self.compiler, programs.trained, programs.guards.model
        )  # fmt: skip
        made.progress, made.chosen = self.progress, self.chosen
        return made

    def anew(self) -> ModelPrograms:
        """As if nothing had been compiled or trained."""
        settings = Settings(self.settings.cache, checks(None), axes=self.settings.axes)
        return ModelPrograms(self._model, settings, self._directory)

    def evaluating(self) -> ModelPrograms:
        """Those that evaluate what these train, captured in eval mode."""
        compiler = self._compiler_of(self.compiler.model, gradients=False)
        settings = replace(self.settings, features=None)
        programs = ModelPrograms(self._model, settings, compiler=compiler, training=self.set)
        programs.progress = self.progress
        return programs


# --- What a compiled model is given to run on: the example, and the batch of each step, divided into microbatches ----


Example = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class GivenBatches:
    """example: a batch, a function that makes one, or None: the first batch of a step is the example then."""

    def __init__(
        self,
        example: Example | Callable[[], Example] | None,
        dividing: Dividing,
        programs: ModelPrograms,
        widths: Widths,
    ) -> None:
        self._example, self.dividing, self._programs, self.widths = example, dividing, programs, widths

    def of(self, programs: ModelPrograms) -> GivenBatches:
        """The same for other programs of the model."""
        return GivenBatches(self._example, self.dividing, programs, self.widths)

    @property
    def known(self) -> bool:
        """Whether there is an example."""
        return self._example is not None

    @property
    def example(self) -> Example:
        """The example batch. InputError: none was given."""
        if callable(self._example):
            self._example = self._example()
        if self._example is None:
            raise InputError(
                "there is no example batch", "compile", "pass example=batch, one batch as your data loader makes it"
            )
        return self._example

    @example.setter
    def example(self, batch: Example) -> None:
        self._example = batch

    def ready(self, batch: Any, options: Options, parts: int | None = None) -> list[dict[str, Any]]:
        """The microbatches of a global batch, replica after replica; a list of them as it is. parts: how many, where it
        is not a global one.
        """
        listed = isinstance(batch, (list, tuple))
        split = [split_batch(microbatch) for microbatch in (batch or [None] if listed else [batch])]
        for number, (tensors, _) in enumerate(split):
            if all(not len(tensor) for tensor in tensors.values() if tensor.dim()) and any(
                t.dim() for t in tensors.values()
            ):
                raise InputError(
                    f"microbatch {number} has no samples" if listed else "the batch has no samples", "batch",
                    "leave the step out on all ranks, or see why the loader gave nothing (drop_last=True)",
                )  # fmt: skip
        if listed:
            return with_longest_of_all([tensors | extra for tensors, extra in split])
        return self.cut(batch, options.microbatches * options.mesh.dp if parts is None else parts)

    def cut(self, batch: Any, parts: int) -> list[dict[str, Any]]:
        """A batch as `parts` microbatches of as many samples each. InputError: an entry cannot be divided."""
        example = self.example if self.known else batch
        listed = example if isinstance(example, (list, tuple)) else [example]
        entries: set[str] = {name for microbatch in listed if isinstance(microbatch, Mapping) for name in microbatch}
        self.dividing.check_names(entries, self._programs.compiler.model)
        return self.dividing.cut(batch, parts, self._programs.compiler)

    def padded(self, ready: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Microbatches, each of its width or of one of the few. InputError: one that is to be padded cannot be."""
        if not self._pads:
            return list(map(dict, ready))
        example, model = self._example_widths, self._programs.compiler.model
        return [self.widths.padded(microbatch, example, self._programs.set.trials, model) for microbatch in ready]

    def untried(self, ready: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
        """Those of the microbatches that a trial would tell of, and the widths; where programs are compared alone."""
        return self.widths.untried(ready, self._example_widths, self._programs.set.trials) if self._pads else []

    @property
    def _pads(self) -> bool:
        """Nobody tries what nobody wants compared."""
        wanted = self.widths.wanted
        return bool(wanted) or (wanted is None and self.known and bool(self._programs.settings.check))

    @property
    def _example_widths(self) -> frozenset[int]:
        return widths_of(self.example) if self.known else frozenset()

    def check_cut(self, batch: Any, trainer: Trainer, parts: int) -> None:
        """InputError if an entry was cut that has no sample dimension, as the program shows."""
        if parts > 1 and not isinstance(batch, (list, tuple)):
            undivided = {item.name for item in trainer.program.manifest.inputs if item.whole}
            self.dividing.check(batch, parts, self._programs.compiler, undivided)

    def check(self, batch: Any, own: bool = False) -> None:
        """InputError for other entries than the example's. own: there is no example in it for other ranks."""
        if not self.known and own:
            return
        if not self.known:
            self._example = batch
        check_entries(self.example, batch, self._programs.compiler.model)

    def microbatch(self, options: Options) -> dict[str, Any]:
        """The example's first microbatch of those with the most entries; all of the example if none has all entries."""
        microbatch = fullest(self.padded(self.ready(self.example, options)))
        if isinstance(self.example, (list, tuple)):
            return microbatch
        tensors, extra = split_batch(self.example)
        return microbatch if microbatch.keys() >= tensors.keys() else {**tensors, **extra}

    def full(self, ready: Sequence[Mapping[str, Any]], options: Options) -> dict[str, Any] | None:
        """The example's fullest microbatch if it has entries that all of these lack."""
        example = fullest(self.example) if isinstance(self.example, (list, tuple)) else self.example
        return None if fullest(ready).keys() >= split_batch(example)[0].keys() else self.microbatch(options)
