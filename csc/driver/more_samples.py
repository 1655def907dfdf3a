"""What a batch of more samples than a microbatch shows of the model: whether each sample is dealt with as it is alone.

    shown = MoreSamples(model, captured)
    shown.prove(microbatch, one, joints) -> Joints | None                     how losses combine, of two samples
    shown.checked(microbatch, key, traced, options, compared) -> TracedProgram      InputError if it is not

Terms
  captured    of a batch: the Program that its capture gives, in its sizes, and that graph with plain numbers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx

from csc.analysis.samples.combining import assumed, combination, named_alike, proven, unlike
from csc.analysis.samples.propagation import OF_OTHERS
from csc.cache.model_entries import TracedProgram
from csc.capture.batch import repeated
from csc.capture.capture import name_of
from csc.errors import CscError, InputError
from csc.ir.capture_guards import Joints
from csc.ir.program import Options, Program
from csc.passes.loss import ONE_SAMPLE

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
        if ONE_SAMPLE in traced.program.notes:
            return self._of_two(microbatch, key, traced, compared)
        whole = traced.program.combination.whole
        more = partial(repeated, microbatch, parts, whole, self.axes)
        found = self._once((key, parts), lambda: self._unlike(microbatch, *more()), "")
        if found:
            raise InputError(
                "the model computes with the number of samples in Python, and of a batch with more of them "
                f"{found}", "model",
                "use one microbatch and dp=1, with which the step is the model's own; or compute with x.shape[0] in "
                "tensor operations; or say how the losses combine: loss_weight='mean' (by the number of samples) or "
                "'sum'",
            )  # fmt: skip
        return traced

    def _of_two(
        self, microbatch: Mapping[str, Any], key: Hashable, traced: TracedProgram, compared: bool
    ) -> TracedProgram:
        """Of microbatches of one sample whose loss is a mean over labels. InputError if several do not prove how they
        combine, and nothing compares it.
        """
        found = self._once((key, TRIED), lambda: self._unproven(microbatch), "a batch of two samples cannot be traced")
        if not found:
            return _without_note(traced)
        if not compared or OF_OTHERS in found:  # which rows these are is a matter of values: one step does not tell
            raise InputError(
                f"csc cannot prove that the losses of microbatches of one sample make the loss of the batch: {found}",
                "model",
                ("" if compared else COMPARED) + "if samples do not depend on each other, say loss_weight='tokens' (by "
                "labels), 'mean' or 'sum'; or use one microbatch and dp=1",
            )
        log.warning(
            "how the losses of microbatches of one sample combine is taken to be by labels, and not proven: %s; the "
            "first step is compared with eager PyTorch; loss_weight='tokens' says that it is so",
            found,
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
        found = ""
        for number in TRIED:
            batch, times = repeated(microbatch, number, (), self.axes)
            differs = self._unlike(microbatch, batch, times)
            if differs:
                return f"of a batch of {times} {differs}"
            several, _ = self.captured(batch)
            shown = combination(several, several.graph)
            if not shown.problem:
                return ""
            found = found or f"{shown.problem} ({shown.where})"
        return found

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
        found, always = proven(two, two.graph)
        if found.problem or not always:
            return None
        names = named_alike(self.captured(microbatch)[1], graph)
        return replace(joints, combinations={**joints.combinations, assumed(one): found.renamed(names)})

    def _unlike(self, microbatch: Mapping[str, Any], batch: Mapping[str, Any], times: int) -> str:
        """What is not the same in the captures of two batches, as a phrase; "" where one capture is for both."""
        mine, other = map(self.captured, (microbatch, batch))
        if name_of(mine[0]) == name_of(other[0]):
            return ""
        values = mine[0].constants.__getitem__, other[0].constants.__getitem__
        return unlike(mine[1], other[1], times, values)


def _without_note(traced: TracedProgram) -> TracedProgram:
    program, *history = (
        replace(one, notes=tuple(note for note in one.notes if note != ONE_SAMPLE))
        for one in (traced.program, *traced.history)
    )
    return replace(traced, program=program, history=tuple(history))
