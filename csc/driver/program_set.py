"""Programs for microbatches: found or made, loaded, checked, and what trains with them.

Terms
  match      of a microbatch: the capture that is for it, and its key (csc.capture.guards)
  served     a key that the trainer has a program for

    programs = ProgramSet(compiler, directory)
    programs.match(microbatches) -> [Match]                               before every step
    programs.trainer(microbatches, options, progress, batch) -> Trainer   with a program for each of them, checked
    programs.compiled: CompiledPrograms                                    what the trainers' programs are loaded from
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from csc.analysis.batch_limits import Places
from csc.analysis.tokens import chooses
from csc.cache.keys import tracing_switches
from csc.cache.model_entries import Packed
from csc.capture.batch import device_of, split_batch
from csc.capture.guards import Guards, Match
from csc.capture.model_guards import ModelGuards
from csc.check.first import Checked
from csc.check.one_of_each import check_by_layer
from csc.codegen.write import contents
from csc.driver.checking import CHECK, Checking, Comparison, NewProgram, Pair, meeting_in
from csc.driver.compiled_programs import CompiledPrograms
from csc.driver.compiler import Compiler, Progress
from csc.driver.entries import fullest_first
from csc.driver.evaluation import check_held
from csc.driver.features_ahead import FeaturesAhead
from csc.driver.frozen_encoders import FeatureSource, FrozenEncoders
from csc.driver.fusing_ahead import FusingAhead
from csc.driver.program_broadcast import ProgramBroadcast, own_rank
from csc.driver.widths import SAME, Trials, filling, pad, tried
from csc.errors import InputError
from csc.ir.capture_guards import short
from csc.ir.program import Options
from csc.runtime.launch import join_group
from csc.runtime.loaded_program import LoadedProgram, is_part, load
from csc.runtime.meeting import NOTHING, Meeting, Said
from csc.runtime.parameters import DataShards, Kept
from csc.runtime.specs import Manifest
from csc.runtime.trainer import Trainer
from csc.torch_private.autograd import below_autograd
from csc.torch_private.process_state import is_profiled

log = logging.getLogger("csc")

Microbatch = Mapping[str, Any]
Answers = tuple[str, ...]  # what a microbatch decides
Variants = tuple[int, Answers, int]  # number of microbatches; of those that answer the same, which regions
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
    ) -> None:
        """directory: where programs are written; before: what trained these parameters until now; checks: whether
        programs are compared with eager PyTorch before they run; model: as it was when the compiler captured it;
        timeout: seconds without an answer until another process counts as lost; meeting: of all ranks, if there is one;
        training: the programs that train what these evaluate; features: how those of frozen encoders are come by.
        """
        self.features = None
        if features is not None:
            self.features = FrozenEncoders(compiler.model, features(self._made_by_host))
        self._training = training
        self._timeout = timeout
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

    def look(self) -> None:
        """Keep how the model is now: its programs are for that."""
        known, also = self.guards.model, self._compiler.guards
        written, read = self.guards.written | also.written, self.guards.opaque_reads | also.opaque_reads
        if known is None or (known.ignored, known.opaque_reads) != (written, read) or not known.holds():
            self.guards.model = ModelGuards(self._compiler.model, written, tracing_switches, read)

    def check(
        self, matches: Sequence[Match], options: Options, batch: Any, progress: Progress, again: bool = True
    ) -> None:
        """Compare what these microbatches train with eager PyTorch. All ranks call it. again: also if that was done.

        DifferenceError, on every rank, then and from then on.
        """
        self.checking.idle = False
        if again or self._are_due(matches, options):
            trainer = self._trainers[self._variants(matches, options)]
            trainer.check_batch([trainer.reads(one) for one in self.checked_places(matches)])
            keys, given = [match.key for match in matches], [match.given for match in matches]
            pairs = self.checking.unmet(meeting_in(matches))
            asked = Comparison(trainer, keys, pairs, given, batch, options, again, progress, self._complete_here)
            self.checking.compare(asked, self.meeting(options), self._broadcast.group)

    def check_by_layer(self, ready: Sequence[Microbatch], options: Options, progress: Progress) -> Checked:
        """Compare the program of the first of these with eager PyTorch though the model has no weights: one layer of
        each kind. DifferenceError. The cache remembers it.
        """
        first, kept = ready[0], self._compiler.kept
        match = self._compiler.match(first)
        if match.capture is not None and kept.checked(match, self.compiled.options(match, options)):
            return Checked(skipped="that was done before, as the cache knows")
        with tempfile.TemporaryDirectory(prefix="csc-check-") as folder:
            written = self.compiled.write(first, options, Path(folder) / "program", progress, ranks=[0])
            progress(CHECK)
            found = check_by_layer(self._compiler, ready, options, contents(written))
        if not found.skipped:
            match = self._compiler.match(first)
            kept.keep_checked(str(found), match, self.compiled.options(match, options))
        return found

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
        if not self._checks:
            self.checking.warn_of_kinds(matches)
        return None if self._checks and self._are_due(matches, options) else trainer

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
        self.last = next(one for one in self._trainers.values() if one.microbatches == trainer.microbatches)
        return trainer

    def _variants(self, matches: Sequence[Match], options: Options) -> Variants:
        """InputError if the microbatches of a step decide differently."""
        served = self._served[options.microbatches]
        of_variants = {served[match.key]: match for match in matches}
        if len(of_variants) > 1:
            differing = _differing(*list(of_variants.values())[:2])
            raise InputError(
                f"the microbatches of one step decide differently: {', '.join(differing[:4])}", "batch",
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
        read = isinstance(self.features.source, FeaturesAhead) or any(one.reads_features for one in self.trainers)
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
        own = count == trainer.microbatches
        return trainer.reads_features and (own or number // trainer.microbatches in trainer.replicas)

    def _add(self, microbatch: Microbatch, options: Options, progress: Progress) -> None:
        start = time.perf_counter()
        count = options.microbatches
        directory = self._broadcast.directory(sum(map(len, self._served.values())))
        meeting = self.meeting(options)

        def make() -> tuple[Said, tuple[Packed, str, LoadedProgram]]:
            packed, how = self._broadcast.shared(microbatch, options, directory, progress)
            return NOTHING, (packed, how, load(directory, own_rank()))

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
            own: dict[str, torch.Tensor] = dict(self._compiler.model.named_parameters())
            if self._training is not None:
                check_held([one.program.manifest for one in self._training.trainers], loaded.manifest)
                own |= self._training.trained_now
                self._shards |= self._training.shards_now
                self._data = self._training.trained.own.data if self._training.trained is not None else None
            made = Trainer(
                loaded, own, timeout=self._timeout, meeting=meeting, fused=options.fuse,
                artifacts=self._fusing.folder if options.fuse else None, is_profiled=is_profiled,
                within=below_autograd, kept=self._shards, data=self._data, graphs=options.cuda_graphs,
            )  # fmt: skip
            if self._data is not None and made.own.data is not self._data:
                self._data.replaced = True
            self._shards, self._data = {**made.own.shards, **self._shards}, made.own.data
            first = next((one for (number, *_), one in self._trainers.items() if number == count), None)
            if first is not None:
                first.own.know(made.own)
            self._trainers[variants] = made
        self._served.setdefault(count, {})[match.key] = variants
        self._places[match.key] = packed.places
        sizes = {name: list(value.shape) for name, value in microbatch.items() if isinstance(value, torch.Tensor)}
        log.info("a program for microbatches of %s, %s in %.1f s", sizes, how, time.perf_counter() - start)
        compiled = self._compiler.match(microbatch)
        self.checking.made(match.key, NewProgram(compiled, self.compiled.options(compiled, options), packed, variants))

    def _variants_of(self, manifest: Manifest, count: int, answers: Answers) -> Variants:
        """Those of a new program: values may decide, beside the answers, which regions it has."""
        regions = _regions(manifest)
        same = [one for one in self._trainers if one[:2] == (count, answers)]
        for one in same:
            first = self._trainers[one].program.manifest
            own = _regions(first)
            if regions == own or (regions <= own and is_part(first, manifest)):
                return one
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
        return {name: one for name, one in kept.items() if name not in replaced}

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
        self._before.collect(dict(self._compiler.model.named_parameters()))
        self._shards |= self._before.own.shards
        self._data = self._before.own.data
        self._before = None


def _regions(manifest: Manifest) -> set[str]:
    return {name for stage in manifest.stages for name in stage.regions}


def _differing(first: Match, second: Match) -> list[str]:
    """What two microbatches decide differently: answers, else values."""
    texts = [text for one in (first, second) for text in one.answers]
    if first.answers != second.answers:
        return [text for text in texts if text not in set(first.answers) & set(second.answers)]
    assert first.capture is not None and second.capture is not None
    deciding = [name for name in first.capture.values if name in second.capture.values]
    given = [[one.given.get(name, one.batch[name]) for name in deciding] for one in (first, second)]
    others = [name for name, own, other in zip(deciding, *given) if not torch.equal(own, other)]
    return [f"{name} is {short(one.given.get(name, one.batch[name]))}" for name in others for one in (first, second)]
