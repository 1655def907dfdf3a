"""What the runtime itself takes of a step: a step of csc beside a plain loop that calls the same emitted functions.

    python -m benchmarks.step_time --overhead [--json]

All ranks run in one process, on one thread; CPU time, in turns, the least of the rounds. The plain loop has each
microbatch go through the stages and back, hands values on by name and adds gradients: no schedule, no checks, no
messages. What is left over is fitted by a constant for a step, one for an action and one for a message.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import csc
from benchmarks.step_time.cases import Case
from benchmarks.step_time.models import build
from csc.runtime.loaded_program import LoadedProgram, StageFunctions, functions

CASE = Case("llama", 64, 32, layers=4, padded=False)
LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2))  # (pp, microbatches)
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OverheadRow:
    """ms: CPU time of a step and of the plain loop. difference: the largest relative one of a gradient."""

    pp: int
    microbatches: int
    actions: int
    messages: int
    step_ms: float
    plain_ms: float
    difference: float


class PlainLoop:
    """Steps of a program with one replica, in one process, as one would write them down."""

    def __init__(self, program: LoadedProgram, parameters: Mapping[str, nn.Parameter]) -> None:
        self.manifest = program.manifest
        self._parameters = parameters
        ranks = range(self.manifest.mesh.size)
        self._functions: dict[int, StageFunctions] = {}
        self._constants: dict[int, Values] = {}
        for rank in ranks:
            for stage, found in functions(program, rank).items():
                self._functions[stage], self._constants[stage] = found, program.constants(rank)
        self._taken: dict[tuple[str, int], list[tuple[int, list[str]]]] = {}
        for message in self.manifest.messages:
            names = [value.name for value in message.values]
            self._taken.setdefault((message.kind, message.destination), []).append((message.source, names))

    @torch.no_grad()
    def step(self, microbatches: list[Mapping[str, Any]]) -> None:
        """Sets `.grad`. The loss is a mean over as many labels in each microbatch."""
        weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
        sums: Values = {}
        for batch in microbatches:
            self._microbatch(batch, weights, 1 / len(microbatches), sums)
        for name, gradient in sums.items():
            self._parameters[name].grad = gradient

    def _microbatch(self, batch: Mapping[str, Any], weights: Values, share: float, sums: Values) -> None:
        stages, sent, saved = sorted(self._functions), dict[int, Values](), dict[int, Any]()
        for stage in stages:
            received = self._received("F", stage, sent)
            made = self._functions[stage].forward(batch, received, weights, self._constants[stage])
            sent[stage], saved[stage] = made
        back: dict[int, Values] = {}
        for stage in reversed(stages):
            received = self._received("B", stage, back)
            if stage == self.manifest.loss.stage:
                received["loss"] = torch.tensor(share, dtype=sent[stage]["loss"].dtype)
            backward = self._functions[stage].backward
            assert backward is not None
            run = backward(saved.pop(stage), received, weights, self._constants[stage])
            while True:
                try:
                    name, gradient = next(run)
                except StopIteration as end:
                    back[stage] = end.value
                    break
                sums[name] = sums[name] + gradient if name in sums else gradient

    def _received(self, kind: str, stage: int, sent: Mapping[int, Values]) -> Values:
        found: Values = {}
        for source, names in self._taken.get((kind, stage), ()):
            for name in names:
                value = sent[source][name]
                found[name] = found[name] + value if name in found else value
        return found


def measure(rounds: int) -> list[OverheadRow]:
    """A row for each layout."""
    return [measured_layout(pp, microbatches, rounds) for pp, microbatches in LAYOUTS]


def measured_layout(pp: int, microbatches: int, rounds: int) -> OverheadRow:
    """Of one layout."""
    model, batch = build(CASE)
    compiled = csc.compile(
        model, example=dict(batch), mesh={"pp": pp}, microbatches=microbatches, schedule="1f1b", check=False
    )
    trainer = compiled.trainer(check=False)
    parts = compiled.cut(batch, microbatches)
    plain = PlainLoop(trainer.program, dict(model.named_parameters()))
    own = _gradients(model, lambda: compiled.train_step(dict(batch)))
    theirs = _gradients(model, lambda: plain.step(parts))
    assert own.keys() == theirs.keys()
    difference = max(float((own[name] - one).norm() / one.norm()) for name, one in theirs.items())
    runs: dict[str, Callable[[], object]] = {
        "step": lambda: compiled.train_step(dict(batch)), "plain": lambda: plain.step(parts)
    }  # fmt: skip
    least = dict.fromkeys(runs, math.inf)
    for number in range(rounds):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            start = time.process_time()
            runs[name]()
            least[name] = min(least[name], time.process_time() - start)
            model.zero_grad()
    actions = [action for rank in trainer.program.schedule.ranks for action in rank]
    messages = sum(action.kind == "SEND" for action in actions)
    computing = sum(bool(action.computes) for action in actions)
    return OverheadRow(
        pp, microbatches, computing, messages, 1e3 * least["step"], 1e3 * least["plain"], difference
    )  # fmt: skip


def _gradients(model: nn.Module, run: Callable[[], object]) -> Values:
    model.zero_grad()
    run()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def fitted(rows: list[OverheadRow]) -> dict[str, float]:
    """Microseconds of a step, of an action that computes and of a message: least squares, none below 0."""
    from scipy.optimize import nnls

    sides = np.array([[1.0, row.actions, row.messages] for row in rows])
    over = np.array([1e3 * (row.step_ms - row.plain_ms) for row in rows])
    solved, _ = nnls(sides, np.maximum(over, 0.0))
    return dict(zip(("step_us", "action_us", "message_us"), map(float, solved), strict=True))
