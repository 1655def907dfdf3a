"""Emulated ranks: compute is replaced by a wait of the modelled time; processes, messages and order are real.

Terms: see csc.simulation.pipeline. A core that waits costs nothing, so many ranks can be measured honestly on few
cores: what idles in the pipeline idles here, and a message takes the time that it really takes.

`factor` stretches all waits: with 100 a model of microseconds becomes measurable. Messages are real, so it does not
stretch them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.schedule import Schedule
from csc.runtime.executor import Timed, step
from csc.runtime.loaded_program import LoadedProgram, StageFunctions
from csc.runtime.made_once import Constants
from csc.runtime.rank import Rank
from csc.runtime.specs import LossSpec, Manifest, MessageSpec, StageSpec, ValueSpec
from csc.runtime.transport import Transport
from csc.simulation.pipeline import Pipeline, from_json, slower
from csc.simulation.simulate import makespan

VALUE = "value"
NAPS, NAP = 9, 5e-4  # sleeps, and seconds of each


@dataclass(frozen=True)
class Emulated:
    """A program whose stages only wait and send: each message carries one value of its real size."""

    program: LoadedProgram
    pipeline: Pipeline


def emulated(pipeline: Pipeline, schedule: Schedule, name: str = "emulated") -> Emulated:
    """The emulated program of a schedule on a pipeline. Every rank of the schedule is one rank of the mesh."""
    stages = tuple(
        StageSpec(
            stage=index,
            rank=schedule.placement[index],
            regions=(),
            inputs=(),
            forward=True,
            backward_input=stage.has_b,
            backward_weight=stage.has_w,
        )
        for index, stage in enumerate(pipeline.stages)
    )
    messages = tuple(
        MessageSpec(*channel, (ValueSpec(f"{VALUE} {channel}", (max(1, round(size)),), (1,), torch.uint8),))
        for channel, size in sorted(pipeline.messages.items())
    )
    manifest = Manifest(
        name=name,
        fingerprint=repr((pipeline, str(schedule))),
        mesh=Mesh(pp=len(schedule.ranks)),
        device="cpu",
        microbatches=schedule.microbatches,
        inputs=(),
        fixed={},
        parameters=(),
        constants=(),
        messages=messages,
        stages=stages,
        loss=LossSpec(len(stages) - 1, "sum"),
        contexts=(),
        draws=(),
        zero=0,
        frozen=(),
        plan={},
        files={},
        tensors={},
    )
    return Emulated(LoadedProgram(Path(), manifest, schedule, (), ""), pipeline)


def emulated_program(program: LoadedProgram) -> Emulated:
    """A compiled program emulated: its schedule, and the times and sizes that its plan expects. InputError for
    several replicas: they would only wait beside each other.
    """
    if program.manifest.mesh.dp > 1:
        raise InputError(
            f"the program has {program.manifest.mesh.dp} replicas",
            program.manifest.name,
            "Compile it with dp=1: replicas of an emulated run do the same thing at the same time",
        )
    pipeline = from_json(program.manifest.plan.get("pipeline"), f"{program.directory / 'program.json'}, plan")
    if any(pipeline.divided):
        raise InputError(
            "its ranks gather parameters, which an emulated run has none of",
            program.manifest.name,
            "Compile it with zero=0",
        )
    return emulated(pipeline, program.schedule, program.manifest.name)


def run(program: Emulated, transport: Transport, steps: int = 1, factor: float = 1.0) -> list[dict[int, list[Timed]]]:
    """Run this process' ranks for some steps; for each step when every action of them ran."""
    device = torch.device("cpu")
    position = program.program.manifest.mesh.coordinates
    ranks = [
        Rank(
            program.program,
            rank,
            _functions(program, position(rank).pp),
            transport.endpoint(rank),
            Constants({}),
            device,
        )
        for rank in transport.ranks
    ]
    count = program.program.manifest.microbatches
    late = oversleep()
    microbatches = [{"factor": factor, "microbatch": mb, "late": late} for mb in range(count)]
    timelines = []
    for _ in range(steps):
        transport.begin_step()
        transport.sum_over_processes(torch.zeros(1), "start of an emulated step")
        results = transport.run({rank.rank: step(rank, [rank] * count, microbatches, {}, trace=True) for rank in ranks})
        timelines.append({rank: result.trace for rank, result in results.items()})
    return timelines


def expected(program: Emulated, factor: float = 1.0) -> float:
    """The simulated makespan with waits stretched by `factor`, over the modelled network as it is."""
    return makespan(slower(program.pipeline, factor), program.program.schedule)


def _functions(program: Emulated, position: int) -> dict[int, StageFunctions]:
    manifest = program.program.manifest
    stages = [program.pipeline.stages_of(mb) for mb in range(manifest.microbatches)]
    functions = {}
    for spec in manifest.stages_of(position):
        parts: dict[str, Callable[..., Any]] = {}
        for kind, name in (("F", "forward"), ("B", "backward_input"), ("W", "backward_weight")):
            sent = {
                value.name: torch.zeros(value.shape, dtype=value.dtype)
                for message in manifest.messages
                if (message.kind, message.source) == (kind, spec.stage)
                for value in message.values
            }
            if kind == "F" and spec.stage == manifest.loss.stage:
                sent["loss"] = torch.zeros(())
            seconds = [stage[spec.stage].seconds(kind) for stage in stages]
            parts[name] = partial(_weights, seconds) if kind == "W" else partial(_work, seconds, sent)
            if kind == "B":
                parts["backward"] = partial(_backward, [stage[spec.stage].seconds("BW") for stage in stages], sent)
        functions[spec.stage] = StageFunctions(**parts)
    return functions


def oversleep() -> float:
    """Seconds by which the timer of this machine is late, at the median of some short sleeps."""
    delays = []
    for _ in range(NAPS):
        start = time.perf_counter()
        time.sleep(NAP)
        delays.append(time.perf_counter() - start - NAP)
    return statistics.median(delays)


def wait(seconds: float, late: float) -> None:
    """At least so many seconds, and hardly more. late: of `oversleep`, which a sleep is made shorter by."""
    end = time.perf_counter() + seconds
    if seconds > late:
        time.sleep(seconds - late)
    while time.perf_counter() < end:
        pass


def _wait(seconds: Sequence[float], microbatch: Mapping[str, Any]) -> None:
    wait(seconds[microbatch["microbatch"]] * microbatch["factor"], microbatch["late"])


def _work(seconds: Sequence[float], sent: Mapping[str, torch.Tensor], microbatch: Mapping[str, Any], *_: Any) -> tuple:
    """F or B. What is saved from F to B to W is the microbatch's number and factor alone."""
    _wait(seconds, microbatch)
    return sent, microbatch


def _backward(
    seconds: Sequence[float], sent: Mapping[str, torch.Tensor], microbatch: Mapping[str, Any], *_: Any
) -> Generator[Any, None, Mapping[str, torch.Tensor]]:
    _wait(seconds, microbatch)
    yield from ()
    return sent


def _weights(seconds: Sequence[float], microbatch: Mapping[str, Any], *_: Any) -> list[Any]:
    _wait(seconds, microbatch)
    return []
