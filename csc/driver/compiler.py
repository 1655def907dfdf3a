"""The way through, for one model: capture, passes, emission; what was done once is not done again.

Terms
  signature   names, shapes and dtypes of one microbatch, and the values of those entries that the model decides by
  capture     the traced model; serves every sequence length
  traced      a Program after the passes that trace; any frozen set, mesh and schedule is planned from it
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from csc.analysis.samples.combining import combination
from csc.analysis.token_counts import places_for_features
from csc.cache.learning import extends, signature, snapshot, together
from csc.cache.model_entries import ModelEntries
from csc.cache.packed import Captured, TracedProgram
from csc.cache.store import Store
from csc.capture.batch import doubtful, split_batch
from csc.capture.capture import Learned, capture, serves, with_sizes_of
from csc.capture.trace.autograd_functions import refuse_hooks
from csc.codegen.write import write
from csc.errors import CscError
from csc.ir.groups import Group
from csc.ir.program import Options, Program
from csc.passes.attention import attention
from csc.passes.loss import check_combination
from csc.passes.runner import CAPTURE, PLANNING, TRACING, run
from csc.passes.shapes import shapes

Progress = Callable[[str], None]
CACHED = "traced graphs, from the cache"
CACHED_CAPTURE = "capture, from the cache"


def quiet(_: str) -> None:
    """A progress callback that shows nothing."""


@dataclass
class Compiler:
    """Compiles one model for many signatures and frozen sets.

    Captured graphs are kept, and serve every microbatch that fits them; the traced templates of a signature are kept
    too, on disk if there is a store, so a change of the frozen set, the mesh or the schedule compiles again without
    tracing.
    """

    model: nn.Module
    store: Store | None = None
    captures: dict[Any, list[Program]] = field(default_factory=dict)
    restored: dict[Any, list[Program]] = field(default_factory=dict)  # captures from the cache
    traced: dict[Any, TracedProgram] = field(default_factory=dict)
    learned: Learned = field(default_factory=Learned)
    whole: dict[Any, frozenset[str]] = field(default_factory=dict)  # by the entries of batches, and which were doubtful

    def __post_init__(self) -> None:
        refuse_hooks(self.model)
        self.kept = ModelEntries(self.model, self.store)

    def of(self, model: nn.Module) -> Compiler:
        """The compiler of another model, which keeps nothing."""
        return Compiler(model)

    def complete(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """The microbatch with what functions of the model that run on the host make of it (see
        csc.capture.values.hoist).
        """
        return self.learned.completed(self.model, microbatch)

    def signature(self, microbatch: Mapping[str, Any]) -> Any:
        """What decides which program a completed microbatch needs. It may say more once more has been captured."""
        return signature(self.learned, microbatch)

    def compile(self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet) -> list[Program]:
        """The Program after capture and after each pass. microbatch: one, as a mapping of keyword arguments.

        The cache has no Programs between passes: the model is traced unless this process did so before.
        """
        with uncollected():
            traced = self.trace(microbatch, options, progress, whole=True)
            return self._planned(list(traced.history), options, progress)

    def finished(self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet) -> Program:
        """The Program after the last pass, planned from the graphs in the cache if it has them."""
        with uncollected():
            traced = self.trace(microbatch, options, progress)
            return self._planned([traced.program], options, progress)[-1]

    def _planned(self, history: list[Program], options: Options, progress: Progress) -> list[Program]:
        check_combination(history[-1], options)  # with the real number of microbatches it may have to refuse
        return run([self._as_the_model_says(program) for program in history], PLANNING, options, progress)

    def trace(
        self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet, whole: bool = False
    ) -> TracedProgram:
        """The traced graphs for a microbatch: of this process, else from the cache, else made. whole: with history."""
        key = self._key(microbatch, options)
        if key in self.traced and (self.traced[key].history or not whole):
            return self.traced[key]
        found = None if whole else self.kept.trace(microbatch, options, self.learned)
        if found is not None:
            progress(CACHED)
            self.adopt(found.learned)
        else:
            captured = self._captured(microbatch, progress, whole)
            tensors, _ = split_batch(self.complete(microbatch))
            alone = replace(options, microbatches=1, mesh=replace(options.mesh, dp=1))
            history = run([with_sizes_of(captured, tensors)], TRACING, alone, progress)
            places = places_for_features(*(history[1 + TRACING.index(one)] for one in (shapes, attention)))
            from_cache = any(captured is one for several in self.restored.values() for one in several)
            shown = () if from_cache else tuple(history)
            found = TracedProgram(history[-1], places, snapshot(self.learned), shown)
            self.kept.keep_trace(found, microbatch, options)
        self.traced[self._key(microbatch, options)] = found  # a trace may have shown what else decides
        return found

    def adopt(self, learned: Learned) -> None:
        """Know of batches what another process has learned, if it is more."""
        if extends(learned, self.learned):
            self.learned = together(learned, self.learned)

    def _key(self, microbatch: Mapping[str, Any], options: Options) -> Any:
        return (
            self.signature(self.complete(microbatch)), options.loss_weight, options.mesh.sizes(Group.LAYER),
            options.context, options.precision, options.keep_fp32,
        )  # fmt: skip

    def _captured(self, microbatch: Mapping[str, Any], progress: Progress, whole: bool) -> Program:
        """A capture that serves the microbatch: an earlier one, else one from the cache, else a new one. whole: one
        that can be shown, as those from the cache cannot.
        """
        completed = self.complete(microbatch)
        plain = _plain(microbatch)
        known = self.captures.setdefault(plain, [])
        restored = self.restored.setdefault(plain, [])
        for program in (*known, *(() if whole else restored)):
            if serves(program, completed):
                return program
        for captured in () if whole else self.kept.captures(microbatch, self.learned):
            try:
                completed = captured.learned.completed(self.model, microbatch)
            except CscError:  # a function on the host refuses the batch: a new capture says why
                continue
            if serves(captured.program, completed):
                progress(CACHED_CAPTURE)
                self.adopt(captured.learned)
                restored.append(captured.program)
                return captured.program
        progress(CAPTURE)
        with self.kept.capturing(microbatch):
            known.append(capture(self.model, microbatch, self.learned))
        self.kept.keep_capture(Captured(known[-1], snapshot(self.learned)), microbatch)
        return known[-1]

    def _as_the_model_says(self, program: Program) -> Program:
        """`requires_grad` may have changed since the capture."""
        flags = {name: p.requires_grad for name, p in self.model.named_parameters()}
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
                captured = with_sizes_of(self._captured(batch, quiet, False), split_batch(self.complete(batch))[0])
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
        weights = dict(self.model.named_parameters()) if with_weights else None
        with uncollected():
            return write(program, options, directory, tensors, weights, ranks)


def _plain(microbatch: Mapping[str, Any]) -> str:
    """Its entries that are no tensors, as text."""
    return repr(sorted(split_batch(microbatch)[1].items(), key=lambda item: item[0]))


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
