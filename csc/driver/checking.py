"""Which programs of a model are due to be compared with eager PyTorch, and how the ranks go about it.

Terms
  due        a program that nobody has compared yet, in this process or, as the cache knows, in another
  different  a program that does not train what eager PyTorch trains: nothing is handed out any more

    checking.made(name, program)                         a new program, by the key of its microbatches
    checking.compare(names, batch, ready, options, ...)  DifferenceError, and from then on of `refuse_different`
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from csc.cache.packed import Packed
from csc.capture.guards import Match
from csc.check.first import Checked, check, too_much
from csc.check.one_of_each import check_by_layer
from csc.codegen.directory import install
from csc.driver.compiler import Compiler, Progress
from csc.errors import DifferenceError
from csc.ir.program import Options
from csc.runtime.broadcast import first_makes
from csc.runtime.loaded_program import load
from csc.runtime.meeting import Meeting
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from csc.runtime.words import NOTHING, Said

log = logging.getLogger("csc")

CHECK = "check against eager PyTorch"
Name = Any  # of a program: the key of its microbatches


@dataclass(frozen=True)
class NewProgram:
    """A program for microbatches like the one matched. packed: of all ranks."""

    match: Match
    options: Options
    packed: Packed


class Checking:
    """The programs of one model with one set of options."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._made: dict[int, dict[Name, NewProgram]] = {}  # by the number of microbatches
        self._due: dict[int, set[Name]] = {}
        self._different: DifferenceError | None = None
        self._steady = False  # the model's forward did the same twice
        self.latest: Checked | None = None

    def made(self, name: Name, program: NewProgram) -> None:
        """A new program, which is due."""
        count = program.options.microbatches
        self._made.setdefault(count, {})[name] = program
        self.due(count).add(name)

    def due(self, count: int) -> set[Name]:
        """The programs for so many microbatches that are."""
        return self._due.setdefault(count, set())

    def refuse_different(self) -> None:
        """Raise what a comparison raised."""
        if self._different is not None:
            raise self._different

    def compare(
        self,
        trainer: Trainer,
        names: Sequence[Name],
        ready: Sequence[Mapping[str, Any]],
        batch: Any,
        options: Options,
        meeting: Meeting,
        group: dist.ProcessGroup | None,
        progress: Progress,
        again: bool = False,
        complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        """Compare what these programs train on a batch with eager PyTorch. Of several ranks the first one does, and
        runs them all; all ranks call it. trainer: this process'; group: over which rank 0 tells the others, None: it is
        alone; again: also if it was done; complete: a microbatch as programs take it that run here, None: as the
        compiler has it. DifferenceError, on every rank.
        """
        count = options.microbatches

        def on_one_rank() -> dict[str, bytes]:
            due = [self._made[count][name] for name in dict.fromkeys(names) if name in self.due(count)]
            if again or not all(map(self._known, due)):
                progress(CHECK)
                if too_much(self._compiler.model):
                    made = self._made[count].values()
                    files = {name: text for one in made for name, text in one.packed.files.items()}
                    self.latest = check_by_layer(self._compiler, ready, options, files)
                else:
                    with self._all_ranks(trainer, count, names[0], group) as every:
                        self.latest = check(self._compiler, every, batch, ready, options, self._steady, complete)
                    self._steady = self._steady or not self.latest.skipped
                (log.warning if self.latest.skipped else log.info)("%s", self.latest)
                if not self.latest.skipped:
                    self._keep(due)
            return {}

        def make() -> tuple[Said, None]:
            if group is None:
                on_one_rank()
            else:
                first_makes(on_one_rank, group)
            return NOTHING, None

        try:
            meeting.hold("check", make)
        except DifferenceError as error:
            self._different = error
            raise
        self.due(count).difference_update(names)

    @contextmanager
    def _all_ranks(
        self, trainer: Trainer, count: int, name: Name, group: dist.ProcessGroup | None
    ) -> Iterator[Trainer]:
        """All ranks in this process, with the model's weights, in the programs that decide as the one of this name."""
        if group is None:
            yield trainer
            return
        weights = dict(self._compiler.model.named_parameters())
        with tempfile.TemporaryDirectory(prefix="csc-check-") as folder:
            programs = []
            answers = self._made[count][name].match.answers
            alike = [made for made in self._made[count].values() if made.match.answers == answers]
            for number, made in enumerate(alike):
                directory = Path(folder) / str(number)
                install(made.packed.files, directory, made.match.batch)
                programs.append(load(directory))
            found = Trainer(programs[0], weights, InProcess(programs[0]))
            for program in programs[1:]:
                found.add(program)
            yield found

    def _known(self, made: NewProgram) -> bool:
        """Whether the cache knows that the program was compared."""
        return bool(self._compiler.kept.checked(made.match, made.options))

    def _keep(self, programs: Sequence[NewProgram]) -> None:
        for made in programs:
            self._compiler.kept.keep_checked(str(self.latest), made.match, made.options)
