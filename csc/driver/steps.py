"""The steps of a compiled model: each is agreed on by all ranks, then run; what it lacks is compiled before."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from csc.cache.model_entries import Packed
from csc.capture.batch import split_batch
from csc.capture.guards import Match
from csc.capture.model_guards import ModelGuards, autocasts
from csc.capture.quantised_weights import weights_of
from csc.check.first import Checked, ComparedStep
from csc.driver.batches import COUNTING, IDS, ReplicaShare, Share, fullest, widths_of
from csc.driver.checking import meeting_in
from csc.driver.features import FeaturesAhead
from csc.driver.model_programs import GivenBatches, ModelPrograms
from csc.driver.notices import NewSizes, TriedWidths, notice, unlogged, what_trains
from csc.driver.options import changed, of_fewer
from csc.driver.programs import ProgramSet, evaluated, options_for, own_rank
from csc.driver.training_state import Prefetched
from csc.errors import DifferenceError, InputError, StepFailed
from csc.ir.program import Options
from csc.runtime.batches import Fetched, Microbatches, ahead
from csc.runtime.executor import Encoding
from csc.runtime.joining import OptimizerState, ask, bring, give_state, give_weights, is_under_way
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import (
    COMPILATION,
    EVALUATION,
    FIRST_STEP,
    NOTHING,
    STEP,
    STEPS,
    FewerRanks,
    Interrupted,
    Joining,
    StepVote,
    Vote,
    answering,
)
from csc.runtime.optimizer import SteppedParameter, hook, listed, mirrored, owned
from csc.runtime.specs import Manifest, cut
from csc.runtime.timelines import gathered, timeline
from csc.runtime.trainer import Trainer
from csc.simulation.page import bytes_text
from csc.simulation.pipeline import from_json as read_pipeline
from csc.simulation.pipeline import peaks as peaks_of_run
from csc.simulation.simulate import simulate
from csc.simulation.timeline import Timeline

# --- Modes in which a step would not be the one that was compiled: eval, inference_mode, autocast --------------------


def refuse_eval(was: ModelGuards | None, model: nn.Module) -> None:
    """InputError for a model that was put in eval mode since."""
    if was is not None and was.was_training and not model.training:
        raise InputError(
            "the model has been put in eval mode since it was compiled", "train_step",
            "call compiled.train() before a training step",
        )  # fmt: skip


def refuse_no_gradient(manifest: Manifest) -> None:
    """InputError where eager PyTorch's backward would have nothing to do."""
    if not any(spec.trainable and spec.reached for spec in manifest.parameters):
        raise InputError(
            "the loss depends on no parameter that trains", "train_step",
            "look for detach(), no_grad() or data between the parameters and the loss",
        )  # fmt: skip


def refuse_torch(was: ModelGuards | None, operation: str) -> None:
    """InputError for modes of torch around a call of this name."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "torch.inference_mode is on: what is made in it trains nothing", operation,
            f"call {operation} outside of it; torch.no_grad does no harm",
        )  # fmt: skip
    if was is not None and not was.was_autocast and autocasts():
        raise InputError(
            "autocast is on, and was not when the model was compiled", operation,
            f'compile with precision="bf16" and call {operation} outside of torch.autocast',
        )  # fmt: skip


# --- The memory that the plan expects, beside what was measured ------------------------------------------------------


def planned_memory(program: LoadedProgram, ranks: tuple[int, ...]) -> float | None:
    """All that these ranks hold, each at its fullest, as the plan accounts for it."""
    figures = program.manifest.plan.get("pipeline")
    if not figures:
        return None
    pipeline = read_pipeline(figures)
    peaks = peaks_of_run(pipeline, program.schedule, simulate(pipeline, program.schedule))
    return sum(peaks[program.manifest.mesh.coordinates(rank).pp] for rank in ranks)


def beside(metrics: Mapping[str, float]) -> str:
    """What was planned and what was measured, of a device whose measure is of tensors alone: on a CPU it is of the
    whole process, with Python and its libraries, which no plan holds.
    """
    measured, planned = bytes_text(metrics["peak_memory"]), bytes_text(metrics["planned_memory"])
    return f"memory of this process' ranks: {planned} planned; {measured} measured"


# --- Notices gradients that something else than csc has scaled, where this process has a part of the model alone -----
#
# torch.nn.utils.clip_grad_norm_ over the parameters of a rank clips by the norm of that rank's part: another factor on
# each rank, and no error anywhere.


log = logging.getLogger("csc")
MOST = 64  # gradients that are looked at, spread over all


class ScaledGradients:
    """Of one model. It remembers counters of writes of some gradients of the last step, without their memory: they show
    a write in place also if the loop has set `.grad` to None since. It says so once.
    """

    def __init__(self) -> None:
        self._given: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._has_said = False

    def given(self, trainer: Trainer) -> None:
        """These are the gradients, as they should stay."""
        if self._has_said or not _has_a_part(trainer):
            return
        having = [parameter for parameter in trainer.parameters() if parameter.grad is not None]
        self._given = [_remembered(parameter) for parameter in having[:: len(having) // MOST + 1]]

    def look(self) -> None:
        """Warn if one was written to in place, and not set to zeros."""
        written = [gradient for gradient, counter, before in self._given if counter._version != before]
        least = min(written, key=torch.Tensor.numel, default=None)  # who sets gradients to zeros writes to all
        if least is not None and (least.grad is None or bool(least.grad.any())):
            self._has_said = True
            log.warning(
                "the gradients of the last step were changed in place. Each process here has a part of the model: "
                "torch.nn.utils.clip_grad_norm_ clips each part by its own norm, by another factor on each rank; call "
                "compiled.clip_grad_norm_(max_norm) in its place. A factor that is the same on all ranks does no harm."
            )
        self._given = []


def _remembered(parameter: nn.Parameter) -> tuple[nn.Parameter, torch.Tensor, int]:
    """With a tensor that has no entries, and the gradient's counter of writes."""
    assert parameter.grad is not None
    counter = parameter.grad.detach()  # shares the counter, and the memory until it is given another
    counter.data = torch.empty(0, dtype=counter.dtype, device=counter.device)
    return parameter, counter, counter._version


def _has_a_part(trainer: Trainer) -> bool:
    """Whether other processes have parameters, or entries of some, that this one has not."""
    mesh, zero = trainer.program.manifest.mesh, trainer.program.manifest.zero
    divided = mesh.pp > 1 or mesh.tp > 1 or (zero > 0 and mesh.size > 1)
    return divided and len(trainer.transport.ranks) < mesh.size


# --- The steps of a compiled model: each is agreed on by all ranks, then run; what it lacks is compiled before -------
#
# microbatches: how many, instead of those of the options. following: the batch of the step after it, if that is known.


SETTLED = 2  # steps until memory is what it will be: the first one warms up


@contextmanager
def _noting(changes: Sequence[str]) -> Iterator[None]:
    """Add to a step that ranks do not agree on what has changed on this one."""
    try:
        yield
    except StepFailed as error:
        for change in filter(None, changes):
            error.add_note(f"on this rank the model has changed since it was compiled: {change}")
        raise


class Steps:
    """With the programs of a model, on the batches that it is given."""

    def __init__(self, programs: ModelPrograms, given: GivenBatches, options: Options) -> None:
        self.programs, self.given, self._options = programs, given, options
        self._count = 0
        self._evaluating: Steps | None = None
        self._planned: tuple[Trainer | None, float | None] = (None, None)  # bytes that the plan of a trainer expects
        self._told: ProgramSet | None = None  # of which it was said what trains
        self._new_sizes, self._tried_widths = NewSizes(), TriedWidths()
        self._scaled = ScaledGradients()
        self._handed: tuple[Any, Fetched[Any]] | None = None  # a loader of `ahead`, and its batch that is trained on
        self.metrics: dict[str, float] = {}
        self._trained = 0
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # that were made
        self._state: OptimizerState | None = None  # of the others' optimizer, for one that is to be made
        self._standby: Packed | None = None  # the program of one rank fewer

    def options(self, microbatches: int | None = None) -> Options:
        """Those of a step. InputError if there cannot be so many."""
        return self._options if microbatches is None else changed(self._options, microbatches=microbatches)

    def trainer(self, batch: Any = None, microbatches: int | None = None, check: bool = True) -> Trainer:
        """The runtime for a batch, None for the example. check: False: without comparing new programs."""
        batches, options = self.given, self.options(microbatches)
        batch = batches.example if batch is None else batch
        ready = batches.padded(batches.ready(batch, options))
        full = batches.full(ready, self._options)
        return self.programs.current().trainer(
            ready, options, self.programs.progress, batch if check else None, full
        )  # fmt: skip

    @property
    def current(self) -> Trainer:
        """What has made the last step, or makes the example's. Whoever asks for parameters waits for no comparison: the
        first step is compared as the training step that it is.
        """
        return self.programs.set.last or self.trainer(check=False)

    @property
    def of_parameters(self) -> Trainer:
        """The same, for the parameters that the model has now, and those of them that train now."""
        changed = self.programs.changed()
        return self.trainer(check=False) if changed.parameters or changed.trainable else self.current

    @property
    def needs(self) -> frozenset[str]:
        """The entries of a batch that have to be loaded in this process."""
        programs, example = self.programs.set, self.given.example
        read = self.current.needs | programs.on_the_host | programs.encoded
        tensors, _ = split_batch(fullest(example) if isinstance(example, (list, tuple)) else example)
        return frozenset(name for name, tensor in tensors.items() if name in read or not tensor.is_floating_point())

    def check(self) -> str:
        """Compare the example's program with eager PyTorch, unless that was done; what it gave. DifferenceError."""
        programs, batches, options = self.programs, self.given, self._options
        if any(parameter.is_meta for parameter in programs.compiler.model.parameters()):
            ready = batches.ready(batches.example, options)
            return str(programs.current().check_by_layer(ready, options, programs.progress))
        self.trainer()
        return str(programs.set.checking.latest or Checked(skipped="that was done before, as the cache knows"))

    def complete(self, matches: Sequence[Match], trainer: Trainer) -> list[dict[str, Any]]:
        """Microbatches as the runtime takes them. InputError if one's placeholders do not fit its features."""
        return [trainer.reads(match) for match in self.programs.set.checked_places(matches)]

    def train(self, batch: Any, microbatches: int | None, local: bool, following: Any = None) -> torch.Tensor:
        """One training step; the loss."""
        self._refuse_local(local or isinstance(batch, ReplicaShare))
        if self._state is not None:
            raise InputError(
                "the optimizer of the other ranks has a state, which no optimizer of this one was given", "train_step",
                "make it with compiled.optimizer(...) after compiled.rejoin(), as the other ranks have made theirs",
            )  # fmt: skip
        if following is not None and self.encodes_ahead is None:
            raise InputError(
                "nothing is done ahead for a next batch", "train_step",
                "compile with encode_ahead=True and a frozen encoder, or leave ahead= out",
            )  # fmt: skip
        if following is None and self.encodes_ahead is not None and self._handed is not None:
            following = self._handed[1].following() if self._handed[1].batch is batch else None
        while True:
            try:
                self.settle()
                self._stand_by()
                if self._standby is not None:
                    self._one_optimizer()
                with torch.enable_grad():  # as a forward that is trained runs, also where the caller is in no_grad
                    loss = self._step(STEP, batch, microbatches, local, following)
            except Joining:
                with suppress(Interrupted):  # a rank has died meanwhile: those that were lost are not all there
                    self._take_up()
            except FewerRanks:
                continue
            else:
                self._trained += 1
                return loss

    # --- ranks with mirrors that have lost one ---------------------------------------------------------------------

    def _stand_by(self) -> None:
        """Before the first step: the program that ranks with mirrors go on with, if one is lost. All ranks call it.
        InputError if there is none.
        """
        survive = self.programs.settings.survive
        if survive is None or not survive.mirror or self._standby is not None:
            return
        _ = self.current  # with the group of all ranks
        if own_rank() is not None:
            self._standby = self.programs.standby(
                self.given.microbatch(self._options), self._options, of_fewer(self._options)
            )  # fmt: skip

    def settle(self) -> None:
        """If a rank is lost that is mirrored, all that are left go on as a mesh of a rank fewer. All ranks call it,
        each having made the same steps.
        """
        survival = self.programs.set.survival if self.programs.settings.survive is not None else None
        if survival is None or not survival.lacks:
            return
        trainer, model, began = self.current, self.programs.compiler.model, time.perf_counter()
        own, kept = owned(trainer), mirrored(trainer)
        each = [own + [replace(one, writes=False) for one in kept], kept + [replace(one, writes=False) for one in own]]
        given = trainer.transport.meeting.hold("optimizer", lambda: (NOTHING, list(map(self._given_away, each))))
        with answering("a rank", "those that are left were given what a lost one had"):
            gradients = bring(trainer.own, survival.members, weights_of(model))
        options, self._options = self._options, of_fewer(self._options)
        self.programs.start_again(None, None)
        self._evaluating = None
        if self._standby is not None:
            self.programs.set.compiled.take(self._standby, self.given.microbatch(self._options), self._options)
        trainer = self.trainer(check=False)
        for parameter in model.parameters():
            parameter.grad = None
        boxes = {spec.name: trainer.own.box(spec) for spec in trainer.own.trained}
        for name, parameter in trainer.named_parameters():
            if name in gradients:
                box = boxes[name]
                gradient = gradients[name] if box is None else cut(gradients[name], box)
                parameter.grad = gradient.to(parameter.device)
        own_state, kept_state = (
            give_state(listed_state, listed_of, owned(trainer))
            for (_, listed_state), listed_of in zip(given, each, strict=True)
        )
        assert own_state is not None and kept_state is not None
        optimizer, _ = given[0]
        if trainer.own.data is not None:
            hook(optimizer, trainer.own.data)
        own_state.with_more(kept_state).put_in_place(optimizer, owned(trainer))
        survival.end()
        if survival.members[0] == survival.me:
            log.warning(
                "%s goes on as %s: parameters, gradients and the optimizer's state of the lost rank came from its "
                "neighbour, and from no checkpoint, in %.2f s", options.mesh, self._options.mesh,
                time.perf_counter() - began,
            )  # fmt: skip

    # --- ranks that were lost and come back ------------------------------------------------------------------------

    def rejoin(self) -> int:
        """In the place of a rank that was lost: have what the others have, and the number of their steps. 0 where a job
        begins.
        """
        settings = self.programs.settings
        if settings.survive is None:
            raise InputError("the job does not survive a lost rank", "rejoin", "compile with survive=1")
        if not self.given.known:
            raise InputError(
                "there is no example, of which a rank that joins makes its program", "rejoin",
                "give csc.compile the same example=batch on every rank",
            )  # fmt: skip
        if not is_under_way():
            return self._trained
        rank = int(os.environ["RANK"])
        admission = ask(rank, settings.timeout)
        if admission is None:
            return 0
        admission.enter(rank, self._options.mesh.size, settings.timeout)
        give_weights(admission, self.programs.compiler.model)
        self._trained, self._count = admission.steps, admission.calls
        self._state = give_state(None, (), owned(self.trainer(check=False)))
        return admission.steps

    def _take_up(self) -> None:
        """Those that were lost are there again: all build what ranks share anew."""
        trainer, survival, model = self.current, self.programs.set.survival, self.programs.compiler.model
        assert survival is not None
        own = owned(trainer)
        try:
            given = trainer.transport.meeting.hold("rejoin", lambda: (NOTHING, self._given_away(own)[1]))
            trainer.collect(weights_of(model))
        except (InputError, StepFailed) as error:
            if isinstance(error, Interrupted):
                raise
            survival.refuse(str(error))
            return
        admission = survival.admit(self._trained, self._count)
        give_weights(admission, model)
        trainer.own.rejoined(self._options.mesh, survival.me)
        self.programs.start_again(trainer.own, self.programs.settings.survive)
        self._evaluating = None
        self.trainer(check=False)
        give_state(given, own, ())
        if admission.source == survival.me:
            log.warning("all ranks train again, from step %d on", admission.steps)

    def _given_away(self, own: Sequence[SteppedParameter]) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer, and what others are to have of its state. InputError if they cannot have it."""
        optimizer = self._one_optimizer()
        return optimizer, listed(optimizer, own)

    def _one_optimizer(self) -> torch.optim.Optimizer:
        """InputError if it is not the only one that was made."""
        if len(self._optimizers) > 1:
            gc.collect()  # one that was replaced may still be there
        optimizers = list(self._optimizers)
        if len(optimizers) != 1:
            fault = "several optimizers were" if optimizers else "no optimizer was"
            raise InputError(
                f"{fault} made with compiled.optimizer(...), and where ranks come or go others get the state of one",
                "optimizer", "make one, with groups of parameters where these have different options",
            )  # fmt: skip
        return optimizers[0]

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """It steps what trains: after `rejoin` it gets the state of the others'."""
        self._optimizers.add(optimizer)
        if self._state is not None:
            self._state.put(optimizer, owned(self.current))
            self._state = None

    def _refuse_local(self, local: bool) -> None:
        if local and self.programs.settings.survive:
            raise InputError(
                "each rank has samples of its own, and those of a rank that dies would be lost with it", "train_step",
                "give every rank the whole batch, or compile without survive=",
            )  # fmt: skip

    @property
    def encodes_ahead(self) -> FeaturesAhead | None:
        """What frozen encoders make of the next batch; None: nothing, or on disk."""
        encoders = self.programs.set.features
        return encoders.source if encoders is not None and isinstance(encoders.source, FeaturesAhead) else None

    def evaluate(self, batch: Any, microbatches: int | None, local: bool) -> torch.Tensor:
        """The loss of a batch in eval mode, by programs for the training programs of now."""
        count = self._options.microbatches if microbatches is None else microbatches
        self._refuse_local(local or isinstance(batch, ReplicaShare))
        while True:
            self.settle()
            evaluating = self.evaluating
            with suppress(FewerRanks), evaluated(self.programs.compiler.model), torch.no_grad():
                return evaluating._step(EVALUATION, batch, count, local)

    @property
    def evaluating(self) -> Steps:
        """Those in eval mode, cut as the training programs of now. All ranks ask for it."""
        _ = self.current  # whose programs are followed
        if self._evaluating is None or self._evaluating.programs.training is not self.programs.set:
            programs = self.programs.evaluating()
            self._evaluating = Steps(programs, self.given.of(programs), options_for(self._options))
        return self._evaluating

    def compile_for(self, batch: Any, microbatches: int | None, local: bool) -> None:
        """The programs of a batch, without a step."""
        while True:
            self.settle()
            self._stand_by()
            with suppress(FewerRanks), torch.enable_grad(), self.agreed(COMPILATION, batch, microbatches, local):
                return

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients; their norm before."""
        norm = self.current.clip_grad_norm_(max_norm)
        self._scaled.given(self.current)
        self.metrics["grad_norm"] = float(norm)
        return norm

    def _step(
        self, operation: str, batch: Any, microbatches: int | None, local: bool, following: Any = None
    ) -> torch.Tensor:
        self._scaled.look()
        with self.agreed(operation, batch, microbatches, local, following) as agreed:
            trainer, dealt, vote, compared, encoding = agreed
            self._count += 1
            if operation == STEP:
                self._tell_what_trains(trainer)
            loss = compared.keep(trainer) if compared is not None else trainer.run(dealt, vote, None, encoding)
            if self.encodes_ahead is not None:
                self.encodes_ahead.keep(encoding)
            self._measure(trainer)
            if operation == STEP:
                self._scaled.given(trainer)
            return loss

    def _tell_what_trains(self, trainer: Trainer) -> None:
        """Once for what is frozen, and by the first rank."""
        programs = self.programs.set
        if self._told is not programs and trainer.transport.ranks[0] == 0:
            notice(what_trains(self.programs.compiler.model, trainer.program.manifest))
        self._told = programs

    @contextmanager
    def agreed(
        self, operation: str, batch: Any, microbatches: int | None, local: bool, following: Any = None
    ) -> Iterator[tuple[Trainer, Microbatches, StepVote, ComparedStep | None, Encoding | None]]:
        """Within the context all ranks are about to make the step of a batch: its trainer, the microbatches, and what
        any rank has said of it; the step itself, if the check has made it just now; and what is encoded in it.
        """
        batches, programs, options = self.given, self.programs.set, self.options(microbatches)
        meeting = programs.meeting(options)
        divided = batch if isinstance(batch, ReplicaShare) else ReplicaShare()
        share = Share(options.mesh, options.microbatches, meeting, local or batch is divided, divided.said)
        changes: list[str] = []

        def ready_from(batch: Any) -> list[dict[str, Any]]:
            was = self.programs.set.guards.model
            refuse_eval(was, self.programs.compiler.model)
            refuse_torch(was, operation)
            return batches.ready(batch, options, share.parts)

        def prepare(ready: list[dict[str, Any]]) -> tuple[Vote, tuple[Trainer, Microbatches, Encoding | None] | None]:
            batches.check(ready if share.own else batch, share.own)
            ready = self._of_widths(ready, batch)
            changed = self.programs.changed(ready[0])
            changes.append(str(changed))
            with programs.compiling:
                matches = [] if changed else programs.match(ready)
                trainer = None if changed else programs.handed_out(matches, options)
                if trainer is None:
                    if not changed:
                        log.info("no program for this batch yet: %s", programs.missing(matches, options))
                    return share.waits(ready, bool(changed)), None
                return known(ready, matches, trainer, share.known)

        def known(
            ready: list[dict[str, Any]], matches: Sequence[Match], trainer: Trainer, say: Any
        ) -> tuple[Vote, tuple[Trainer, Microbatches, Encoding | None]]:
            batches.check_cut(batch, trainer, share.parts)
            programs.unchecked(matches, options, batch if isinstance(batch, Mapping) and not share.own else None)
            if operation == STEP:
                refuse_no_gradient(trainer.program.manifest)
            vote, dealt = trainer.ready(self.complete(matches, trainer), local=share.own)
            coming, encoding = self._coming(following, trainer, options, share.parts)
            vote = replace(vote, step=replace(vote.step, nothing_ahead=encoding is None))
            decides, meets = programs.decides(matches, options), meeting_in(matches)
            return say([*ready, *coming], vote, decides, meets), (trainer, dealt, encoding)

        with meeting.turn(operation):
            compared: list[ComparedStep] = []
            with _noting(changes):
                ready, found, votes = share.agree(operation, lambda: ready_from(batch), prepare)
            served = share.served(votes) and found is not None and not programs.unmet(share.meets(votes))
            if (due := served and self._is_due) or not served:
                meeting.began()  # what is made now has meetings of its own
                programs = self.programs.current()
                trainer, compared = self._for_all(share, ready, batch, options, due, any(changes))
                ready = self._of_widths(ready, batch)
                found, votes = meeting.votes(
                    FIRST_STEP, lambda: known(ready, programs.match(ready), trainer, share.first)
                )
                if not programs.checking.idle:
                    programs.checking.met(programs.unmet(share.meets(votes)))
            assert found is not None
            programs.use(found[0])
            if operation not in STEPS or compared:
                meeting.began()
            trainer, dealt, encoding = found
            step_vote = StepVote.of_any(vote.step for vote in votes)
            yield trainer, dealt, step_vote, compared[-1] if compared else None, encoding

    def _of_widths(self, ready: list[dict[str, Any]], batch: Any) -> list[dict[str, Any]]:
        """Microbatches padded to the widths that programs are for. A batch that was divided for all has its widths."""
        return ready if isinstance(batch, ReplicaShare) else self.given.padded(ready)

    def _for_all(
        self, share: Share, ready: list[dict[str, Any]], batch: Any, options: Options, due: bool, changed: bool
    ) -> tuple[Trainer, list[ComparedStep]]:
        """The trainer with programs for the microbatches of all replicas, compared if that is due, and the steps that
        the check made. changed: the model has; else whoever waited is told of new sizes.
        """
        everyone, start = share.of_all(ready), time.perf_counter()
        if not isinstance(batch, ReplicaShare):
            self._try_widths(everyone, options)
        parts = self._of_widths(everyone, batch)
        try:
            trainer, compared = self._made(parts, options, everyone if share.own else batch, share.own, due)
        except DifferenceError as error:
            if widths_of(parts) != widths_of(everyone):
                error.add_note("microbatches were padded: widths=False of csc.compile leaves them as they come")
            raise
        if not due and not changed and trainer.transport.ranks[0] == 0:
            self._new_sizes.waited(time.perf_counter() - start, self._count)
        return trainer, compared

    def _coming(
        self, following: Any, trainer: Trainer, options: Options, parts: int
    ) -> tuple[list[dict[str, Any]], Encoding | None]:
        """The microbatches of the batch that follows, and what is encoded of them now; None where they are of sizes
        that no program is for. What is wrong with them is said in their step.
        """
        programs, features = self.programs.set, self.encodes_ahead
        if following is None or features is None or programs.features is None:
            return [], None
        try:
            coming = self.given.padded(self.given.ready(following, options, parts))
            matches = programs.match(coming)
            served = programs.serves(matches, options) is not None
        except InputError:
            return [], None
        return coming, features.encoding(programs.features, matches, trainer) if served else None

    def _made(
        self, ready: list[dict[str, Any]], options: Options, batch: Any, own_samples: bool, due: bool
    ) -> tuple[Trainer, list[ComparedStep]]:
        """The trainer for the microbatches of all replicas, compared if that is due, and the steps that the check made.
        own_samples: ranks brought samples of their own.
        """
        programs, progress = self.programs.set, self.programs.progress
        if own_samples and not self.given.known:
            self.given.example = ready
        before = programs.checking.latest
        with programs.checking.compared_steps() as compared:
            trainer = programs.trainer(ready, options, progress, batch, self.given.full(ready, self._options))
            if due:
                self.gather()
                programs.check(programs.match(ready), options, batch, progress)
        check = programs.checking.latest
        if check is not None and check is not before and not check.skipped and trainer.transport.ranks[0] == 0:
            unlogged(str(check))
        return trainer, compared

    def _try_widths(self, ready: list[dict[str, Any]], options: Options) -> None:
        """Find out whether microbatches of all replicas may be padded to the few widths. All ranks call it."""
        untried = self.given.untried(ready)
        if not untried or options.loss_weight != "auto":
            return
        _ = self.current  # the example's program, if there is none: its graph tells what the loss is
        programs, progress = self.programs.set, self.programs.progress
        if any(trainer.program.manifest.loss.weight not in COUNTING for trainer in programs.trainers):
            return
        trains = () if options.forward_only else dict(self.programs.compiler.model.named_parameters()).items()
        trainable = {name for name, parameter in trains if parameter.requires_grad}
        for microbatch, width in untried:

            def make(microbatch: Any = microbatch, width: int = width) -> dict[str, bytes]:
                return {"answer": programs.may_pad(microbatch, width, trainable, options, progress).encode()}

            answer = programs.of_first(make, options)["answer"].decode()
            programs.trials.learn(microbatch, width, answer)
            if own_rank() in (None, [0]):
                self._tried_widths.tried(microbatch[IDS].shape[1], width, answer)

    @property
    def _is_due(self) -> bool:
        """Whether the next step is one of those that are compared though their programs were."""
        every = self.programs.settings.check
        return every is not True and bool(every) and self._count % every == 0

    def gather(self) -> None:
        """Bring what any rank has trained or loaded into the model, in every process."""
        self.settle()
        trained = self.programs.set.trained
        if trained is not None:
            trained.collect(weights_of(self.programs.compiler.model))

    def _measure(self, trainer: Trainer) -> None:
        """The metrics of the step, with the planned memory; both are told once the first steps are over, where
        they are of the same (see csc.driver.steps).
        """
        self.metrics = {**trainer.metrics, **self.programs.set.feature_counts()}
        if self._planned[0] is not trainer:
            self._planned = (trainer, planned_memory(trainer.program, trainer.transport.ranks))
        planned = self._planned[1]
        if planned is not None:
            self.metrics["planned_memory"] = planned
            if self._count == SETTLED and trainer.device.type != "cpu":
                tell = notice if trainer.transport.ranks[0] == 0 else log.info
                tell(beside(self.metrics))

    def prepare(self, batch: Any, depth: int) -> None:
        """Plan a coming batch, which is at most `depth` steps ahead; another thread may train meanwhile."""
        programs = self.programs.set
        if programs.replays or self._options.mesh.cp == 1:  # what is replayed changes the model for a while
            return
        ready = self.given.padded(self.given.ready(batch, self._options))
        with programs.compiling:
            matches = programs.match(ready)
            trainer = programs.serves(matches, self._options)
            if trainer is None:
                return
            complete = [trainer.reads(match) for match in programs.checked_places(matches, features=False)]
        trainer.prepare(complete, depth)

    def ahead(self, batches: Iterable[Any], depth: int) -> Iterator[Any]:
        """The batches, each prepared while those before it are trained on."""
        if depth < 1:
            raise InputError(f"depth is {depth}", "ahead", "pass a whole number of at least 1")
        if self.given.known:
            self.trainer()  # what batches are planned for
        return self._handing(batches, ahead(batches, lambda batch: self.prepare(batch, depth), depth))

    def _handing(self, loader: Any, fetched: Iterator[Fetched[Any]]) -> Iterator[Any]:
        """The batches; which one is trained on is known meanwhile. A loop that is left puts the loader back to where
        that one was the last.
        """
        try:
            for batch in fetched:
                self._handed = loader, batch
                yield batch.batch
            self._handed = None
        finally:
            fetched.close()  # type: ignore[attr-defined]
            if self._handed is not None and self._handed[1].position is not None:
                loader.load_state_dict(self._handed[1].position)
            self._handed = None

    def behind(self, loader: Any) -> Any:
        """A loader to be saved, with the position of the batch that is trained on if `ahead` has fetched more."""
        if self._handed is None or self._handed[0] is not loader or self._handed[1].position is None:
            return loader
        return Prefetched(loader, self._handed[1].position)

    def timeline(self, batch: Any, microbatches: int | None) -> Timeline:
        """One step that also records when every rank ran what. If none was made yet, one is made and dropped before."""
        if not self._count:
            self._warm_up(batch, microbatches)
        trainer = self.trainer(batch, microbatches)
        before, trainer.trace = trainer.trace, True
        try:
            self.train(batch, microbatches, local=False)
        finally:
            trainer.trace = before
        return timeline(gathered(trainer.timeline), trainer.program.manifest)

    def _warm_up(self, batch: Any, microbatches: int | None) -> None:
        """A step that leaves gradients and random numbers as they were."""
        held = [(parameter, parameter.grad) for parameter in self.current.parameters()]
        state = torch.get_rng_state()
        self.current.zero_grad()
        try:
            self.train(batch, microbatches, local=False)
        finally:
            torch.set_rng_state(state)
            for parameter, gradient in held:
                parameter.grad = gradient
