"""The way through, for one model: capture, passes, emission; what was done once is not done again."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from csc.analysis.batch_limits import places_for_features
from csc.analysis.samples.combining import assumed, combination, labels_read, named_alike, proven, unlike
from csc.analysis.samples.propagation import OF_OTHERS
from csc.analysis.symbolic import sized
from csc.cache.inductor_folder import inductor_folder
from csc.cache.model_entries import Captured, ModelEntries, TracedProgram
from csc.cache.store import Store
from csc.capture.batch import device_of, doubtful, repeated, split_batch
from csc.capture.capture import capture, name_of, with_sizes_of
from csc.capture.guards import Guards, Match
from csc.capture.quantised_weights import stand_ins, weights_of
from csc.capture.trace.autograd import refuse_hooks
from csc.capture.trace.traced_model import refuse_tensors
from csc.codegen.write import write
from csc.errors import CscError, InputError
from csc.ir.capture_guards import Joints
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.loss import ONE_SAMPLE, check_combination, possible_weights
from csc.passes.pipeline import dividing, facts_behind, first_with, planning, traced_by_users, tracing, until
from csc.passes.regions import RegionsPass
from csc.passes.runner import CAPTURE, run
from csc.runtime.compile_pool import FunctionFolder, worker_count
from csc.runtime.fusing import lacks

# --- The passes that trace, run for many divisions of one model: what two of them have in common is made once --------
#
# Terms
#   begun       the Programs of the passes up to `loss`: the same whatever tp is, unless a component has a tp of its own
#   cut         what pass `regions` made of a graph: it looks at nothing else
#   joints      joint graphs of layers by pass `differentiate`, by the capture that they are of


Progress = Callable[[str], None]
OVER_BATCH = "over the whole batch"  # marks traced graphs of a model whose loss is computed so


@dataclass
class SharedTraces:
    """Of one model; what it keeps serves every division that is asked for later."""

    begun: dict[Hashable, tuple[Program, ...]] = field(default_factory=dict)
    cut: dict[fx.Graph, Program] = field(default_factory=dict)  # by the graph that was cut
    joints: dict[str, Joints | None] = field(default_factory=dict)  # by the name of the capture

    def history(self, key: Hashable, captured: Program, options: Options, progress: Progress) -> list[Program]:
        """The Program after the capture and after each pass that traces.

        key: of what the passes up to `loss` look at, for options `undivided` by tp. captured: with the sizes of its
        microbatch. options: of one microbatch and one replica.
        """
        history = self._cut(self._begun(key, captured, options, progress), options, progress)
        history = run(history, tracing(options)[len(history) - 1 :], options, progress)
        self.joints[name_of(captured)] = history[-1].joints
        return history

    def _begun(self, key: Hashable, captured: Program, options: Options, progress: Progress) -> list[Program]:
        *before, last = self.begun.get(key) or (captured,)
        with_joints = replace(last, joints=self.joints.get(name_of(captured)))
        passes = tracing(options)
        history = run([*before, with_joints], until(passes, "regions")[len(before) :], options, progress)
        self.begun.setdefault(key, tuple(history[: 2 + len(until(passes, "weighed"))]))
        return history

    def _cut(self, history: list[Program], options: Options, progress: Progress) -> list[Program]:
        whole, cutting = history[-1], tracing(options)[len(history) - 1]
        if not isinstance(cutting, RegionsPass):
            return history
        cut = self.cut.get(whole.graph)
        if cut is None:
            history = run(history, [cutting], options, progress)
            self.cut[whole.graph] = history[-1]
            return history
        return [*history, replace(
            whole, regions=cut.regions, templates=cut.templates, shared=cut.shared, loss_tokens=cut.loss_tokens,
            history=(*whole.history, cut.history[-1]), facts=facts_behind(cutting, whole.facts),
        )]  # fmt: skip


def undivided(options: Options) -> Options:
    """Without what the passes up to `loss` do not look at: how tp divides layers, whether logits are whole. A pass of a
    user may look at all.
    """
    if traced_by_users(options):
        return options
    own = options.mesh.own("tp") or options.mesh.in_front
    mesh: Mesh = options.mesh if own else replace(options.mesh, tp=1)
    return replace(options, mesh=mesh, sequence_parallel=False, loss_chunk=None, fuse=False, replicate=())


# --- What a batch of more samples than a microbatch shows of the model -----------------------------------------------
#
# It shows whether each sample is dealt with as it is alone.
#
# Terms
#   captured    of a batch: the Program that its capture gives, in its sizes, and that graph with plain numbers


log = logging.getLogger("csc")

TRIED = (2, 3)  # samples
COMPARED = "leave check=False away: the first step is then compared with eager PyTorch, whole batch and all; or, "

InItsSizes = tuple[Program, fx.Graph]


@dataclass
class MoreSamples:
    """Of one model."""

    captured: Callable[[Mapping[str, Any]], InItsSizes]
    axes: Mapping[str, int] = field(default_factory=dict)  # see csc.capture.batch.sample_axis
    known: dict[Hashable, str] = field(default_factory=dict)  # what is wrong, by traced graphs and number of parts

    def checked(
        self, microbatch: Mapping[str, Any], key: Hashable, traced: TracedProgram, options: Options, compared: bool
    ) -> TracedProgram:
        """The traced graphs, without the note that nothing is proven if two samples prove it.

        key: of the traced graphs. compared: the program's first step is compared with eager PyTorch, whole batch and
        all. InputError if the model does something else with a batch of all microbatches than with one of them, and how
        their losses combine rests on the trace of one; or if nothing proves that and nothing compares it.
        """
        parts = options.microbatches * options.mesh.dp
        if parts == 1 or options.loss_weight != "auto" or traced.program.combination.problem:
            return traced
        read = None if compared else labels_read(traced.program)
        if read is not None:
            raise InputError(
                f"the model's code reads the values of {read[0]!r} in Python, which are labels of the loss: what it "
                "makes of a microbatch's (how many classes, the largest) may be something else of the whole batch's",
                read[1] or "model",
                COMPARED + "make it before the step, as an entry of the batch; or use one microbatch and dp=1; or "
                f"{possible_weights(traced.program.combination)}",
            )
        if ONE_SAMPLE in traced.program.notes:
            return self._of_two(microbatch, key, traced, compared)
        whole_names = traced.program.combination.whole
        more = partial(repeated, microbatch, parts, whole_names, self.axes)
        refusal = self._once((key, parts), lambda: self._unlike(microbatch, *more()), "")
        if refusal:
            raise InputError(
                "the model computes with the number of samples in Python, and of a batch with more of them "
                f"{refusal}", "model",
                "use one microbatch and dp=1, with which the step is the model's own; or compute with x.shape[0] in "
                f"tensor operations; or {possible_weights(traced.program.combination)}",
            )  # fmt: skip
        return traced

    def _of_two(
        self, microbatch: Mapping[str, Any], key: Hashable, traced: TracedProgram, compared: bool
    ) -> TracedProgram:
        """Of microbatches of one sample whose loss is a mean over labels. InputError if several do not prove how they
        combine, and nothing compares it.
        """
        refusal = self._once(
            (key, TRIED), lambda: self._unproven(microbatch), "a batch of two samples cannot be traced"
        )
        if not refusal:
            return _without_note(traced)
        if not compared or OF_OTHERS in refusal:  # which rows these are is a matter of values: one step does not tell
            raise InputError(
                f"csc cannot prove that the losses of microbatches of one sample make the loss of the batch: {refusal}",
                "model",
                ("" if compared else COMPARED) + "use one microbatch and dp=1; or, if samples do not depend on each "
                f"other, {possible_weights(traced.program.combination)}",
            )
        log.warning(
            "how the losses of microbatches of one sample combine is taken to be by labels, and not proven: %s; the "
            "first step is compared with eager PyTorch; loss_weight='tokens' says that it is so",
            refusal,
        )
        return traced

    def _once(self, key: Hashable, ask: Callable[[], str], unknown: str) -> str:
        """unknown: the answer for a batch that the model refuses."""
        if key not in self.known:
            try:
                self.known[key] = ask()
            except CscError:
                self.known[key] = unknown
        return self.known[key]

    def _unproven(self, microbatch: Mapping[str, Any]) -> str:
        """Why several samples do not prove that the loss is a mean over the labels of all, as a phrase; "" if they do.
        Where two do not, three may: a number of the model's own may happen to be that of the samples.
        """
        problem = ""
        for number in TRIED:
            batch, times = repeated(microbatch, number, (), self.axes)
            differs = self._unlike(microbatch, batch, times)
            if differs:
                return f"of a batch of {times} {differs}"
            several, _ = self.captured(batch)
            shown = combination(several, several.graph)
            if not shown.problem:
                return ""
            problem = problem or f"{shown.problem} ({shown.where})"
        return problem

    def prove(self, microbatch: Mapping[str, Any], one: Program, joints: Joints | None) -> Joints | None:
        """joints with how losses combine, where a capture that is for one sample alone, which tells nothing of that, is
        that of two in all but sizes, and those prove it for all; None elsewhere.
        """
        if joints is None or not any(entry.shape[entry.samples : entry.samples + 1] == (1,) for entry in one.inputs):
            return None
        batch, times = repeated(microbatch, 2, (), self.axes)
        try:
            if self._unlike(microbatch, batch, times):
                return None
            two, graph = self.captured(batch)
        except CscError:
            return None
        combination, always = proven(two, two.graph)
        if combination.problem or not always:
            return None
        names = named_alike(self.captured(microbatch)[1], graph)
        return replace(joints, combinations={**joints.combinations, assumed(one): combination.renamed(names)})

    def _unlike(self, microbatch: Mapping[str, Any], batch: Mapping[str, Any], times: int) -> str:
        """What is not the same in the captures of two batches, as a phrase; "" where one capture is for both."""
        mine, other = map(self.captured, (microbatch, batch))
        if name_of(mine[0]) == name_of(other[0]):
            return ""
        values = mine[0].constants.__getitem__, other[0].constants.__getitem__
        return unlike(mine[1], other[1], times, values)


def _without_note(traced: TracedProgram) -> TracedProgram:
    program, *history = (
        replace(program, notes=tuple(note for note in program.notes if note != ONE_SAMPLE))
        for program in (traced.program, *traced.history)
    )
    return replace(traced, program=program, history=tuple(history))


# --- The way through, for one model: capture, passes, emission; what was done once is not done again -----------------
#
# Terms
#   match       of a microbatch: the capture that is for it, and its key (csc.capture.guards)
#   capture     the traced model; serves every sequence length
#   traced      a Program after the passes that trace; any frozen set, mesh and schedule is planned from it


CACHED = "traced graphs, from the cache"
CACHED_CAPTURE = "capture, from the cache"


def quiet(_: str) -> None:
    """A progress callback that shows nothing."""


@dataclass
class Compiler:
    """Compiles one model for many batches and frozen sets.

    Captured graphs are kept, and serve every microbatch that their guards match; the traced templates of a key are kept
    too, on disk if there is a store, so a change of the frozen set, the mesh or the schedule compiles again without
    tracing.
    """

    model: nn.Module
    store: Store | None = None
    gradients: bool = True  # False: the model is captured as it runs under torch.no_grad
    captures: dict[str, Program] = field(default_factory=dict)  # by the names of their guards
    restored: dict[str, Program] = field(default_factory=dict)  # captures from the cache
    traced: dict[Any, TracedProgram] = field(default_factory=dict)
    shared: SharedTraces = field(default_factory=SharedTraces)
    guards: Guards = field(default_factory=Guards)
    axes: Mapping[str, int] = field(default_factory=dict)  # of samples in an entry, where that is told
    whole: dict[Any, frozenset[str]] = field(default_factory=dict)  # by the entries of batches, and which were doubtful

    def __post_init__(self) -> None:
        refuse_hooks(self.model)
        with stand_ins(self.model):
            refuse_tensors(self.model)
        self.guards.axes = self.axes
        self.kept = ModelEntries(self.model, self.store, self.axes)
        self.more = MoreSamples(self._in_size, self.axes)

    def of(self, model: nn.Module) -> Compiler:
        """The compiler of another model, which keeps nothing."""
        return Compiler(model, axes=self.axes)

    def match(self, microbatch: Mapping[str, Any]) -> Match:
        """By what captures of this process assumed, else by what the cache knows of others, which is known then."""
        with torch.set_grad_enabled(self.gradients):
            return self._match(microbatch)

    def _match(self, microbatch: Mapping[str, Any]) -> Match:
        match = self.guards.match(self.model, microbatch)
        if match.capture is not None:
            return match
        for guards in self.kept.guards(microbatch, self.guards):
            try:
                found = guards.match(self.model, microbatch)
            except CscError:  # a function on the host refuses the batch: a new capture says why
                continue
            if found.capture is not None:
                self.adopt(guards)
                return self.guards.match(self.model, microbatch)
        return match

    def complete(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """A microbatch as its programs take it."""
        return dict(self.match(microbatch).batch)

    def compile(self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet) -> list[Program]:
        """The Program after capture and after each pass. microbatch: one, as a mapping of keyword arguments.

        The cache has no Programs between passes: the model is traced unless this process did so before.
        """
        with uncollected():
            _, traced = self.trace(microbatch, options, progress, whole=True)
            return self.planned(self.checked(microbatch, traced, options), options, progress)

    def finished(self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet) -> Program:
        """The Program after the last pass, planned from the graphs in the cache if it has them."""
        with uncollected():
            _, traced = self.trace(microbatch, options, progress)
            return self.planned(self.checked(microbatch, traced, options), options, progress)[-1]

    def planned(self, traced: TracedProgram, options: Options, progress: Progress = quiet) -> list[Program]:
        """The Program after each pass: those that traced it too, if they are known."""
        history = traced.history or (traced.program,)
        check_combination(history[-1], options)  # with the real number of microbatches it may have to refuse
        return run([self._as_the_model_says(program) for program in history], planning(options), options, progress)

    def checked(
        self, microbatch: Mapping[str, Any], traced: TracedProgram, options: Options, compared: bool = True
    ) -> TracedProgram:
        """As csc.driver.compiler has it."""
        return self.more.checked(microbatch, _key(self.match(microbatch), options), traced, options, compared)

    def _in_size(self, batch: Mapping[str, Any]) -> tuple[Program, fx.Graph]:
        """The capture that is for a batch, and its graph in that batch's sizes."""
        match, captured = self._captured(batch, quiet, False)
        program = with_sizes_of(captured, split_batch(match.batch)[0])
        return program, sized(program.graph, {entry.name: entry.shape for entry in program.inputs})

    def divided(self, traced: TracedProgram, options: Options, progress: Progress = quiet) -> Program:
        """The Program after pass `split`: F, B and W of every region, which is what is costed."""
        return run([self._as_the_model_says(traced.program)], dividing(options), options, progress)[-1]

    def trace(
        self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet, whole: bool = False
    ) -> tuple[Match, TracedProgram]:
        """The capture that is for a microbatch, and its traced graphs: of this process, else from the cache, else made.
        whole: with history. Where samples meet in the loss, and there are several microbatches or replicas, those in
        which they do not.
        """
        match, trace = self._trace(microbatch, options, progress, whole)
        several = options.microbatches * options.mesh.dp > 1 and options.loss_weight == "auto"
        if not several or not trace.program.combination.problem:
            return match, trace
        key = _key(match, options), OVER_BATCH
        if key not in self.traced:
            _, captured = self._captured(microbatch, progress, True)
            alone = replace(options, microbatches=1, mesh=options.mesh.one_replica(), over_batch=True)
            begins = with_sizes_of(captured, split_batch(match.batch)[0])
            history = self.shared.history((OVER_BATCH, _key(match, undivided(alone))), begins, alone, progress)
            places = places_for_features(first_with(history, "sized"), first_with(history, "attention"))
            self.traced[key] = TracedProgram(history[-1], places, self.guards.copy(), tuple(history))
        return match, self.traced[key]

    def _trace(
        self, microbatch: Mapping[str, Any], options: Options, progress: Progress, whole: bool
    ) -> tuple[Match, TracedProgram]:
        match = self.match(microbatch)
        if match.capture is not None:
            known = self.traced.get(_key(match, options))
            if known is None and not whole:
                known = self.kept.trace(match, options)
                if known is not None:
                    progress(CACHED)
                    self.adopt(known.guards)
                    self.traced[_key(match, options)] = known
            if known is not None and (known.history or not whole):
                return match, known
        match, captured = self._captured(microbatch, progress, whole)
        from_cache = any(captured is capture for capture in self.restored.values())
        alone = replace(options, microbatches=1, mesh=options.mesh.one_replica())
        begins = with_sizes_of(captured, split_batch(match.batch)[0])
        key = from_cache, _key(match, undivided(alone))
        history = self.shared.history(key, begins, alone, progress)
        if history[-1].combination.problem:
            joints = self.more.prove(microbatch, begins, self.shared.joints[name_of(begins)])
            if joints is not None:
                self.shared.joints[name_of(begins)] = joints
                self.shared.begun.pop(key)
                history = self.shared.history(key, begins, alone, progress)
        places = places_for_features(first_with(history, "sized"), first_with(history, "attention"))
        traced = TracedProgram(history[-1], places, self.guards.copy(), () if from_cache else tuple(history))
        self.kept.keep_trace(traced, match, options)
        self.traced[_key(match, options)] = traced
        return match, traced

    def adopt(self, guards: Guards) -> None:
        """Know what another process knows, if it is more."""
        if guards.extend(self.guards):
            self.guards = self.guards.joined(guards)

    def _captured(self, microbatch: Mapping[str, Any], progress: Progress, whole: bool) -> tuple[Match, Program]:
        """The capture that is for a microbatch: an earlier one, else one from the cache, else a new one. whole: one
        that can be shown, as those from the cache cannot.
        """
        match = self.match(microbatch)
        name = match.capture.name if match.capture is not None else ""
        known = self.captures.get(name) or (None if whole else self.restored.get(name))
        if known is not None:
            return match, known
        kept_capture = None if whole else self.kept.capture(match)
        if kept_capture is not None:
            progress(CACHED_CAPTURE)
            self.restored[name] = kept_capture.program
            return match, kept_capture.program
        if self.captures and match.capture is None:
            log.info("%s is captured again: %s", type(self.model).__name__, match.why)
        progress(CAPTURE)
        with torch.set_grad_enabled(self.gradients):
            with self.kept.capturing(microbatch):
                captured = capture(self.model, microbatch, self.guards)
            own_match = self.guards.of(name_of(captured)).match(self.model, microbatch)
        if own_match.capture is None:
            raise InputError(
                f"what the model makes of a batch on the host is not the same twice: {own_match.why}", "model",
                "let functions of lists and numbers depend on the batch alone, or call them in the data loader",
            )  # fmt: skip
        self.guards.add(own_match.capture, instead=name)
        self.captures[own_match.capture.name] = captured
        self.kept.keep_capture(Captured(captured, self.guards.copy()), own_match)
        return own_match, captured

    def _as_the_model_says(self, program: Program) -> Program:
        """`requires_grad` may have changed since the capture."""
        flags = {name: p.requires_grad for name, p in weights_of(self.model).items()}
        return replace(program, parameters=tuple(replace(p, trainable=flags[p.name]) for p in program.parameters))

    def whole_entries(self, batch: Mapping[str, Any], parts: int, known: Collection[str] = ()) -> frozenset[str]:
        """Entries of a global batch without a sample dimension, which are not cut, as a trace of it shows; none if it
        cannot be traced. known: entries that the trace is not asked for.
        """
        tensors, _ = split_batch(batch)
        among = doubtful(tensors, parts).difference(known)
        key = frozenset(tensors), among
        if among and key not in self.whole:
            try:
                match, capture = self._captured(batch, quiet, False)
                captured = with_sizes_of(capture, split_batch(match.batch)[0])
                self.whole[key] = frozenset(combination(captured, captured.graph).whole)
            except CscError:  # its microbatches say why, or can be traced
                self.whole[key] = frozenset()
        return self.whole.get(key, frozenset()).difference(known)

    def emit(
        self,
        program: Program,
        options: Options,
        directory: Path,
        microbatch: Mapping[str, Any],
        with_weights: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> Path:
        """Write the program directory; see csc.codegen.write."""
        tensors, _ = split_batch(microbatch)
        weights = weights_of(self.model) if with_weights else None
        with uncollected():
            return write(program, options, directory, tensors, weights, ranks)


def _key(match: Match, options: Options) -> Any:
    """Of traced graphs."""
    return (
        match.key, options.loss_weight, options.mesh.graph_key, options.context, options.precision, options.keep_fp32,
        options.loss_chunk, options.fuse, options.sequence_parallel, options.replicate,
        options if traced_by_users(options) else options.passes,
    )  # fmt: skip


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector: a compilation makes millions of objects that stay, and looking through them
    for those that do not takes a fifth of its time.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# --- Where the functions of a model's programs are compiled, and what is begun for that before there are any ---------


class FusingAhead:
    """Of one model."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    @cached_property
    def folder(self) -> FunctionFolder:
        """It is there then."""
        return FunctionFolder.of(inductor_folder(self._compiler.store))

    def begin(self, options: Options) -> None:
        """Start the workers that `fuse` will need on a CPU."""
        device = device_of(self._compiler.model)
        if options.fuse and device.type == "cpu" and not lacks(device):
            self.folder.workers.start(worker_count(), self.folder.path)
