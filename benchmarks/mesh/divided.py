"""The configurations of benchmarks.mllm, divided for any mesh: captured shallow, traced once for each division.

divided(configuration, frozen, device) -> DividedModel        frozen: one of benchmarks.mllm.trace.FROZEN
"""

from __future__ import annotations

from functools import cache

import torch
from csc.passes.runner import DIVIDING, TRACING, run

from benchmarks.mllm.configurations import Configuration
from benchmarks.mllm.expand import Stack, expand
from benchmarks.mllm.meta_init import meta_init
from benchmarks.mllm.models import batch, build
from benchmarks.mllm.trace import FROZEN
from csc.capture.capture import capture
from csc.driver.mesh_rows import DividedModel
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program


@cache
def _captured(configuration: Configuration) -> Program:
    with meta_init(torch.bfloat16):
        model = build(configuration, {name: part.shallow for name, part in configuration.components.items()})
    return capture(model, batch(configuration))


@cache
def _traced(
    configuration: Configuration, tp: int, cp: int, components: tuple[tuple[str, int], ...], sequence: bool
) -> Program:  # fmt: skip
    stacks = {name: Stack(part.layers, part.period) for name, part in configuration.components.items()}
    options = Options(mesh=Mesh(tp=tp, cp=cp, components=components), sequence_parallel=sequence)
    return expand(run([_captured(configuration)], TRACING, options)[-1], stacks)


def divided(configuration: Configuration, frozen: str, device: str) -> DividedModel:
    """Microbatches are of one sample, as in that evaluation."""
    parts = tuple(part for part in FROZEN[frozen] if part in configuration.components)

    def of(options: Options, samples: int) -> Program:
        mesh = options.mesh
        traced = _traced(configuration, mesh.tp, mesh.cp, mesh.components, options.sequence_parallel)
        return run([traced], DIVIDING, options)[-1]

    return DividedModel(Options(hardware=device, freeze=parts), (1,), of)
