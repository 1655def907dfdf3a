"""The programs of a model as it is now: its compiler, and the set of programs, made anew where the model has changed.

programs = ModelPrograms(model, settings)           model: or a function that makes one
programs.compiler                                    of the model; a function is called once
programs.set: ProgramSet                             as it was last
programs.current() -> ProgramSet                     for the model as it is
programs.after(directory, check), .evaluating()      those of the same model with other options, and in eval mode
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from csc.cache.store import store
from csc.capture.model_guards import Changed, ModelGuards
from csc.check.compiling import checks
from csc.driver.compiler import Compiler, Progress, quiet
from csc.driver.program_set import MadeFeatures, ProgramSet
from csc.driver.wrapped import refuse_wrapped
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.runtime.trainer import Trainer

log = logging.getLogger("csc")

Factory = Callable[[], nn.Module]


@dataclass(frozen=True)
class Settings:
    """cache: whether programs are kept on disk. check: whether new ones are compared with eager PyTorch; a number: and
    at steps of which it is a divisor. timeout: seconds without an answer until a process counts as lost. features:
    how those of frozen encoders come before a step. axes: along which dimension samples of an entry lie, as is told.
    """

    cache: bool
    check: bool | int
    timeout: float = 600.0
    features: MadeFeatures | None = None
    axes: Mapping[str, int] = field(default_factory=dict)


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
        self.training = training
        self.progress: Progress = quiet
        self.chosen: tuple[Mesh, str] | None = None  # the mesh, if csc chose it, and how

    @property
    def name(self) -> str:
        """Of the model's class, or of the function that will make it."""
        made = self._compiler.model if self._compiler is not None else self._model
        return type(made).__name__ if isinstance(made, nn.Module) else getattr(made, "__name__", "a function")

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
                self.settings.features,
            )  # fmt: skip
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
            if changed.structure:
                self._compiler = self._compiler_of(model, self.training is None)
            self._before = None if changed.parameters else programs.trained
            self._was = None
            self._set = ProgramSet(
                self.compiler, self._directory, self._before, bool(self.settings.check), None,
                self.settings.timeout, programs.met, self.training, self.settings.features,
            )  # fmt: skip
        else:
            programs.look()
        return self.set

    def changed(self) -> Changed:
        """What of the model is not as its programs assume. Where that is nothing, though values were replaced by equal
        ones, the guards are for these from now on, and cost microseconds again.
        """
        was = self.set.guards.model
        if was is None or was.holds():
            return Changed()
        found = was.changed()
        if not found:
            self.set.look()
        return found

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
        made = ModelPrograms(self._model, settings, compiler=compiler, training=self.set)
        made.progress = self.progress
        return made
