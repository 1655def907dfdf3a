"""What commands, reports and planners read of a compiled model, which takes no step for it.

inspected.history(batch) -> [Program]         .program           of the example      .write(directory, ...)
inspected.problem(microbatch) -> Problem      .divided(microbatch) -> Program         traced, not compiled
inspected.microbatch, .microbatches(batch)    as steps divide batches                 .complete(batch)
inspected.step_without_chance(batch) -> EagerStep  .options_text      in a few words      .progress, while it compiles
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from csc.check.eager import EagerStep
from csc.check.first import step_of
from csc.codegen.write import checked_ranks
from csc.driver.compiler import Progress
from csc.driver.entries import fullest
from csc.driver.steps import Steps
from csc.errors import InputError
from csc.ir.program import Program
from csc.passes.recompute import AUTO, saves_of
from csc.planning.problem import Problem


class Inspected:
    """Of what makes these steps."""

    def __init__(self, steps: Steps) -> None:
        self._programs, self._given, self._steps, self._options = steps.programs, steps.given, steps, steps.options()

    @property
    def microbatch(self) -> dict[str, Any]:
        """The example's first microbatch of those with the most entries; all of the example if none has all entries."""
        return self._given.microbatch(self._options)

    def microbatches(self, batch: Any) -> list[dict[str, Any]]:
        """What a step divides a batch into, replica after replica."""
        return self._given.padded(self._given.ready(batch, self._options))

    def complete(self, batch: Any) -> list[dict[str, Any]]:
        """The microbatches of a batch as the runtime takes them. InputError: one does not fit its program."""
        trainer = self._steps.trainer(batch, check=False)
        return self._steps.complete(self._programs.set.match(self.microbatches(batch)), trainer)

    @property
    def progress(self) -> Progress:
        """Called with the name of each step of a compilation."""
        return self._programs.progress

    @progress.setter
    def progress(self, tell: Progress) -> None:
        self._programs.progress = tell

    @property
    def options_text(self) -> str:
        """The mesh, the microbatches and what is frozen."""
        options = self._options
        many = "microbatch" if options.microbatches == 1 else "microbatches"
        frozen = f", frozen: {', '.join(options.freeze)}" if options.freeze else ""
        return f"{options.mesh}, {options.microbatches} {many}{frozen}"

    @property
    def mesh_text(self) -> str:
        """How csc chose the mesh; "" if it did not."""
        chosen = self._programs.chosen
        return chosen[1] if chosen is not None and chosen[0] == self._options.mesh else ""

    def prepare(self) -> None:
        """Compile for the example batch, unless the cache has the program."""
        self._programs.current().compiled.prepare(self.microbatch, self._options, self._programs.progress)

    @property
    def program(self) -> Program:
        """The finished Program for the example batch."""
        return self._programs.current().compiled.finished(self.microbatch, self._options, self._programs.progress)

    def history(self, batch: Any, microbatches: int | None) -> list[Program]:
        """The Program after capture and each pass, for a batch's fullest microbatch; None: the example's."""
        options = self._steps.options(microbatches)
        ready = self._given.ready(self._given.example if batch is None else batch, options)
        return self._programs.current().compiled.history(fullest(ready), options, self._programs.progress)

    def problem(self, microbatch: Mapping[str, Any]) -> Problem:
        """What this microbatch takes of every region: seconds and bytes for planners. It is traced, not compiled.

        Regions for which `recompute="auto"` decided keep what it decided for the example.
        """
        options = self._options
        if any(choice == AUTO for _, choice in options.recompute):
            options = replace(options, recompute=saves_of(self.program))
        return self._programs.current().compiled.problem(microbatch, options, self._programs.progress)

    def divided(self, microbatch: Mapping[str, Any]) -> Program:
        """The Program of a microbatch after pass `split`: F, B and W of every region, which is what is costed."""
        return self._programs.current().compiled.divided(microbatch, self._options, self._programs.progress)[1]

    def step_without_chance(self, batch: Any) -> EagerStep:
        """Loss and gradients of one step in which random numbers are constants, unchecked; `.grad` stays as it is. For
        comparisons, in one process.
        """
        self._given.check(batch)
        return step_of(self._steps.trainer(batch, check=False), self.complete(batch))

    def of_first(self, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        """What `make` returns on the first rank, on every rank. All ranks call it; errors are raised on all."""
        return self._programs.set.of_first(make, self._options)

    def write(self, directory: str | Path, with_weights: bool, ranks: Iterable[int] | None) -> Path:
        """Write the program directory of the example. InputError if a directory cannot be one for it."""
        wanted = None if ranks is None else checked_ranks(self._options.mesh, ranks)
        if self._programs.settings.features is not None:
            raise InputError(
                "its steps take the features of a frozen encoder, which csc.run does not make",
                str(directory),
                "compile without cache_features and encode_ahead to write a directory",
            )
        compiled, progress = self._programs.current().compiled, self._programs.progress
        guards = compiled.finished(self.microbatch, self._options, progress).guards
        if guards is not None and guards.decisions:
            raise InputError(
                f"the model decides by its batch, and a directory is for one answer: {'; '.join(guards.answers)}",
                str(directory),
                "train with compiled.train_step, which asks every batch; or pass the answer in as a plain value",
            )
        return compiled.write(self.microbatch, self._options, Path(directory), progress, with_weights, wanted)
