"""Programs for microbatches: found in the cache or compiled, handed to all ranks, checked; what trains with them."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from csc.analysis.batch_limits import Places
from csc.analysis.tokens import chooses
from csc.cache.keys import tracing_switches
from csc.cache.model_entries import Files, Packed, packed_bytes, packed_from
from csc.capture.batch import device_of, split_batch
from csc.capture.guards import Guards, Match
from csc.capture.model_guards import ModelGuards
from csc.capture.quantised_weights import weights_of
from csc.check.first import Checked
from csc.check.one_of_each import check_by_layer
from csc.codegen.write import MANIFEST, contents, install, of_ranks
from csc.driver.batches import SAME, Trials, filling, fullest_first, pad, tried
from csc.driver.checking import CHECK, Checking, Comparison, NewProgram, Pair, meeting_in
from csc.driver.compiler import Compiler, FusingAhead, Progress, quiet, uncollected
from csc.driver.features import FeaturesAhead, FeatureSource, FrozenEncoders
from csc.driver.options import refuse_beside_survive
from csc.errors import InputError
from csc.ir.capture_guards import Unstorable, short
from csc.ir.program import Options, Program
from csc.ir.schedule import Schedule, parse
from csc.ir.stored import bound
from csc.passes import pipeline_problem as numbers
from csc.planning.problem import Problem
from csc.runtime.joining import is_under_way
from csc.runtime.launch import join_group
from csc.runtime.loaded_program import LoadedProgram, is_part, load
from csc.runtime.meeting import NOTHING, Meeting, Vote, broadcast_group, first_makes
from csc.runtime.parameters import DataShards, Kept, OwnParameters
from csc.runtime.specs import Manifest
from csc.runtime.survival import Survival, Survive
from csc.runtime.survival import check as check_survival
from csc.runtime.trainer import Trainer
from csc.temporary import TemporaryFolder
from csc.torch_private.autograd import below_autograd
from csc.torch_private.process_state import is_profiled

# --- Evaluation by programs that run forward alone, cut as the training programs are ---------------------------------
#
# Terms: the model is *captured in eval mode*, by a compiler of its own: what it does then (no dropout, running
# statistics) is another function. Stages and their ranks are those of training, so every rank has what it needs
# already.


def _stay(mode: bool = True) -> None:
    """In place of a module's `train`."""


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in eval mode as a whole, in which `model.train()` leaves it; every module as before afterwards."""
    before = {module: module.training for module in model.modules()}
    own: dict[str, Any] = model.__dict__
    replaced = {name: own[name] for name in ("train",) if name in own}
    try:
        model.eval()
        own["train"] = _stay
        yield
    finally:
        del own["train"]
        own.update(replaced)
        for module, mode in before.items():
            module.training = mode


def options_for(options: Options) -> Options:
    """Of programs that evaluate what these train. The stages come from there."""
    return replace(options, forward_only=True, freeze=None, cuts=None, stages=None, placement=None, schedule="auto",
                   chunks=None, recompute=(), features=False)  # fmt: skip


def check_held(trained: Sequence[Manifest], made: Manifest) -> None:
    """made: of a program that evaluates. InputError if it has a parameter on a rank that does not train it."""
    if made.mesh.pp == 1:
        return
    homes = {spec.name: set(spec.ranks) for manifest in reversed(trained) for spec in manifest.parameters}
    kept = {name for manifest in trained if manifest.features is not None for name in manifest.features.parameters}
    for spec in made.parameters:
        if spec.name in kept:
            raise InputError(
                f"evaluation runs the whole model, and with cache_features no rank has {spec.name!r}", "eval_step",
                "evaluate compiled.gather() instead, or compile for pp=1",
            )  # fmt: skip
        if not set(spec.ranks) <= homes.get(spec.name, set()):
            raise InputError(
                f"in eval mode the model uses {spec.name!r} in another stage than in training, where its rank does not "
                "have what was trained",
                "eval_step",
                "evaluate compiled.gather() instead, the eager model with what all ranks have trained",
            )


# --- Programs of one model, compiled or found in the cache, each cut as the first of them ----------------------------
#
# Terms
#   match      of a microbatch: the capture that is for it, and its key (csc.capture.guards)
#   decided    how the first program is cut and placed, and in which order it runs; all later ones of the model follow
#              it
#   settled    the options of one program, with what was decided before it


log = logging.getLogger("csc")

CACHED = "program, from the cache"
MADE = "made"
Microbatch = Mapping[str, Any]
Answers = tuple[str, ...]  # what a microbatch decides
Key = tuple[Any, int]  # of a match, number of microbatches


@dataclass
class Decided:
    """stages: the regions of each; placement: the rank of each; entries: of the microbatch that it was decided for;
    schedules: by number of microbatches.
    """

    stages: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    entries: frozenset[str]
    schedules: dict[int, Schedule | None] = field(default_factory=dict)
    captures: set[str] = field(default_factory=set)  # names of those whose programs are cut so

    def serves(self, regions: Set[str], entries: Set[str]) -> bool:
        """Whether a program of these regions is cut so: it has the same, or fewer for want of entries."""
        all_names = {name for names in self.stages for name in names}
        return regions == all_names or (regions <= all_names and not entries >= self.entries)

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
            tuple(name for name, stage_of in zip(regions, home) if stage_of == stage)
            for stage in range(len(self.stages))
        )
        if not all(stages):
            return options
        return replace(options, cuts=None, stages=stages, placement=self.placement)


class CompiledPrograms:
    """settling: called before what is decided for a program is kept; beginning: before one that is not in the cache is
    compiled. alike: programs as which these are cut, of the same model in another mode. compared: with eager PyTorch,
    before their first step.
    """

    def __init__(
        self, compiler: Compiler, settling: Callable[[], None], beginning: Callable[[Options], None],
        alike: CompiledPrograms | None = None, compared: bool = True,
    ) -> None:  # fmt: skip
        self._compiler, self._settling, self._beginning, self._alike = compiler, settling, beginning, alike
        self._compared = compared
        # The first answers' first is where others start; one of the same answers is of values that decide more.
        self._decided: dict[Answers, list[Decided]] = {}
        self._settled: dict[Key, Options] = {}
        self._histories: dict[Key, list[Program]] = {}
        self._finished: dict[Key, Program] = {}
        self._packed: dict[Key, Packed] = {}

    def prepare(self, microbatch: Microbatch, options: Options, progress: Progress) -> Key:
        """Find the program of a microbatch in the cache, or compile it."""
        with self._compiler.kept.at_rest():
            return self._prepared(microbatch, options, progress)

    def _prepared(self, microbatch: Microbatch, options: Options, progress: Progress) -> Key:
        match = self._compiler.match(microbatch)
        key = _key(match, options)
        if key in self._histories or key in self._finished or key in self._packed:
            return key
        if match.capture is not None:
            settled = self.options(match, options)
            packed = self._compiler.kept.program(match, settled)
            if packed is not None:
                progress(CACHED)
                return self.take(packed, microbatch, options)
        self._beginning(options)
        return self._finish(microbatch, options, progress)

    def take(self, packed: Packed, microbatch: Microbatch, options: Options) -> Key:
        """Go on with a program that was made elsewhere."""
        self._compiler.adopt(packed.guards)
        match = self._compiler.match(microbatch)
        key = _key(match, options)
        self._packed[key] = packed
        stages = json.loads(packed.files[MANIFEST])["stages"]
        self._settle(
            match,
            self.options(match, options),
            tuple(tuple(stage["regions"]) for stage in stages),
            tuple(stage["rank"] for stage in stages),
            parse(packed.files["schedule.txt"].decode()),
        )
        return key

    def history(self, microbatch: Microbatch, options: Options, progress: Progress) -> list[Program]:
        """The Program after capture and each pass; traced for it if it came from the cache."""
        key = _key(self._compiler.match(microbatch), options)
        if key not in self._histories:
            key, history = self._planned(microbatch, options, progress, whole=True)
            self._histories[key] = history
        return self._histories[key]

    def problem(self, microbatch: Microbatch, options: Options, progress: Progress) -> Problem:
        """What a microbatch takes of every region, were it cut as the first one: nothing is planned for it."""
        settled, program = self.divided(microbatch, options, progress)
        return numbers.problem(program, settled)

    def divided(self, microbatch: Microbatch, options: Options, progress: Progress) -> tuple[Options, Program]:
        """The Program of a microbatch after pass `split`, as planners cost it, and the options that hold for it."""
        with uncollected():
            match, traced = self._compiler.trace(microbatch, options, progress)
            settled = self.options(match, options)
            return settled, self._compiler.divided(traced, settled, progress)

    def finished(self, microbatch: Microbatch, options: Options, progress: Progress) -> Program:
        """The Program after the last pass."""
        return self._program(self._finish(microbatch, options, progress))

    def _finish(self, microbatch: Microbatch, options: Options, progress: Progress) -> Key:
        with self._compiler.kept.at_rest():
            key = _key(self._compiler.match(microbatch), options)
            if key not in self._histories and key not in self._finished:
                key, programs = self._planned(microbatch, options, progress, whole=False)
                self._finished[key] = programs[-1]
            return key

    def _program(self, key: Key) -> Program:
        return self._histories[key][-1] if key in self._histories else self._finished[key]

    def _planned(
        self, microbatch: Microbatch, options: Options, progress: Progress, whole: bool
    ) -> tuple[Key, list[Program]]:
        """The Programs after each pass, their key known since the trace. Where a microbatch decides what none before it
        did (or by values, other regions), or where the model is in eval mode, its program may have other regions than
        the first: then each stays in its stage as far as that goes.
        """
        with uncollected():
            match, traced = self._compiler.trace(microbatch, options, progress, whole)
            settled = self.options(match, options)
            traced = self._compiler.checked(microbatch, traced, settled, self._compared)
            regions = [region.name for region in traced.program.regions]
            known = self._decided or (self._alike._decided if self._alike is not None else {})
            decided = self._cut_as(match, frozenset(regions))
            anew = bool(known) and decided is None
            if anew:
                first = next(iter(known.values()))[0]
                settled = first.settled_anew(options, regions)
            elif decided is not None and _key(match, options) not in self._settled:
                settled = decided.settled(options, match.entries)
            try:
                programs = self._compiler.planned(traced, settled, progress)
            except InputError as reason:
                if not anew or settled is options:
                    raise
                log.info("stages are planned anew for what this batch decides: %s", reason)
                settled = options
                programs = self._compiler.planned(traced, settled, progress)
        last = programs[-1]
        stages, placement = tuple(stage.regions for stage in last.stages), tuple(stage.rank for stage in last.stages)
        self._settle(match, settled, stages, placement, last.schedule)
        return _key(match, options), programs

    def options(self, match: Match, options: Options) -> Options:
        """Those of a microbatch's program, settled by the programs before it."""
        key = _key(match, options)
        if key in self._settled:
            return self._settled[key]
        first = next(iter(self._decided.values()), [None])[0]
        known = self._cut_as(match) or self._decided.get(match.answers, [first])[0]
        return known.settled(options, match.entries) if known is not None else options

    def _cut_as(self, match: Match, regions: Set[str] = frozenset()) -> Decided | None:
        """What was decided for programs of its capture, or for one of these regions after the same answers."""
        decisions = self._decided.get(match.answers, [])
        name = match.capture.name if match.capture is not None else ""
        of_capture = next((decision for decision in decisions if name in decision.captures), None)
        return of_capture or next((decision for decision in decisions if decision.serves(regions, match.entries)), None)

    def _settle(
        self,
        match: Match,
        settled: Options,
        stages: tuple[tuple[str, ...], ...],
        placement: tuple[int, ...],
        schedule: Schedule | None,
    ) -> None:
        self._settling()
        self._settled.setdefault(_key(match, settled), settled)
        decided = self._cut_as(match, {name for names in stages for name in names})
        if decided is None:
            decided = Decided(stages, placement, match.entries)
            self._decided.setdefault(match.answers, []).append(decided)
        if match.capture is not None:
            decided.captures.add(match.capture.name)
        if not settled.part:
            decided.schedules.setdefault(settled.microbatches, schedule)

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
        key = self._finish(microbatch, options, progress)
        match = self._compiler.match(microbatch)
        program, settled = self._program(key), self._settled[key]
        written = self._compiler.emit(program, settled, directory, match.batch, with_weights, ranks)
        if key not in self._packed and ranks is None:
            self._packed[key] = self._pack(match, settled, written)
        return written

    def _pack(self, match: Match, settled: Options, directory: Path) -> Packed:
        """What was just written to a directory, kept."""
        _, traced = self._compiler.trace(match.given, settled)
        packed = Packed(contents(directory), traced.places, self._compiler.guards.copy(), bound(traced.program))
        self._compiler.kept.keep_program(packed, match, settled)
        return packed

    def packed(
        self, microbatch: Microbatch, options: Options, directory: Path, progress: Progress
    ) -> tuple[Match, Packed, str]:
        """The program of a microbatch, handed out once, and how it came about: one that was MADE is written to the
        directory.
        """
        with self._compiler.kept.at_rest():
            packed = self._packed.pop(self.prepare(microbatch, options, progress), None)
            if packed is not None:
                return self._compiler.match(microbatch), packed, "from the cache"
            key = self._finish(microbatch, options, progress)
            match, settled = self._compiler.match(microbatch), self._settled[key]
            self._compiler.emit(self._program(key), settled, directory, match.batch)
            return match, self._pack(match, settled, directory), MADE


def _key(match: Match, options: Options) -> Key:
    """Of a match without a capture no program's."""
    return match.key, options.microbatches


# --- A new program on every rank -------------------------------------------------------------------------------------
#
# The first rank finds it in the cache or compiles it, hands it to the others, and each writes it to disk.


class ProgramBroadcast:
    """Of one model's programs. directory: where they are written; None: a temporary one, removed with this object."""

    def __init__(self, compiler: Compiler, compiled: CompiledPrograms, directory: Path | None) -> None:
        self._compiler, self._compiled, self._home = compiler, compiled, directory
        self._temporary: TemporaryFolder | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over which the first rank hands out what it makes; None: this process is alone."""
        if own_rank() is None:
            return None
        if self._group is None:
            self._group = broadcast_group()
        return self._group

    def forget(self) -> None:
        """The group is gone, with others."""
        self._group = None

    def of_first(self, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        """What `make` returns on the first rank, on every rank. All ranks call it."""
        group = self.group
        return (first_makes(make, group) if group is not None else None) or make()

    def directory(self, index: int) -> Path:
        """Where the index-th program goes; every process of a group writes its own."""
        if self._home is None and self._temporary is None:
            self._temporary = TemporaryFolder()
        home = self._home or Path(self._temporary.name) / "program"  # type: ignore[union-attr]
        rank_here = own_rank()
        rank = f"-rank{rank_here[0]}" if rank_here is not None else ""
        return home.with_name(f"{home.name}{rank}{f'-{index}' if index else ''}")

    def shared(
        self, microbatch: Microbatch, options: Options, directory: Path, progress: Progress
    ) -> tuple[Packed, str]:
        """The program, written to the directory, and how it came about. Of several ranks the first one makes it."""
        group = self.group
        if group is None:
            return self._written(microbatch, options, directory, progress)
        programs: list[tuple[Packed, str]] = []

        def make() -> Files | None:
            programs.append(self._written(microbatch, options, directory, progress))
            try:
                return packed_bytes(programs[0][0], self._compiler.model)
            except Unstorable as reason:
                log.info("every rank compiles for itself: the program holds %s", reason)
                return None

        files = first_makes(make, group)
        if programs:
            return programs[0]
        if files is None:
            return self._written(microbatch, options, directory, progress)
        packed = packed_from(files, self._compiler.model)
        self._compiled.take(packed, microbatch, options)
        return self._written(microbatch, options, directory, progress)[0], "from rank 0"

    def _written(
        self, microbatch: Microbatch, options: Options, directory: Path, progress: Progress
    ) -> tuple[Packed, str]:
        rank_here = own_rank()
        match, packed, how = self._compiled.packed(microbatch, options, directory, progress)
        if rank_here is None and how == MADE:
            return packed, how
        files = packed.files if rank_here is None else of_ranks(packed.files, options.mesh, rank_here)
        install(files, directory, match.batch)
        return packed, how


def own_rank() -> list[int] | None:
    """The rank whose files this process runs; None: it runs all of them."""
    return [dist.get_rank()] if dist.is_initialized() and dist.get_world_size() > 1 else None


# --- Programs for microbatches: found or made, loaded, checked, and what trains with them ----------------------------
#
# Terms
#   match      of a microbatch: the capture that is for it, and its key (csc.capture.guards)
#   served     a key that the trainer has a program for


# what a microbatch decides
# Number of microbatches; what they answer; of those that answer the same, which regions and parameters.
Variants = tuple[int, Answers, int]
MadeFeatures = Callable[[Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]], FeatureSource]


class ProgramSet:
    """The programs of one model with one set of options but for the number of microbatches."""

    def __init__(
        self,
        compiler: Compiler,
        directory: Path | None,
        before: Trainer | None = None,
        checks: bool = True,
        model: ModelGuards | None = None,
        timeout: float = 600.0,
        meeting: Meeting | None = None,
        training: ProgramSet | None = None,
        features: MadeFeatures | None = None,
        survive: Survive | None = None,
        held: OwnParameters | None = None,
    ) -> None:
        """directory: where programs are written; before: what trained these parameters until now; checks: whether
        programs are compared with eager PyTorch before they run; model: as it was when the compiler captured it;
        timeout: seconds without an answer until another process counts as lost; meeting: of all ranks, if there is one;
        training: the programs that train what these evaluate; features: how those of frozen encoders are come
        by. survive: which ranks may die. held: parameters that an optimizer of this process steps already, with the
        values of now.
        """
        self.features = None
        if features is not None:
            self.features = FrozenEncoders(compiler.model, features(self._made_by_host))
        self._training = training
        self._timeout, self._survive, self._held = timeout, survive, held
        self._meeting = meeting
        self._compiler = compiler
        alike = training.compiled if training is not None else None
        self._fusing = FusingAhead(compiler)
        beginning = self._fusing.begin
        self.compiled: CompiledPrograms = CompiledPrograms(compiler, self._look_first, beginning, alike, checks)
        self._broadcast = ProgramBroadcast(compiler, self.compiled, directory)
        self._trainers: dict[Variants, Trainer] = {}  # the first of a number of microbatches knows all parameters
        self._served: dict[int, dict[Any, Variants]] = {}  # by number of microbatches and key
        self._places: dict[Any, Places] = {}
        self.guards = Guards(model=model)  # what the programs assumed: the same on every rank
        self._before = before
        self._shards: dict[str, Kept] = {}  # what this process keeps of parameters that ranks divide
        self._data: DataShards | None = None  # and what it steps of those that replicas divide
        self._checks = checks
        self.checking = Checking(compiler)
        self.trials = Trials()  # of padding
        self.last: Trainer | None = None
        self.compiling = threading.RLock()  # a step may be learning what decides which program a batch needs

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
                if not self._serves(self._match(microbatch), options):
                    self.meeting(options)
                    self._gather_weights()
                    self._add(microbatch, options, progress)
                    new = True
            matches = self.match(ready)
            if self._checks and batch is not None:
                self.check(matches, options, batch, progress, again=False)
            if new:
                self.look()
            return self.use(self._trainers[self._variants(matches, options)])

    def _look_first(self) -> None:
        if self.guards.model is None:
            self.look()

    def look(self, ignored: Set[str] = frozenset()) -> None:
        """Keep how the model is now: its programs are for that. ignored: more of what changes by itself."""
        known, also = self.guards.model, self._compiler.guards
        written, read = self.guards.written | also.written, self.guards.opaque_reads | also.opaque_reads
        ignored = ignored | (known.ignored if known is not None else frozenset())
        files = {**also.files, **self.guards.files}
        if (
            known is None
            or (known.written, known.opaque_reads, known.ignored, known.files) != (written, read, ignored, files)
            or not known.holds()
        ):
            self.guards.model = ModelGuards(self._compiler.model, written, tracing_switches, read, ignored, files)

    def check(
        self, matches: Sequence[Match], options: Options, batch: Any, progress: Progress, again: bool = True
    ) -> None:
        """Compare what these microbatches train with eager PyTorch. All ranks call it. again: also if that was done.

        DifferenceError, on every rank, then and from then on.
        """
        self.checking.idle = False
        if again or self._are_due(matches, options):
            trainer = self._trainers[self._variants(matches, options)]
            trainer.check_batch([trainer.reads(trainer_place) for trainer_place in self.checked_places(matches)])
            keys, batches = [match.key for match in matches], [match.given for match in matches]
            pairs = self.checking.unmet(meeting_in(matches))
            comparison = Comparison(
                trainer, keys, pairs, batches, batch, options, again, progress, self._complete_here, self._write
            )
            self.checking.compare(comparison, self.meeting(options), self._broadcast.group)

    @staticmethod
    def _write(compiler: Compiler, microbatches: Sequence[Microbatch], options: Options, directory: Path) -> list[Path]:
        """Programs that nobody trains, one for each of these, in directories below this one."""
        compiled = CompiledPrograms(compiler, lambda: None, lambda options: None, compared=False)
        ranks = range(options.mesh.size)  # named, so that the cache does not keep them
        return [
            compiled.write(microbatch, options, directory / str(number), quiet, ranks=ranks)
            for number, microbatch in enumerate(fullest_first(microbatches))
        ]

    def check_by_layer(self, ready: Sequence[Microbatch], options: Options, progress: Progress) -> Checked:
        """Compare the program of the first of these with eager PyTorch though the model has no weights: one layer of
        each kind. DifferenceError. The cache remembers it.
        """
        first, kept = ready[0], self._compiler.kept
        match = self._compiler.match(first)
        if match.capture is not None and kept.checked(match, self.compiled.options(match, options)):
            return Checked(skipped="that was done before, as the cache knows")
        with TemporaryFolder() as folder:
            written = self.compiled.write(first, options, Path(folder) / "program", progress, ranks=[0])
            progress(CHECK)
            result = check_by_layer(self._compiler, ready, options, contents(written))
        if not result.skipped:
            match = self._compiler.match(first)
            kept.keep_checked(str(result), match, self.compiled.options(match, options))
        return result

    def may_pad(
        self, microbatch: Microbatch, width: int, trainable: Set[str], options: Options, progress: Progress
    ) -> str:
        """Whether a microbatch may be padded to a width: SAME, or why not. On one rank, which has the model."""
        model = self._compiler.model
        why = tried(model, microbatch, width, trainable)
        if why != SAME:
            return why
        padded = pad(microbatch, width, filling(microbatch, model)[0])
        with self._compiler.kept.at_rest():
            _, traced = self._compiler.trace(padded, options, progress)  # what its program is made of
        call = chooses(traced.program.graph, width)
        return f"{call} may choose among tokens by their values" if call else SAME

    def match(self, ready: Sequence[Microbatch]) -> list[Match]:
        """Which programs microbatches need, asked once for a step."""
        return list(map(self._match, ready))

    def _match(self, microbatch: Microbatch) -> Match:
        return self.guards.match(self._compiler.model, microbatch)

    def _are_due(self, matches: Sequence[Match], options: Options) -> bool:
        """Whether a program of one of these has not been compared, or not beside the others."""
        due = self.checking.due(options.microbatches)
        return any(match.key in due for match in matches) or bool(self.checking.unmet(meeting_in(matches)))

    def handed_out(self, matches: Sequence[Match], options: Options) -> Trainer | None:
        """The trainer, if it has a program for each of these, compared if that is wanted. DifferenceError if one was
        found to be wrong.
        """
        self.checking.refuse_different()
        trainer = self.serves(matches, options)
        return None if self._checks and self._are_due(matches, options) else trainer

    def unchecked(self, matches: Sequence[Match], options: Options, batch: Any) -> None:
        """Look at what nobody compares (csc.driver.checking). batch: of which these are the microbatches, all of them;
        None: they are of none. That they are right as they are is the user's word with a `loss_weight`.
        """
        if not self._checks:
            proven = options.loss_weight == "auto" and options.microbatches * options.mesh.dp > 1
            decides = any(match.capture.decisions or match.capture.values for match in matches if match.capture)
            whole, run = None, None
            if batch is not None and proven and decides:
                whole, _, run = self.guards.with_rows(self._compiler.model, batch)
            self.checking.unchecked(matches, whole, None if run is None else run.calls)

    def serves(self, matches: Sequence[Match], options: Options) -> Trainer | None:
        """The trainer, if it has a program for each of these."""
        served = all(self._serves(match, options) for match in matches)
        return self._trainers.get(self._variants(matches, options)) if served else None

    def missing(self, matches: Sequence[Match], options: Options) -> str:
        """Why there is no program for the first of these that has none."""
        match = next((match for match in matches if not self._serves(match, options)), None)
        if match is None:
            return "its programs are due to be compared with eager PyTorch"
        sizes = ", ".join(f"{name} {list(t.shape)}" for name, t in split_batch(match.given)[0].items())
        return match.why if match.capture is None else f"none was compiled for {sizes}"

    def use(self, trainer: Trainer) -> Trainer:
        """What trains a batch. Whoever asks for parameters is given those of all programs."""
        self.last = next(
            candidate for candidate in self._trainers.values() if candidate.microbatches == trainer.microbatches
        )
        return trainer

    def _variants(self, matches: Sequence[Match], options: Options) -> Variants:
        """InputError if the microbatches of a step decide differently."""
        served = self._served[options.microbatches]
        of_variants = {served[match.key]: match for match in matches}
        if len(of_variants) > 1:
            differing = _differing(*list(of_variants.values())[:2])
            first, second = (_parameters(self._trainers[variant].program.manifest) for variant in list(of_variants)[:2])
            apart = sorted(first ^ second)
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            parts = [f"only one of them uses the parameter {apart[0]!r}{more}"] if apart else []
            raise InputError(
                f"the microbatches of one step decide differently: {', '.join([*differing[:4], *parts])}", "batch",
                "give each step microbatches that decide alike (sort the data by what it has, text alone or with "
                "pictures), or use one microbatch and dp=1",
            )  # fmt: skip
        return next(iter(of_variants))

    def unmet(self, meets: Set[str]) -> set[Pair]:
        """Every two of what meets in a step that no step was compared with, if steps are compared."""
        return self.checking.unmet(meets) if self._checks else set()

    def decides(self, matches: Sequence[Match], options: Options) -> Answers:
        """What microbatches that are served decide. InputError if they decide differently."""
        _, answers, regions = self._variants(matches, options)
        return (*answers, *([f"regions {regions}"] if regions else ()))

    def _serves(self, match: Match, options: Options) -> bool:
        return match.key in self._served.get(options.microbatches, ())

    @property
    def replays(self) -> bool:
        """Whether completing a microbatch may run the model's own code."""
        return self.guards.replays

    @property
    def on_the_host(self) -> frozenset[str]:
        """The batch entries that functions of the model which run on the host take."""
        return frozenset(entry for call in self.guards.host.calls for _, entry in call.arguments)

    def feature_counts(self) -> dict[str, float]:
        """How many units of features this process has taken from disk, and encoded, since this was asked last."""
        return self.features.source.counts() if self.features is not None else {}

    @property
    def encoded(self) -> frozenset[str]:
        """The batch entries that this process makes features of, or knows them by."""
        if self.features is None:
            return frozenset()
        read = isinstance(self.features.source, FeaturesAhead) or any(
            trainer.reads_features for trainer in self.trainers
        )
        return self.features.inputs if read else frozenset()

    def checked_places(self, matches: Sequence[Match], features: bool = True) -> list[Microbatch]:
        """Microbatches that are served, as programs take them; features: also those that this process reads. InputError
        if one's placeholders do not fit its features.
        """
        for number, match in enumerate(matches):
            self._places[match.key].check(match.batch, f"microbatch {number}" if len(matches) > 1 else "the batch")
        if self.features is None:
            return [match.batch for match in matches]
        count = len(matches)
        here = [features and self._reads_features(number, count) for number in range(count)]
        return self.features.complete(matches, here)

    def _made_by_host(self, entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.guards.host.entries(self._compiler.model, entries)[0]

    def _complete_here(self, microbatch: Microbatch) -> dict[str, Any]:
        """A microbatch that is served as a program of which all ranks run here takes it."""
        match = self._match(microbatch)
        return dict(match.batch if self.features is None else self.features.complete([match], [True])[0])

    def _reads_features(self, number: int, count: int) -> bool:
        """Whether ranks of this process read the features of one of so many microbatches: those of all replicas, or of
        their own.
        """
        trainer = next(iter(self._trainers.values()))
        is_last = count == trainer.microbatches
        return trainer.reads_features and (is_last or number // trainer.microbatches in trainer.replicas)

    def _add(self, microbatch: Microbatch, options: Options, progress: Progress) -> None:
        start = time.perf_counter()
        count = options.microbatches
        directory = self._broadcast.directory(sum(map(len, self._served.values())))
        meeting = self.meeting(options)

        def make() -> tuple[Vote, tuple[Packed, str, LoadedProgram]]:
            packed, how = self._broadcast.shared(microbatch, options, directory, progress)
            loaded = load(directory, own_rank())
            return NOTHING, (packed, how, self.survival.reduced(loaded) if self.survival is not None else loaded)

        packed, how, loaded = meeting.hold("compile", make)
        self.guards = self.guards.joined(packed.guards)
        match = self._match(microbatch)
        if match.capture is None:
            raise InputError(
                f"the program that was compiled for this batch is not for it: {match.why}", "batch",
                "let what the model makes of a batch on the host depend on the batch alone",
            )  # fmt: skip
        if self.features is not None:
            self.features.add(match, loaded)
        variants = self._variants_of(loaded.manifest, count, match.answers)
        if variants in self._trainers:
            self._trainers[variants].add(loaded)
        else:
            weights = weights_of(self._compiler.model)
            if self._training is not None:
                check_held([held.program.manifest for held in self._training.trainers], loaded.manifest)
                weights |= self._training.trained_now
                self._shards |= self._training.shards_now
                self._data = self._training.trained.own.data if self._training.trained is not None else None
            if self._held is not None:
                weights |= self._held.wholes
                self._shards |= self._held.shards
                self._data, self._held = self._held.data, None
            trainer = Trainer(
                loaded, weights, timeout=self._timeout, meeting=meeting, fused=options.fuse,
                artifacts=self._fusing.folder if options.fuse else None, is_profiled=is_profiled,
                within=below_autograd, kept=self._shards, data=self._data, graphs=options.cuda_graphs,
            )  # fmt: skip
            if self._data is not None and trainer.own.data is not self._data:
                self._data.replaced = True
            self._shards, self._data = {**trainer.own.shards, **self._shards}, trainer.own.data
            first = next((known for (number, *_), known in self._trainers.items() if number == count), None)
            if first is not None:
                first.own.know(trainer.own)
            self._trainers[variants] = trainer
        self._served.setdefault(count, {})[match.key] = variants
        self._places[match.key] = packed.places
        sizes = {name: list(value.shape) for name, value in microbatch.items() if isinstance(value, torch.Tensor)}
        log.info("a program for microbatches of %s, %s in %.1f s", sizes, how, time.perf_counter() - start)
        compiled = self._compiler.match(microbatch)
        self.checking.made(match.key, NewProgram(compiled, self.compiled.options(compiled, options), packed, variants))

    def _variants_of(self, manifest: Manifest, count: int, answers: Answers) -> Variants:
        """Those of a new program: values may decide, beside the answers, which regions and parameters it has."""
        regions, parameters = _regions(manifest), _parameters(manifest)
        same = [key for key in self._trainers if key[:2] == (count, answers)]
        for key in same:
            first = self._trainers[key].program.manifest
            if is_part(first, manifest):
                alike = regions <= _regions(first) and parameters <= _parameters(first)
            else:
                alike = regions == _regions(first) and parameters == _parameters(first)
            if alike:
                return key
        return count, answers, len(same)

    def of_first(self, make: Callable[[], dict[str, bytes]], options: Options) -> dict[str, bytes]:
        """What `make` returns on the first rank, on every rank. All ranks call it."""
        self.meeting(options)
        return self._broadcast.of_first(make)

    @property
    def trained_now(self) -> Mapping[str, torch.Tensor]:
        """The parameters of this process' ranks that train, but for those that the model has others for since."""
        held = self.last.own.wholes if self.last is not None else {}
        replaced = self.guards.changed().parameters
        return {name: parameter for name, parameter in held.items() if name not in replaced}

    @property
    def shards_now(self) -> Mapping[str, Kept]:
        """Of parameters that ranks divide, what this process trains, but for those that the model has others for."""
        kept = self.last.own.shards if self.last is not None else {}
        replaced = self.guards.changed().parameters
        return {name: shard for name, shard in kept.items() if name not in replaced}

    @property
    def met(self) -> Meeting | None:
        """The meeting of all ranks, for programs that follow these."""
        return self._meeting

    def meeting(self, options: Options) -> Meeting:
        """Where ranks agree on what they do. All ranks call it; it joins the group of processes, if there is one."""
        self._join_group(options)
        if self._meeting is None:
            several = dist.is_initialized() and dist.get_world_size() > 1
            survive = self._survive if several else None
            if survive is not None:  # of options that have changed since csc.compile
                refuse_beside_survive(options, self.features is not None, survive.mirror)
                check_survival(options.mesh, survive, options.zero)
            self._meeting = Meeting.of_all(self._timeout) if several else Meeting()
            if survive is not None:
                self._meeting.survival = Survival(survive, options.mesh, self._meeting, self._timeout)
        if self.survival is not None and self._broadcast.forget not in self.survival.forget:
            self.survival.forget.append(self._broadcast.forget)
        return self._meeting

    @property
    def survival(self) -> Survival | None:
        """If ranks may die, and there are several."""
        return cast("Survival | None", self._meeting.survival) if self._meeting is not None else None

    def _join_group(self, options: Options) -> None:
        if self.survival is not None and self.survival.has_lost:
            return
        if self._survive is not None and is_under_way():
            raise InputError(
                f"the job goes on without rank {os.environ['RANK']}, in whose place this process was started",
                "compile",
                "call compiled.rejoin() before anything else: it waits until the others take it up, and returns how "
                "many steps they have done",
            )  # fmt: skip
        join_group(device_of(self._compiler.model).type, self._timeout, options.mesh.size, str(options.mesh))

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
        self._before.collect(weights_of(self._compiler.model))
        self._shards |= self._before.own.shards
        self._data = self._before.own.data
        self._before = None


def _regions(manifest: Manifest) -> set[str]:
    return {name for stage in manifest.stages for name in stage.regions}


def _parameters(manifest: Manifest) -> set[str]:
    return {parameter.name for parameter in manifest.parameters}


def _differing(first: Match, second: Match) -> list[str]:
    """What two microbatches decide differently: answers, else values."""
    texts = [text for match in (first, second) for text in match.answers]
    if first.answers != second.answers:
        return [text for text in texts if text not in set(first.answers) & set(second.answers)]
    assert first.capture is not None and second.capture is not None
    deciding = [name for name in first.capture.values if name in second.capture.values]
    values = [[match.given.get(name, match.batch[name]) for name in deciding] for match in (first, second)]
    names = [name for name, first_value, other in zip(deciding, *values) if not torch.equal(first_value, other)]
    return [
        f"{name} is {short(match.given.get(name, match.batch[name]))}" for name in names for match in (first, second)
    ]
