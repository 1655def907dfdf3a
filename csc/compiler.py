"""The way through, for one model: capture, passes, emission; what was done once is not done again.

Terms
  signature   names, shapes and dtypes of one microbatch, and how many of them make a step
  capture     the traced model; serves every sequence length, one batch size
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from csc.capture import capture, dynamic_dimensions, split_batch
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

    Captured graphs are kept per model, batch size and plain batch values; the traced templates of a signature are kept
    too, so a change of the frozen set, the mesh or the schedule compiles again without tracing.
    """

    model: nn.Module
    captures: dict[Any, Program] = field(default_factory=dict)
    traced: dict[Any, list[Program]] = field(default_factory=dict)

    def compile(self, microbatch: Mapping[str, Any], options: Options, progress: Progress = quiet) -> list[Program]:
        """The Program after capture and after each pass. microbatch: one, as a mapping of keyword arguments."""
        tensors, extra = split_batch(microbatch)
        capture_key, shapes_key = _keys(tensors, extra)
        key = (shapes_key, options.loss_weight, options.mesh.cp)
        if key not in self.traced:
            if capture_key not in self.captures:
                progress(CAPTURE)
                self.captures[capture_key] = capture(self.model, microbatch)
            captured = _with_shapes(self.captures[capture_key], tensors)
            self.traced[key] = run(
                [captured],
                TRACING,
                replace(options, microbatches=1, mesh=replace(options.mesh, dp=1)),
                progress,
            )
        self._check_loss(self.traced[key], options)
        history = [self._as_the_model_says(program) for program in self.traced[key]]
        return run(history, PLANNING, options, progress)

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
    ) -> Path:
        """Write the program directory; see csc.codegen.write."""
        tensors, _ = split_batch(microbatch)
        weights = dict(self.model.named_parameters()) if with_weights else None
        return write(program, options, directory, tensors, weights)


def _keys(tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> tuple[Any, Any]:
    """(what a capture depends on, what the traced templates depend on)."""
    plain = repr(sorted(extra.items(), key=lambda item: item[0]))
    shapes = tuple((name, str(t.dtype), tuple(t.shape)) for name, t in sorted(tensors.items()))
    fixed = tuple(
        (
            name,
            str(t.dtype),
            tuple(-1 if dim in dynamic_dimensions(t) else size for dim, size in enumerate(t.shape)),
        )
        for name, t in sorted(tensors.items())
    )
    return (fixed, plain), (shapes, plain)


def _with_shapes(program: Program, tensors: Mapping[str, torch.Tensor]) -> Program:
    inputs = tuple(replace(item, shape=tuple(tensors[item.name].shape)) for item in program.inputs)
    return replace(program, inputs=inputs)
