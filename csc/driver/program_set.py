"""Programs for microbatches: found in the cache or compiled, written, handed to the other ranks, loaded.

Terms
  served     a signature that the trainer has a program for
  decided    how the first program is cut and placed, and in which order it runs; all later ones of the model follow it
  settled    the options of one program, with what was decided before it

    serving = Serving(compiler, directory)
    serving.trainer(microbatches, options, progress, batch) -> Trainer   with a program for each of them, checked
    serving.history(microbatch, options, progress) -> [Program]          serving.finished(...) -> Program
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from csc.analysis.token_counts import Places
from csc.cache.learning import extends, signature, snapshot, together
from csc.cache.packed import Files, Packed, packed_bytes, packed_from
from csc.cache.switches import tracing_switches
from csc.capture.batch import device_of
from csc.capture.capture import Learned
from csc.capture.guards import decided
from csc.capture.model_guards import State
from csc.check.first import Checked
from csc.check.layers import check_by_layer
from csc.codegen.directory import MANIFEST, contents, install
from csc.codegen.write import of_ranks
from csc.driver.checking import CHECK, Checking, NewProgram
from csc.driver.compiler import Compiler, Progress
from csc.driver.entries import fullest_first
from csc.errors import InputError
from csc.ir.program import Options, Program
from csc.ir.schedule import Schedule, parse
from csc.ir.stored import Unstorable, bound
from csc.runtime.broadcast import first_makes, handing_group
from csc.runtime.launch import setup_distributed, under_torchrun
from csc.runtime.meeting import Meeting
from csc.runtime.program import LoadedProgram, load
from csc.runtime.trainer import Trainer
from csc.runtime.words import NOTHING, Said

log = logging.getLogger("csc")

Made_ = TypeVar("Made_")
CACHED = "program, from the cache"
Microbatch = Mapping[str, Any]
Answers = tuple[str, ...]  # what a microbatch decides (csc.capture.guards)
Key = tuple[Any, int, Answers]  # signature, number of microbatches
Family = tuple[int, Answers]  # number of microbatches


@dataclass
class Decided:
    """stages: the regions of each; placement: the rank of each; entries: of the microbatch that it was decided for;
    schedules: by number of microbatches.
    """

    stages: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    entries: frozenset[str]
    schedules: dict[int, Schedule | None] = field(default_factory=dict)

    def settled(self, options: Options, entries: Set[str]) -> Options:
        """The options for another program, of microbatches with these entries."""
        schedule = self.schedules.get(options.microbatches) or options.schedule
        part = isinstance(schedule, Schedule) and not entries >= self.entries
        return replace(options, cuts=None, stages=self.stages, placement=self.placement, schedule=schedule, part=part)

    def settled_anew(self, options: Options, regions: Sequence[str]) -> Options:
        """The options for a program of other regions: each where it was, a new one with the next one that was there;
        csc decides again if that leaves a stage without any.
        """
        known = {name: stage for stage, names in enumerate(self.stages) for name in names}
        home = [known.get(name) for name in regions]
        for place in reversed(range(len(regions))):
            if home[place] is None:
                home[place] = home[place + 1] if place + 1 < len(regions) else len(self.stages) - 1
        stages = tuple(
            tuple(name for name, at in zip(regions, home) if at == stage) for stage in range(len(self.stages))
        )
        if not all(stages):
            return options
        return replace(options, cuts=None, stages=stages, placement=self.placement)


class Serving:
    """The programs of one model with one set of options but for the number of microbatches."""

    def __init__(
        self,
        compiler: Compiler,
        directory: Path | None,
        before: Trainer | None = None,
        checks: bool = True,
        state: State | None = None,
        timeout: float = 600.0,
        meeting: Meeting | None = None,
    ) -> None:
        """directory: where programs are written; before: what trained these parameters until now; checks: whether
        programs are compared with eager PyTorch before they run; state: of the model when the compiler captured it;
        timeout: seconds without an answer until another process counts as lost; meeting: of all ranks, if there is one.
        """
        self._timeout = timeout
        self._meeting = meeting
        self._compiler = compiler
        self._directory = directory
        self._temporary: tempfile.TemporaryDirectory | None = None  # removed with this object
        self._decided: dict[Answers, Decided] = {}  # the first answers' is where others start
        self._settled: dict[Key, Options] = {}
        self._histories: dict[Key, list[Program]] = {}
        self._finished: dict[Key, Program] = {}
        self._packed: dict[Key, Packed] = {}
        self._trainers: dict[Family, Trainer] = {}  # the first of a number of microbatches knows all parameters
        self._served: dict[int, set[Any]] = {}
        self._places: dict[Any, Places] = {}
        self._known = Learned()  # what the programs brought along: the same on every rank
        self._group: dist.ProcessGroup | None = None
        self._before = before
        self._checks = checks
        self.checking = Checking(compiler)
        self.state = state  # the model as the programs know it
        self.last: Trainer | None = None
        self.compiling = threading.RLock()  # a step may be learning what decides which program a batch needs

    # --- programs ------------------------------------------------------------------------------------------------

    def prepare(self, microbatch: Microbatch, options: Options, progress: Progress) -> None:
        """Find the program of a microbatch in the cache, or compile it."""
        key = self._key(microbatch, options)
        if key in self._histories or key in self._finished or key in self._packed:
            return
        settled = self._options(key, options)
        packed = self._compiler.kept.program(microbatch, settled, self._compiler.learned)
        if packed is None:
            self.finished(microbatch, options, progress)
            return
        progress(CACHED)
        self._take(packed, microbatch, options, settled)

    def _take(self, packed: Packed, microbatch: Microbatch, options: Options, settled: Options) -> None:
        """Go on with a program that was made elsewhere."""
        self._compiler.adopt(packed.learned)
        key = self._key(microbatch, options)
        self._packed[key] = packed
        stages = json.loads(packed.files[MANIFEST])["stages"]
        self._settle(
            key,
            settled,
            tuple(tuple(stage["regions"]) for stage in stages),
            tuple(stage["rank"] for stage in stages),
            parse(packed.files["schedule.txt"].decode()),
        )

    def history(self, microbatch: Microbatch, options: Options, progress: Progress) -> list[Program]:
        """The Program after capture and each pass; traced for it if it came from the cache."""
        key = self._key(microbatch, options)
        if key not in self._histories:
            settled = self._options(key, options)
            settled, history = self._planned(microbatch, options, settled, self._compiler.compile, progress)
            key = self._key(microbatch, options)  # the capture may have shown what else decides
            self._histories[key] = history
            self._settle_as(key, settled, history[-1])
        return self._histories[key]

    def finished(self, microbatch: Microbatch, options: Options, progress: Progress) -> Program:
        """The Program after the last pass."""
        key = self._key(microbatch, options)
        if key in self._histories:
            return self._histories[key][-1]
        if key not in self._finished:
            settled = self._options(key, options)
            settled, program = self._planned(microbatch, options, settled, self._compiler.finished, progress)
            key = self._key(microbatch, options)
            self._finished[key] = program
            self._settle_as(key, settled, program)
        return self._finished[key]

    def _planned(
        self, microbatch: Microbatch, options: Options, settled: Options,
        make: Callable[[Microbatch, Options, Progress], Made_], progress: Progress,
    ) -> tuple[Options, Made_]:  # fmt: skip
        """(options, what is made with them). Where a microbatch decides what none before it did, its program may have
        other regions than the first: then each stays in its stage as far as that goes.
        """
        answers = decided(self._compiler.complete(microbatch))
        if not self._decided or answers in self._decided:
            return settled, make(microbatch, settled, progress)
        traced = self._compiler.trace(microbatch, options, progress).program
        if decided(self._compiler.complete(microbatch)) in self._decided:  # as the trace has shown
            settled = self._options(self._key(microbatch, options), options)
            return settled, make(microbatch, settled, progress)
        first = next(iter(self._decided.values()))
        settled = first.settled_anew(options, [region.name for region in traced.regions])
        try:
            return settled, make(microbatch, settled, progress)
        except InputError as reason:
            if settled is options:
                raise
            log.info("stages are planned anew for what this batch decides: %s", reason)
            return options, make(microbatch, options, progress)

    def _key(self, microbatch: Microbatch, options: Options) -> Key:
        complete = self._compiler.complete(microbatch)
        return self._compiler.signature(complete), options.microbatches, decided(complete)

    def _options(self, key: Key, options: Options) -> Options:
        if key in self._settled:
            return self._settled[key]
        known = self._decided.get(key[2]) or next(iter(self._decided.values()), None)
        return known.settled(options, _entries(key)) if known is not None else options

    def _settle_as(self, key: Key, settled: Options, program: Program) -> None:
        stages = tuple(stage.regions for stage in program.stages)
        self._settle(key, settled, stages, tuple(stage.rank for stage in program.stages), program.schedule)

    def _settle(
        self,
        key: Key,
        settled: Options,
        stages: tuple[tuple[str, ...], ...],
        placement: tuple[int, ...],
        schedule: Schedule | None,
    ) -> None:
        if self.state is None:
            self.look()
        self._settled.setdefault(key, settled)
        own = self._decided.setdefault(key[2], Decided(stages, placement, _entries(key)))
        if not settled.part:
            own.schedules.setdefault(settled.microbatches, schedule)

    def write(
        self,
        microbatch: Microbatch,
        options: Options,
        directory: Path,
        progress: Progress,
        with_weights: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> Path:
        """Write the program directory of a microbatch, of these ranks alone if any are named. InputError if something
        else is there.
        """
        program = self.finished(microbatch, options, progress)
        key = self._key(microbatch, options)
        complete = self._compiler.complete(microbatch)
        written = self._compiler.emit(program, self._settled[key], directory, complete, with_weights, ranks)
        if key not in self._packed and ranks is None:
            self._packed[key] = self._pack(microbatch, key, written)
        return written

    def _pack(self, microbatch: Microbatch, key: Key, directory: Path) -> Packed:
        """What was just written to a directory, kept."""
        traced = self._compiler.trace(microbatch, self._settled[key])
        learned = snapshot(self._compiler.learned)
        packed = Packed(contents(directory), traced.places, learned, bound(traced.program))
        self._compiler.kept.keep_program(packed, microbatch, self._settled[key])
        return packed

    # --- training ------------------------------------------------------------------------------------------------

    def trainer(
        self,
        ready: Sequence[Microbatch],
        options: Options,
        progress: Progress,
        batch: Any = None,
        full: Microbatch | None = None,
    ) -> Trainer:
        """The runtime with a program for each of these microbatches; missing ones are found or compiled, and compared
        with eager PyTorch if nobody has done so. All ranks call it with the same.

        batch: what the microbatches were made of; None: nothing is compared. full: a microbatch with all entries, if
        these lack some: its program is then made first, which has the stages for all. DifferenceError if a program does
        not train what eager PyTorch does.
        """
        with self.compiling:
            self.checking.refuse_different()
            new = False
            first = [full] if full is not None and options.microbatches not in self._trainers else []
            for microbatch in [*first, *fullest_first(ready)]:
                if not self._serves(microbatch, options):
                    self.meeting(options)
                    self._gather_weights()
                    self._add(microbatch, options, progress)
                    new = True
            if self._checks and batch is not None:
                self.check(ready, options, batch, progress, again=False)
            if new:
                self.look()
            return self.use(self._trainers[self._family(ready, options)])

    def look(self) -> None:
        """Keep how the model is now: its programs are for that."""
        self.state = State(self._compiler.model, self._known.written | self._compiler.learned.written, tracing_switches)

    def check(
        self, ready: Sequence[Microbatch], options: Options, batch: Any, progress: Progress, again: bool = True
    ) -> None:
        """Compare what these microbatches train with eager PyTorch. All ranks call it. again: also if that was done.

        DifferenceError, on every rank, then and from then on.
        """
        if again or self._are_due(ready, options):
            complete = self.checked_places(ready)
            names = [self._signature(microbatch) for microbatch in complete]
            trainer = self._trainers[self._family(ready, options)]
            self.checking.compare(
                trainer, names, ready, batch, options, self.meeting(options), self._group, progress, again
            )

    def check_by_layer(self, ready: Sequence[Microbatch], options: Options, progress: Progress) -> Checked:
        """Compare the program of the first of these with eager PyTorch though the model has no weights: one layer of
        each kind. DifferenceError. The cache remembers it.
        """
        first, kept, learned = ready[0], self._compiler.kept, self._compiler.learned
        key = self._key(first, options)
        if kept.checked(first, self._options(key, options), learned):
            return Checked(skipped="that was done before, as the cache knows")
        with tempfile.TemporaryDirectory(prefix="csc-check-") as folder:
            written = self.write(first, options, Path(folder) / "program", progress, ranks=[0])
            progress(CHECK)
            found = check_by_layer(self._compiler, ready, options, contents(written))
        if not found.skipped:
            settled = self._settled[self._key(first, options)]
            kept.keep_checked(str(found), first, settled, snapshot(self._compiler.learned))
        return found

    def _are_due(self, ready: Sequence[Microbatch], options: Options) -> bool:
        """Whether a program of one of these has not been compared."""
        due = self.checking.due(options.microbatches)
        return bool(due) and any(self._signature(self.complete(microbatch)) in due for microbatch in ready)

    def handed_out(self, ready: Sequence[Microbatch], options: Options) -> Trainer | None:
        """The trainer, if it has a program for each of these, compared if that is wanted. DifferenceError if one was
        found to be wrong.
        """
        self.checking.refuse_different()
        trainer = self.serves(ready, options)
        return None if self._checks and self._are_due(ready, options) else trainer

    def serves(self, ready: Sequence[Microbatch], options: Options) -> Trainer | None:
        """The trainer, if it has a program for each of these."""
        served = all(self._serves(microbatch, options) for microbatch in ready)
        return self._trainers.get(self._family(ready, options)) if served else None

    def use(self, trainer: Trainer) -> Trainer:
        """What trains a batch. Whoever asks for parameters is given those of all programs."""
        self.last = next(one for one in self._trainers.values() if one.microbatches == trainer.microbatches)
        return trainer

    def _family(self, ready: Sequence[Microbatch], options: Options) -> Family:
        """InputError if the microbatches of a step decide differently."""
        answers = list(dict.fromkeys(decided(self.complete(microbatch)) for microbatch in ready))
        if len(answers) > 1:
            differing = [text for one in answers[:2] for text in one if text not in set(answers[0]) & set(answers[1])]
            raise InputError(
                f"the microbatches of one step decide differently: {', '.join(differing[:4])}", "batch",
                "give each step microbatches that decide alike (sort the data by what it has, text alone or with "
                "pictures), or use one microbatch and dp=1",
            )  # fmt: skip
        return options.microbatches, answers[0]

    def _serves(self, microbatch: Microbatch, options: Options) -> bool:
        return self._signature(self.complete(microbatch)) in self._served.get(options.microbatches, ())

    @property
    def replays(self) -> bool:
        """Whether completing a microbatch may run the model's own code."""
        return self._known.replays

    def complete(self, microbatch: Microbatch) -> dict[str, Any]:
        """The microbatch with what functions of the model that run on the host make of it."""
        return self._known.completed(self._compiler.model, microbatch)

    def checked_places(self, ready: Sequence[Microbatch]) -> list[dict[str, Any]]:
        """Microbatches that are served, completed. InputError if one's placeholders do not fit its features."""
        complete = [self.complete(microbatch) for microbatch in ready]
        for number, microbatch in enumerate(complete):
            name = f"microbatch {number}" if len(complete) > 1 else "the batch"
            self.places(microbatch).check(microbatch, name)
        return complete

    def places(self, complete: Microbatch) -> Places:
        """What to ask a completed microbatch that is served."""
        return self._places[self._signature(complete)]

    def _signature(self, complete: Microbatch) -> Any:
        return signature(self._known, complete)

    def _add(self, microbatch: Microbatch, options: Options, progress: Progress) -> None:
        start = time.perf_counter()
        count = options.microbatches
        directory = self._program_directory(sum(map(len, self._served.values())))
        meeting = self.meeting(options)

        def make() -> tuple[Said, tuple[Packed, str, LoadedProgram]]:
            packed, how = self._shared(microbatch, options, directory, progress)
            return NOTHING, (packed, how, load(directory, _own_rank()))

        packed, how, loaded = meeting.hold("compile", make)
        if extends(packed.learned, self._known):
            self._known = together(packed.learned, self._known)
        complete = self.complete(microbatch)
        family, name = (count, decided(complete)), self._signature(complete)
        if family in self._trainers:
            self._trainers[family].add(loaded)
        else:
            own = dict(self._compiler.model.named_parameters())
            made = Trainer(loaded, weights=own, timeout=self._timeout, meeting=meeting)
            first = next((one for (number, _), one in self._trainers.items() if number == count), None)
            if first is not None:
                first.know(made)
            self._trainers[family] = made
        self._served.setdefault(count, set()).add(name)
        self._places[name] = packed.places
        sizes = {name: list(value.shape) for name, value in microbatch.items() if isinstance(value, torch.Tensor)}
        log.info("a program for microbatches of %s, %s in %.1f s", sizes, how, time.perf_counter() - start)
        complete, settled = self._compiler.complete(microbatch), self._settled[self._key(microbatch, options)]
        self.checking.made(name, NewProgram(microbatch, complete, settled, packed))

    def _shared(
        self, microbatch: Microbatch, options: Options, directory: Path, progress: Progress
    ) -> tuple[Packed, str]:
        """The program, written to the directory, and how it came about. Of several ranks the first one makes it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._made(microbatch, options, directory, progress)
        if self._group is None:
            self._group = handing_group()
        made: list[tuple[Packed, str]] = []

        def make() -> Files | None:
            made.append(self._made(microbatch, options, directory, progress))
            try:
                return packed_bytes(made[0][0], self._compiler.model)
            except Unstorable as reason:
                log.info("every rank compiles for itself: the program holds %s", reason)
                return None

        files = first_makes(make, self._group)
        if made:
            return made[0]
        if files is None:
            return self._made(microbatch, options, directory, progress)
        packed = packed_from(files, self._compiler.model)
        self._take(packed, microbatch, options, self._options(self._key(microbatch, options), options))
        return self._made(microbatch, options, directory, progress)[0], "from rank 0"

    def _made(
        self, microbatch: Microbatch, options: Options, directory: Path, progress: Progress
    ) -> tuple[Packed, str]:
        self.prepare(microbatch, options, progress)
        key = self._key(microbatch, options)
        complete = self._compiler.complete(microbatch)
        packed, how = self._packed.pop(key, None), "from the cache"
        own = _own_rank()
        if packed is None:
            program = self.finished(microbatch, options, progress)
            self._compiler.emit(program, self._settled[key], directory, complete)
            packed, how = self._pack(microbatch, key, directory), "made"
            if own is None:
                return packed, how
        files = packed.files if own is None else of_ranks(packed.files, options.mesh, own)
        install(files, directory, complete)
        return packed, how

    def _program_directory(self, index: int) -> Path:
        """Where the program of the index-th signature goes; every process of a group writes its own."""
        if self._directory is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="csc-")
        home = self._directory or Path(self._temporary.name) / "program"  # type: ignore[union-attr]
        rank = f"-rank{dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else ""
        return home.with_name(f"{home.name}{rank}{f'-{index}' if index else ''}")

    @property
    def met(self) -> Meeting | None:
        """The meeting of all ranks, for programs that follow these."""
        return self._meeting

    def meeting(self, options: Options) -> Meeting:
        """Where ranks agree on what they do. All ranks call it; it joins the group of processes, if there is one."""
        self._join_group(options)
        if self._meeting is None:
            several = dist.is_initialized() and dist.get_world_size() > 1
            self._meeting = Meeting.of_all(self._timeout) if several else Meeting()
        return self._meeting

    def _join_group(self, options: Options) -> None:
        if under_torchrun() and not dist.is_initialized():
            setup_distributed(device_of(self._compiler.model).type, self._timeout)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1 and world != options.mesh.size:
            raise InputError(
                f"{world} processes were started and the mesh has {options.mesh.size} ranks", "mesh",
                f"start with --nproc-per-node {options.mesh.size}, or change the mesh",
            )  # fmt: skip

    # --- weights -------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> Trainer | None:
        """What has trained the parameters last."""
        return self.last or self._before

    @property
    def trainers(self) -> list[Trainer]:
        """One for each number of microbatches."""
        return list(self._trainers.values())

    def _gather_weights(self) -> None:
        """Under torchrun: bring every parameter up to date on every rank, from the rank that trained it.

        A new partition may give a parameter to another rank, whose copy has not been trained.
        """
        if self._before is None or self._trainers or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._before.collect(dict(self._compiler.model.named_parameters()))
        self._before = None


def _entries(key: Key) -> frozenset[str]:
    """The names of a microbatch's tensors."""
    return frozenset(name for name, *_ in key[0][0])


def _own_rank() -> list[int] | None:
    """The rank whose files this process runs; None: it runs all of them."""
    return [dist.get_rank()] if dist.is_initialized() and dist.get_world_size() > 1 else None
