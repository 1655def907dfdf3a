"""The way through, for one model: capture, passes, emission; what was done once is not done again.

Terms
  signature   names, shapes and dtypes of one microbatch, and the values of those entries that the model decides by
  capture     the traced model; serves every sequence length
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csc.capture import Learned, capture, serves, split_batch
from csc.codegen.write import write
from csc.ir.program import Options, Program
from csc.passes.loss import loss
from csc.passes.runner import CAPTURE, PLANNING, TRACING, run

Progress = Callable[[str], None]


def quiet(_: str) -> None:
    """A progress callback that shows nothing."""


@dataclass
class Compiler:
    """Compiles one model for many signatures and frozen sets.

    Captured graphs are kept, and serve every microbatch that fits them; the traced templates of a signature are kept
    too, so a change of the frozen set, the mesh or the schedule compiles again without tracing.
    """

    model: nn.Module
    captures: dict[Any, list[Program]] = field(default_factory=dict)
    traced: dict[Any, list[Program]] = field(default_factory=dict)
    learned: Learned = field(default_factory=Learned)

    def complete(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """The microbatch with what functions of the model that run on the host make of it (see csc.capture.host)."""
        return self.learned.completed(self.model, microbatch)

    def signature(self, microbatch: Mapping[str, Any]) -> Any:
        """What decides which program a completed microbatch needs. It may say more once more has been captured."""
        tensors, extra = split_batch(microbatch)
        shapes = tuple((name, str(t.dtype), tuple(t.shape)) for name, t in sorted(tensors.items()))
        values = tuple((n, repr(tensors[n].tolist())) for n in sorted(self.learned.consulted) if n in tensors)
        return shapes, values, repr(sorted(extra.items(), key=lambda item: item[0]))

    def compile(self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet) -> list[Program]:
        """The Program after capture and after each pass. microbatch: one, as a mapping of keyword arguments."""
        captured = self._captured(microbatch, progress)
        microbatch = self.complete(microbatch)
        key = (
            self.signature(microbatch), options.loss_weight, options.mesh.cp, options.context, options.precision,
            options.keep_fp32,
        )  # fmt: skip
        if key not in self.traced:
            tensors, _ = split_batch(microbatch)
            self.traced[key] = run(
                [_with_shapes(captured, tensors)],
                TRACING,
                replace(options, microbatches=1, mesh=replace(options.mesh, dp=1)),
                progress,
            )
        self._check_loss(self.traced[key], options)
        history = [self._as_the_model_says(program) for program in self.traced[key]]
        return run(history, PLANNING, options, progress)

    def _captured(self, microbatch: Mapping[str, Any], progress: Progress) -> Program:
        """A capture that serves the microbatch, an earlier one if there is any."""
        tensors, extra = split_batch(self.complete(microbatch))
        known = self.captures.setdefault(repr(sorted(extra.items(), key=lambda item: item[0])), [])
        for program in known:
            if serves(program, tensors):
                return program
        progress(CAPTURE)
        known.append(capture(self.model, microbatch, self.learned))
        return known[-1]

    def _check_loss(self, history: list[Program], options: Options) -> None:
        """The loss pass again, with the real number of microbatches: it may have to refuse (see passes/loss.py)."""
        loss(history[TRACING.index(loss)], options)

    def _as_the_model_says(self, program: Program) -> Program:
        """`requires_grad` may have changed since the capture."""
        flags = {name: p.requires_grad for name, p in self.model.named_parameters()}
        return replace(program, parameters=tuple(replace(p, trainable=flags[p.name]) for p in program.parameters))

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
        return write(program, options, directory, tensors, weights, ranks)


def _with_shapes(program: Program, tensors: Mapping[str, torch.Tensor]) -> Program:
    inputs = tuple(replace(item, shape=tuple(tensors[item.name].shape)) for item in program.inputs)
    return replace(program, inputs=inputs)
