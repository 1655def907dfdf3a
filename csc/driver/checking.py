"""Which programs of a model are due to be compared with eager PyTorch, and how the ranks go about it."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from csc import devices
from csc.cache.model_entries import Packed
from csc.capture.guards import Match
from csc.capture.quantised_weights import is_quantised, weights_of
from csc.capture.trace.export import caching
from csc.check.eager import IN_HALF, EagerStep, SameMasks, undisturbed
from csc.check.first import Checked, ComparedStep, check, compared_step, step_of, too_much
from csc.check.one_of_each import check_by_layer
from csc.codegen.write import install
from csc.driver.compiler import Compiler, Progress
from csc.errors import DifferenceError, InputError
from csc.ir.capture_guards import Call, CaptureGuards, Miss, other_call
from csc.ir.program import Options
from csc.kernels.opaque import is_opaque
from csc.runtime import executor
from csc.runtime.loaded_program import load
from csc.runtime.meeting import NOTHING, Meeting, Vote, first_makes
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from csc.temporary import TemporaryFolder
from csc.torch_private.traces import pytree

# --- Which programs of a model are due to be compared with eager PyTorch, and how the ranks go about it --------------
#
# Terms
#   due        a program that nobody has compared yet, in this process or, as the cache knows, in another
#   meets      what comes together in a step: kinds of captures (another branch, other values that Python reads, entries
#              that a microbatch lacks), and sizes that differ between its microbatches. Programs that are right alone
#              may be wrong together, so every two that meet are compared in one step with eager PyTorch, once
#   idle       a step one of whose microbatches adds nothing to the loss (it has no labels): nobody sees what its
#              program makes of others, so what meets in such a step, and its programs, are compared again in the next
#              one
#   different  a program that does not train what eager PyTorch trains: nothing is handed out any more


log = logging.getLogger("csc")

CHECK = "check against eager PyTorch"
WHOLE, BY_LAYER = "whole", "by layer"
Name = Any  # of a program: the key of its microbatches
Pair = frozenset[str]


@dataclass(frozen=True)
class NewProgram:
    """A program for microbatches like the one matched. packed: of all ranks. variants: equal for programs of which a
    step may hold microbatches.
    """

    match: Match
    options: Options
    packed: Packed
    variants: object = None


@dataclass(frozen=True)
class Comparison:
    """A comparison. trainer: this process'; names: of the programs of these microbatches; pairs: of what meets in them,
    those that have not been compared; ready: as the user gives them, made of this batch; again: also if it was done;
    progress: told when it begins; complete: a microbatch as programs take it of which all ranks run here; write:
    programs of a compiler's model for microbatches, in directories below one.
    """

    trainer: Trainer
    names: Sequence[Name]
    pairs: Set[Pair]
    ready: Sequence[Mapping[str, Any]]
    batch: Any
    options: Options
    again: bool
    progress: Progress
    complete: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Compiler, Sequence[Mapping[str, Any]], Options, Path], list[Path]]

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.trainer.program.manifest.parameters if spec.trainable)


class Checking:
    """The programs of one model with one set of options."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._made: dict[int, dict[Name, NewProgram]] = {}  # by the number of microbatches
        self._due: dict[int, set[Name]] = {}
        self._met: set[Pair] = set()
        self._warned = self._told_of_caches = False
        self._idle, self._compared = False, ""  # of the latest comparison, on the ranks that know
        self._different: DifferenceError | None = None
        self._steady = False  # the model's forward did the same twice
        self._kept: list[ComparedStep] | None = None
        self.idle = False  # the latest comparison was of a step that is, on all ranks
        self.latest: Checked | None = None

    def made(self, name: Name, program: NewProgram) -> None:
        """A new program, which is due."""
        count = program.options.microbatches
        self._made.setdefault(count, {})[name] = program
        self.due(count).add(name)

    def due(self, count: int) -> set[Name]:
        """The programs for so many microbatches that are."""
        return self._due.setdefault(count, set())

    def unmet(self, meets: Set[str]) -> set[Pair]:
        """Every two of what meets in a step that no step was compared with."""
        return set(map(frozenset, combinations(sorted(meets), 2))) - self._met if len(meets) > 1 else set()

    def met(self, pairs: Set[Pair]) -> None:
        """Nobody asks for these again."""
        self._met |= pairs

    def unchecked(
        self, matches: Sequence[Match], batch: Mapping[str, torch.Tensor] | None, whole: Sequence[Call] | None
    ) -> None:
        """Look at kinds that meet where nobody compares, and at what the model's code does with the whole batch.
        batch: that, as captures take it; whole: what is called for it; None: not known, or these are no microbatches of
        one batch. InputError where something else is done with it; where that does not show, a warning, once.
        """
        captures = {match.capture.name: match.capture for match in matches if match.capture is not None}
        for capture in captures.values():
            if batch is not None:
                self._refuse_otherwise(capture, batch, whole)
        if not self._warned and len({match.kind for match in matches}) > 1:
            self._warned = True
            log.warning(
                "microbatches of one step differ in %s, and check=False: that the model does with each of them what it "
                "does with the whole batch is not known. Train a step with check=True to know",
                _difference(matches),
            )

    def _refuse_otherwise(
        self, capture: CaptureGuards, batch: Mapping[str, torch.Tensor], whole: Sequence[Call] | None
    ) -> None:
        answers = (decision.miss(batch) for decision in capture.decisions)
        other, symbols = next(filter(None, answers), None), capture.sizes.match(batch)
        what = (
            f"{other.what} is {other.assumed} for a microbatch and {other.found} for the whole batch" if other else ""
        )
        if not what and whole is not None and capture.calls is not None:
            what = other_call(capture.calls, whole, {} if isinstance(symbols, Miss) else symbols)
        if not what:
            return
        known = self._compiler.captures.get(capture.name) or self._compiler.restored.get(capture.name)
        lines = [known.reads.get(name, "") for name in capture.values] if known is not None else []
        asked = {name for decision in capture.decisions for name in decision.expression.entries}
        read = ", ".join(map(repr, dict.fromkeys((*capture.values, *sorted(asked)))))
        raise InputError(
            f"{what}: the model's code decides that in Python, of the values of {read}",
            next(filter(None, lines), type(self._compiler.model).__name__),
            "make it before the step, as an entry of the batch; or leave check=False away: the first step is then "
            "compared with eager PyTorch; or use one microbatch and dp=1",
        )  # fmt: skip

    def refuse_different(self) -> None:
        """Raise what a comparison raised."""
        if self._different is not None:
            raise self._different

    @contextmanager
    def compared_steps(self) -> Iterator[list[ComparedStep]]:
        """The steps that were compared within the context, by this process' trainer and with nothing left out that
        training has: it would compute the same again.
        """
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None

    def compare(self, asked: Comparison, meeting: Meeting, group: dist.ProcessGroup | None) -> None:
        """Compare what programs train on a batch with eager PyTorch. All ranks call it. group: over which rank 0 tells
        the others what it found; None: it is alone. DifferenceError, on every rank.
        """

        def make() -> tuple[Vote, None]:
            self._idle, self._compared = False, ""
            if group is None or dist.get_rank() == 0:
                self._warn_of_caches(asked)
            if group is None:
                self._alone(asked)
            else:
                first_makes(partial(self._of_several, asked), group)
            return replace(NOTHING, value=float(self._idle)), None

        try:
            _, votes = meeting.votes("check", make)
        except DifferenceError as error:
            self._different = error
            raise
        self.idle = any(vote.value for vote in votes) and len(set(asked.names)) > 1
        if not self.idle:
            self._remember(asked)
            self.due(asked.options.microbatches).difference_update(asked.names)
            self.met(asked.pairs)

    def _remember(self, comparison: Comparison) -> None:
        """The cache knows what was compared, if it was, on the rank that did."""
        programs, kept = self._made[comparison.options.microbatches], self._compiler.kept
        for name in self._new(comparison) if self._compared else ():
            kept.keep_checked(str(self.latest), programs[name].match, programs[name].options)
        for pair in comparison.pairs if self._compared == WHOLE else ():
            kept.keep_met(pair, comparison.ready[0], comparison.options)

    def _warn_of_caches(self, comparison: Comparison) -> None:
        """Where the eager step that programs are compared with is not the one of the model's own default."""
        caches = any(module.use_cache for module in caching(self._compiler.model.modules()))
        if caches and not self._told_of_caches and any(map(_starts_again, comparison.ready)):
            self._told_of_caches = True
            log.warning(
                "position_ids start again within a row: csc trains such documents apart, and compares with eager "
                "PyTorch that does (config.use_cache = False). With use_cache=True, as the model's config has it, "
                "a plain training loop may take each row for one document, and has another loss; set "
                "model.config.use_cache = False there"
            )

    def _alone(self, comparison: Comparison) -> None:
        """On this rank, whose trainer runs all ranks of the program."""
        how = self._how(comparison)
        if not how:
            return
        random = comparison.trainer.program.manifest.random
        keeps = self._kept is not None and how == WHOLE and not self._opaque
        masks = self._masks(comparison, self._drawn(comparison, how)) if keeps else None
        if masks is not None and self._with_masks(comparison, masks):
            return
        keeps = keeps and not random
        steps: list[ComparedStep] = []

        def untouched() -> AbstractContextManager[None]:
            return nullcontext() if keeps else undisturbed(self._compiler.model)

        def own_step() -> EagerStep:
            with untouched():  # what rounding does is asked of eager PyTorch behind it, from where it began
                steps.append(compared_step(comparison.trainer, list(map(comparison.complete, comparison.ready))))
            self._idle = comparison.trainer.idle
            return steps[0].step

        with untouched():
            result = self._found(how, comparison, own_step, keeps)
        if result.kept:
            self._keep(steps)

    def _keep(self, steps: Sequence[ComparedStep]) -> None:
        assert self._kept is not None
        self._kept.extend(steps)

    def _drawn(self, comparison: Comparison, how: str) -> int:
        """The seed of the training step that comes, where eager PyTorch can be given its masks: the same program for
        all of a batch, dropout alone, and a batch that the model takes at once. NO_CHANCE elsewhere.
        """
        manifest = comparison.trainer.program.manifest
        at_once = isinstance(comparison.batch, Mapping) and comparison.options.loss_weight == "auto"
        alike = len(set(comparison.names)) == 1 and all(draw.p is not None for draw in manifest.draws)
        if how != WHOLE or not manifest.random or not at_once or not alike or self._opaque:
            return executor.NO_CHANCE
        with devices.forked(comparison.trainer.device):
            return executor.draw()

    def _masks(self, comparison: Comparison, drawn: int) -> SameMasks | None:
        """Of a step with this seed."""
        if drawn == executor.NO_CHANCE:
            return None
        return SameMasks(comparison.trainer.program.manifest.draws, drawn, len(comparison.ready))

    def _with_masks(self, comparison: Comparison, masks: SameMasks) -> bool:
        """Compare the training step with an eager one that has its dropout. False: nothing came of it, nothing is left
        of it.
        """
        steps: list[ComparedStep] = []
        drawing = torch.get_rng_state()

        def own_step() -> EagerStep:
            steps.append(compared_step(comparison.trainer, list(map(comparison.complete, comparison.ready)), None))
            self._idle = comparison.trainer.idle
            return steps[0].step

        result = self._found(WHOLE, comparison, own_step, keeps=True, masks=masks)
        if result.kept:
            self._keep(steps)
            return True
        torch.set_rng_state(drawing)
        return False

    def _of_several(self, comparison: Comparison) -> None:
        """On the first rank, which runs all ranks' programs itself: the training step that comes; where nothing came of
        that, with nothing left to chance.
        """
        how = self._how(comparison)
        if not how:
            return
        drawn = self._drawn(comparison, how)
        masks = self._masks(comparison, drawn)
        result = self._found(how, comparison, lambda: self._own_step(comparison, drawn), masks=masks)
        if result.skipped and masks is not None:
            self._found(how, comparison, lambda: self._own_step(comparison, executor.NO_CHANCE))

    @property
    def _opaque(self) -> bool:
        """Whether the model has modules that draw nobody knows what."""
        return any(map(is_opaque, self._compiler.model.modules()))

    def _how(self, comparison: Comparison) -> str:
        """WHOLE, BY_LAYER, or "" if there is nothing to compare."""
        programs, kept = self._made[comparison.options.microbatches], self._compiler.kept
        known = all(self._known(programs[name]) for name in self._new(comparison))
        together = all(kept.met(pair, comparison.ready[0], comparison.options) for pair in comparison.pairs)
        if not comparison.again and known and together:
            return ""
        if not too_much(self._compiler.model):
            return WHOLE
        if not comparison.again and known:
            log.warning("microbatches of other kinds or sizes than before meet: the model is too large to compare that")
            return ""
        return BY_LAYER

    def _kinds(self, comparison: Comparison) -> tuple[str, bool]:
        """In what microbatches differ of which there are several kinds, and whether each was right in steps of its own;
        else "" and False.
        """
        programs = self._made[comparison.options.microbatches]
        matches = [programs[name].match for name in comparison.names]
        if len(meeting_in(matches)) < 2:
            return "", False
        return _difference(matches), bool(comparison.pairs) and not self._new(comparison)

    def _new(self, comparison: Comparison) -> list[Name]:
        due = self.due(comparison.options.microbatches)
        return [name for name in dict.fromkeys(comparison.names) if name in due]

    def _found(
        self,
        how: str,
        asked: Comparison,
        own_step: Callable[[], EagerStep],
        keeps: bool = False,
        masks: SameMasks | None = None,
    ) -> Checked:
        """What the comparison finds; the log has it, and the cache remembers it. keeps: the own step is kept, too.
        masks: of its dropout.
        """
        asked.progress(CHECK)
        programs = self._made[asked.options.microbatches]
        if how == BY_LAYER:
            files = {name: text for program in programs.values() for name, text in program.packed.files.items()}
            result = check_by_layer(self._compiler, asked.ready, asked.options, files)
        else:
            draws, kinds = asked.trainer.program.manifest.random, self._kinds(asked)
            result = check(
                self._compiler, own_step, asked.trainable, asked.batch, asked.ready, asked.options, self._steady,
                masks, draws, *kinds,
            )  # fmt: skip
            self._steady = self._steady or not result.skipped
            if not result.skipped and (self._new(asked) or asked.pairs):
                began = time.perf_counter()
                result = replace(result, in_float32=self._in_float32(asked, draws, kinds))
                result = replace(result, seconds=result.seconds + time.perf_counter() - began)
        result = replace(result, kept=keeps and not result.skipped)
        if result.skipped and masks is not None:
            log.info("compared with nothing left to chance: %s", result.skipped)
            return result
        self.latest = result
        (log.warning if result.skipped else log.info)("%s", result)
        self._compared = "" if result.skipped else how
        return result

    def _in_float32(self, asked: Comparison, draws: bool, kinds: tuple[str, bool]) -> Checked | None:
        """The same of programs that compute in float32: in 16 bits a few percent of a gradient, and more where the loss
        all but cancels, are what rounding makes, and may as well be what a program makes wrongly. None: they do anyway,
        or there are none.
        """
        if any(parameter.dtype in IN_HALF for parameter in self._compiler.model.parameters()):
            combines = len(asked.ready) > 1 and asked.options.loss_weight != "auto"
            compiler = self._widened() if combines or kinds[0] else None  # a capture: elsewhere proofs do
        else:
            compiler = self._compiler if asked.options.precision != "model" else None
        if compiler is None:
            return None
        options = replace(
            asked.options, precision="model", keep_fp32=(), fuse=False, cuda_graphs=False, memory=None, features=False
        )
        if asked.options.features:  # what the user says of stages, he says of a program without its encoders
            options = replace(options, cuts=None, stages=None, placement=None, chunks=None, schedule="auto")
        is_own = compiler is self._compiler
        ready, batch = (asked.ready, asked.batch) if is_own else _as_float32((asked.ready, asked.batch))
        one_of_each = list(dict(zip(asked.names, ready)).values())
        with TemporaryFolder() as folder:
            try:
                directories = asked.write(compiler, one_of_each, options, Path(folder))
            except InputError as error:
                log.info("not compared in float32, for want of a program: %s", error)
                return None
            try:
                return check(
                    compiler, lambda: self._step_of_all(directories, compiler, compiler.complete, ready),
                    asked.trainable, batch, ready, options, True, None, draws, *kinds,
                )  # fmt: skip
            except torch.OutOfMemoryError as error:
                log.info("not compared in float32: %s", error)
                return None

    def _widened(self) -> Compiler | None:
        """Of the model with all its numbers in float32; None where that cannot be made or is too much."""
        model = self._compiler.model
        if any(map(is_quantised, model.parameters())):
            return None
        try:
            copied = copy.deepcopy(model)
        except Exception as error:  # what a user's model holds
            log.info("not compared in float32: the model cannot be copied: %s", error)
            return None
        for parameter in copied.parameters():
            parameter.grad = None
        wide = copied.float()
        return None if too_much(wide) else self._compiler.of(wide)

    def _own_step(self, comparison: Comparison, drawn: int) -> EagerStep:
        """Of all ranks in this process, with the model's weights, in the programs that decide as those asked for."""
        with TemporaryFolder() as folder:
            directories = []
            made = self._made[comparison.options.microbatches]
            variants = made[comparison.names[0]].variants
            for number, new in enumerate(new for new in made.values() if new.variants == variants):
                directories.append(Path(folder) / str(number))
                install(new.packed.files, directories[-1], new.match.batch)
            return self._step_of_all(directories, self._compiler, comparison.complete, comparison.ready, drawn)

    def _step_of_all(
        self,
        directories: Sequence[Path],
        compiler: Compiler,
        complete: Callable[[Mapping[str, Any]], dict[str, Any]],
        ready: Sequence[Mapping[str, Any]],
        drawn: int = executor.NO_CHANCE,
    ) -> EagerStep:
        """A step of a compiler's programs, in these directories, all of whose ranks run in this process."""
        programs = list(map(load, directories))
        trainer = Trainer(programs[0], weights_of(compiler.model), InProcess(programs[0]))
        for program in programs[1:]:
            trainer.add(program)
        with undisturbed(compiler.model):
            step = step_of(trainer, list(map(complete, ready)), drawn)
        self._idle = trainer.idle
        return step

    def _known(self, program: NewProgram) -> bool:
        """Whether the cache knows that the program was compared."""
        return bool(self._compiler.kept.checked(program.match, program.options))


def _as_float32(given: Any) -> Any:
    """Batches with what is in 16 bits in float32."""
    return pytree.tree_map_only(torch.Tensor, lambda entry: entry.float() if entry.dtype in IN_HALF else entry, given)


def meeting_in(matches: Sequence[Match]) -> frozenset[str]:
    """What meets in a step of these microbatches."""
    if len({match.key for match in matches}) == 1:
        return frozenset({matches[0].kind})
    sizes: dict[str, set[int]] = {}
    for _, shapes in (match.key for match in matches if match.key is not None):
        for name, _, shape in shapes:
            for dimension, size in enumerate(shape):
                sizes.setdefault(f"{name}.shape[{dimension}] differs", set()).add(size)
    return frozenset({match.kind for match in matches} | {what for what, found in sizes.items() if len(found) > 1})


def _difference(matches: Sequence[Match]) -> str:
    """In what microbatches differ, in a phrase."""
    captures = [match.capture for match in matches if match.capture is not None]
    entries = [frozenset[str](capture.sizes.entries) for capture in captures]
    read = sorted({entry for capture in captures for entry in capture.values})
    lacked = sorted(frozenset[str]().union(*entries).difference(frozenset[str].intersection(*entries)))
    how = [f"what Python reads of {', '.join(map(repr, read))}"] * bool(read)
    how += [f"whether they have {', '.join(map(repr, lacked))}"] * bool(lacked)
    return " and ".join(how) or "their sizes"


def _starts_again(microbatch: Mapping[str, Any]) -> bool:
    """Whether positions say that a row holds several documents: Hugging Face reads them so where there is no mask."""
    positions = microbatch.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.is_meta:
        return False
    return microbatch.get("attention_mask") is None and bool((positions.diff(dim=1) < 0).any())
