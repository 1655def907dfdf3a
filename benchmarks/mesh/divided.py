"""The configurations of benchmarks.mllm, divided for any mesh: captured shallow, traced once for each division.

divided(configuration, frozen, device, clock) -> DividedModel        frozen: one of benchmarks.mllm.trace.FROZEN
TraceClock()                                                         what a search takes that finds nothing traced

Frozen sets, devices and numbers of ranks share the traces of a run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from csc.passes.pipeline import dividing
from csc.passes.runner import run

from benchmarks.mllm.configurations import Configuration
from benchmarks.mllm.expand import Stack, expand
from benchmarks.mllm.meta_init import meta_init
from benchmarks.mllm.models import batch, build
from benchmarks.mllm.trace import FROZEN
from csc.capture.capture import capture
from csc.driver.compiler import SharedTraces, undivided
from csc.driver.mesh_candidates import DividedModel
from csc.errors import CscError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program


@cache
def _captured(configuration: Configuration) -> Program:
    with meta_init(torch.bfloat16):
        model = build(configuration, {name: part.shallow for name, part in configuration.components.items()})
    return capture(model, batch(configuration))


@cache
def _shared_traces(configuration: Configuration) -> SharedTraces:
    """Kept by configuration, as the compiler of one model keeps its own."""
    return SharedTraces()


@dataclass(frozen=True)
class Trace:
    """seconds: of the processor, the capture in those of the first. program: or why there is none."""

    program: Program | CscError
    seconds: float


@cache
def _traced(configuration: Configuration, mesh: Mesh, sequence: bool, context: tuple[tuple[str, int], ...]) -> Trace:
    start = time.process_time()
    stacks = {name: Stack(part.layers, part.period) for name, part in configuration.components.items()}
    options = Options(mesh=mesh, sequence_parallel=sequence, context=context)
    found: Program | CscError
    try:
        beginning = undivided(options).mesh, context
        history = _shared_traces(configuration).history(beginning, _captured(configuration), options, lambda _: None)
        found = expand(history[-1], stacks)
    except CscError as error:
        found = error
    return Trace(found, time.process_time() - start)


def _shared(mesh: Mesh) -> Mesh:
    """What of it traces are of: one replica, with as few stages as it can have."""
    return replace(mesh.fewest_stages().one_replica(), order=Mesh.AXES)


class TraceClock:
    """Processor time as if nothing had been traced for a model before: of what was, `saved` seconds."""

    def __init__(self) -> None:
        self.saved = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.saved


def divided(
    configuration: Configuration, frozen: str, device: str, clock: TraceClock | None = None
) -> DividedModel:  # fmt: skip
    """Microbatches are of one sample, as in that evaluation."""
    parts = tuple(part for part in FROZEN[frozen] if part in configuration.components)
    known: dict[Any, Trace] = {}

    def of(options: Options, samples: int) -> Program:
        key = configuration, _shared(options.mesh), options.sequence_parallel, options.context
        if key not in known:
            start = time.process_time()
            known[key] = _traced(*key)
            if clock is not None:
                clock.saved += max(0.0, known[key].seconds - (time.process_time() - start))
        program = known[key].program
        if isinstance(program, CscError):
            raise program
        return run([program], dividing(options), options)[-1]

    return DividedModel(Options(hardware=device, freeze=parts), (1,), of)
