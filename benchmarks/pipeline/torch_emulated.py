"""torch.distributed.pipelining as emulated ranks: its own runtime, processes and messages, and stages that only wait.

A stage is a module of autograd functions: F waits in forward, B and W in the backwards of two functions, so that a
schedule that splits the backward finds the weights' gradients on a path of their own. Outputs have the size of the
pipeline's message. A stage that nothing upstream of it and nothing in it trains makes outputs that need no gradient.

    prepare(name, pipeline, microbatches, rank, ranks) -> step: factor -> [(start, end)]     the waits of this rank
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from benchmarks.pipeline.torch_schedules import TORCH, placement
from csc.runtime.emulated import oversleep
from csc.runtime.emulated import wait as slept
from csc.simulation.pipeline import Pipeline

Span = tuple[float, float]
Wait = Callable[[float], None]
BYTES = 4  # of a float32


class _Compute(torch.autograd.Function):
    """F and B. `anchor` is what makes the output need a gradient if the input needs none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: Any, wait: Wait, f: float, b: float, numel: int) -> torch.Tensor:
        ctx.wait, ctx.b, ctx.shape = wait, b, x.shape
        wait(f)
        return torch.empty(numel)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.wait(ctx.b)
        x = torch.empty(ctx.shape) if ctx.needs_input_grad[0] else None
        anchor = torch.zeros(1) if ctx.needs_input_grad[1] else None
        return x, anchor, None, None, None, None


class _Weight(torch.autograd.Function):
    """W: a weight on its way to where it is used."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, wait: Wait, w: float) -> torch.Tensor:
        ctx.wait, ctx.w = wait, w
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.wait(ctx.w)
        return gradient, None, None


class _Join(torch.autograd.Function):
    """The output and a weight that it depends on; costs nothing."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(y)  # no view: a split backward detaches the outputs of its stage in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.zeros(1)


class _Stage(nn.Module):
    """One stage of the pipeline. Without a weight that trains it has a frozen one."""

    def __init__(self, pipeline: Pipeline, index: int, wait: Wait) -> None:
        super().__init__()
        self.numbers = pipeline.stages[index]
        self.numel = max(1, round(pipeline.messages.get(("F", index, index + 1), BYTES) / BYTES))
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=self.numbers.has_w)
        self.wait = wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stage = self.numbers
        anchor = self.weight if stage.has_w and not x.requires_grad else None
        y = _Compute.apply(x, anchor, self.wait, stage.forward, stage.backward_input, self.numel)
        if not stage.has_w:
            return y
        return _Join.apply(y, _Weight.apply(self.weight, self.wait, stage.backward_weight))


@dataclass
class _Waits:
    """What a rank waited in a step. late: as of csc.runtime.emulated.wait; factor: that all waits are multiplied by."""

    late: float
    factor: float = 1.0
    spans: list[Span] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        start = time.perf_counter()
        slept(seconds * self.factor, self.late)
        self.spans.append((start, time.perf_counter()))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


def prepare(name: str, pipeline: Pipeline, microbatches: int, rank: int, ranks: int) -> Callable[[float], list[Span]]:
    """Set this rank's stages up in the default process group; each call of what is returned runs one step."""
    kind = TORCH[name]
    where = placement(name, ranks)
    wait = _Waits(oversleep())
    stages = [
        pipelining.PipelineStage(_Stage(pipeline, s, wait), s, len(where), torch.device("cpu"))
        for s in range(len(where))
        if where[s] == rank
    ]
    cls = getattr(pipelining, kind.cls)
    schedule = cls(stages if kind.chunks > 1 else stages[0], microbatches, loss_fn=_loss)
    arguments = (torch.zeros(microbatches, 1),) if any(stage.is_first for stage in stages) else ()
    target = torch.zeros(microbatches, 1) if any(stage.is_last for stage in stages) else None

    def step(factor: float) -> list[Span]:
        wait.factor, wait.spans = factor, []
        schedule.step(*arguments, target=target)
        return wait.spans

    return step
