"""Programs of one model, compiled or found in the cache, each cut as the first of them.

Terms
  match      of a microbatch: the capture that is for it, and its key (csc.capture.guards)
  decided    how the first program is cut and placed, and in which order it runs; all later ones of the model follow it
  settled    the options of one program, with what was decided before it

    programs = CompiledPrograms(compiler, settling, beginning)
    programs.history(microbatch, options, progress) -> [Program]      programs.finished(...) -> Program
    programs.packed(microbatch, options, directory, progress) -> (Match, Packed, how it came about)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from csc.cache.model_entries import Packed
from csc.capture.guards import Match
from csc.codegen.write import MANIFEST, contents
from csc.driver.compiler import Compiler, Progress, uncollected
from csc.errors import InputError
from csc.ir.program import Options, Program
from csc.ir.schedule import Schedule, parse
from csc.ir.stored import bound
from csc.passes import pipeline_problem as numbers
from csc.planning.problem import Problem

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
        own = {name for names in self.stages for name in names}
        return regions == own or (regions <= own and not entries >= self.entries)

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
            own = self._cut_as(match, frozenset(regions))
            anew = bool(known) and own is None
            if anew:
                first = next(iter(known.values()))[0]
                settled = first.settled_anew(options, regions)
            elif own is not None and _key(match, options) not in self._settled:
                settled = own.settled(options, match.entries)
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
        own = self._decided.get(match.answers, [])
        name = match.capture.name if match.capture is not None else ""
        of_capture = next((one for one in own if name in one.captures), None)
        return of_capture or next((one for one in own if one.serves(regions, match.entries)), None)

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
        own = self._cut_as(match, {name for names in stages for name in names})
        if own is None:
            own = Decided(stages, placement, match.entries)
            self._decided.setdefault(match.answers, []).append(own)
        if match.capture is not None:
            own.captures.add(match.capture.name)
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
