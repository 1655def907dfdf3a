"""A configuration as a Program: captured shallow and without weights, traced once, expanded, pruned per frozen set.

Terms
  traced   after pass `differentiate`, all layers: what no frozen set changes
  frozen   the components that do not train

    FROZEN                           name of a frozen set -> components, of those that the model has
    traced(configuration)            -> Program
    program(configuration, frozen)   -> Program after pass `split`

Both are kept for the run; another frozen set traces nothing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from csc.passes.differentiate import DifferentiatePass
from csc.passes.freeze import FreezePass
from csc.passes.loss import LossPass
from csc.passes.pipeline import facts_behind
from csc.passes.prune import PrunePass
from csc.passes.regions import RegionsPass
from csc.passes.shapes import ShapesPass
from csc.passes.split import SplitPass

from benchmarks.mllm.configurations import Configuration
from benchmarks.mllm.expand import Stack, expand
from benchmarks.mllm.meta_init import meta_init
from benchmarks.mllm.models import batch, build
from csc.capture.capture import capture
from csc.ir.program import Options, Pass, Program
from csc.ir.verifier import verify

FROZEN: Mapping[str, tuple[str, ...]] = {
    "all trainable": (),
    "encoder frozen": ("vision", "audio"),
    "projector only": ("vision", "audio", "llm"),
}


def captured(configuration: Configuration, depths: Mapping[str, int]) -> Program:
    """The model with `depths[component]` layers, after pass `differentiate`."""
    with meta_init(torch.bfloat16):
        model = build(configuration, depths)
    program = capture(model, batch(configuration))
    return run(program, (ShapesPass(), LossPass(), RegionsPass(), DifferentiatePass()), Options())


@cache
def traced(configuration: Configuration) -> Program:
    """The whole model, after pass `differentiate`."""
    parts = configuration.components
    shallow = captured(configuration, {component: part.shallow for component, part in parts.items()})
    return expand(shallow, {component: Stack(part.layers, part.period) for component, part in parts.items()})


@cache
def program(configuration: Configuration, frozen: str) -> Program:
    """The whole model for one of FROZEN, after pass `split`. KeyError for another name."""
    return pruned(traced(configuration), tuple(part for part in FROZEN[frozen] if part in configuration.components))


def pruned(whole: Program, frozen: tuple[str, ...]) -> Program:
    """A traced Program with these components frozen, after pass `split`."""
    return run(whole, (FreezePass(frozen), PrunePass(), SplitPass()), Options())


def run(program: Program, passes: Sequence[Pass], options: Options) -> Program:
    for one in passes:
        program = replace(one(program, options), facts=facts_behind(one, program.facts))
        verify(program, after=one.name)
    return program
