"""What a step of each pair takes on the user's mesh: planned from one capture of each encoder and of each language
model, as a pair's step is the encoder's regions, and behind them the language model's.

Terms
  front   an encoder's regions as a planning problem; they are frozen, and so have a forward alone
  rear    those of a trial model: the projector, as wide as the widest encoder's features, and the language model
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from csc.analysis.clocks import ClockProfile
from csc.analysis.hardware import hardware
from csc.composition import ComposedModel
from csc.composition import encoders as known
from csc.driver.compiled import CompiledModel
from csc.driver.options import changed
from csc.ir.program import Options
from csc.planning.energy.frontier import of_profiles
from csc.planning.plan import plan
from csc.planning.problem import Problem, Value

EFFORT, LIMIT = 0.2, 20.0  # of the search for a plan; seconds
HEAD = "scale"


@dataclass(frozen=True)
class PairPlan:
    """seconds: of a step. memory: bytes of the rank that holds the most. joules: of all devices in a step, at the
    clocks that they choose themselves; None: no profile says.
    """

    seconds: float
    memory: float
    layout: str
    joules: float | None = None


@dataclass(frozen=True)
class StepPower:
    """By pipeline rank, what one of its devices draws, and how many it has."""

    clocks: tuple[ClockProfile, ...]
    devices: tuple[int, ...]


class Front(nn.Module):
    """An encoder in front of one number, so that it can be captured as a step."""

    def __init__(self, encoder: nn.Module, model: ComposedModel, modality: str) -> None:
        super().__init__()
        self.encoder = encoder
        self._modality = model.modalities[modality]
        self.scale = nn.Parameter(torch.ones((), device=next(encoder.parameters()).device))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """items: (items, *item shape)."""
        it = self._modality
        states = known.features(self.encoder, it.kind, items, it.feature_layer, it.keep_prefix)
        return (states.float() * self.scale).mean()


def problem_of(compiled: CompiledModel, options: Mapping[str, Any]) -> Problem:
    """Of the example with other options: the mesh, microbatches, hardware."""
    other = compiled.with_options(**options, check=False)
    return other.inspected.problem(other.inspected.microbatch)


def joined(front: Problem, rear: Problem, size: float) -> Problem:
    """The front without its scale, and the rear behind what it makes last."""
    kept = [number for number, unit in enumerate(front.units) if not unit.has_w]
    place = {number: index for index, number in enumerate(kept)}
    shift = len(kept)
    values = [
        Value(place[value.maker], tuple(place[r] for r in readers), (False,) * len(readers), value.size, 0.0)
        for value in front.values
        if value.maker in place and (readers := [r for r in value.readers if r in place])
    ]
    values += [
        replace(value, maker=value.maker + shift, readers=tuple(reader + shift for reader in value.readers))
        for value in rear.values
    ]
    first = next(number for number, unit in enumerate(rear.units) if "_projector" in unit.name)
    if kept:
        values.append(Value(shift - 1, (first + shift,), (False,), size, 0.0))
    units = tuple(replace(front.units[number], has_b=False) for number in kept) + rear.units
    return replace(rear, units=units, values=tuple(sorted(values, key=lambda value: value.maker)))


def planned(problem: Problem, power: StepPower | None = None, schedule: str = "auto") -> PairPlan:
    """InputError if nothing fits the memory."""
    planned_pair = plan(problem, schedule=schedule, effort=EFFORT, limit=LIMIT)
    joules = None
    if power is not None:
        joules = of_profiles(planned_pair.pipeline, planned_pair.schedule, power.clocks, power.devices).usual.joules
    return PairPlan(planned_pair.makespan, max(planned_pair.peak_memory), planned_pair.layout, joules)


def power_of(options: Mapping[str, Any]) -> StepPower | None:
    """None where no hardware is named, or one of its profiles has no measured clocks: nothing is guessed."""
    plan_options = changed(Options(), **options)
    if plan_options.hardware is None:
        return None
    names = (
        plan_options.hardware
        if isinstance(plan_options.hardware, tuple)
        else (plan_options.hardware,) * plan_options.mesh.pp
    )
    known = {name: hardware(name).clocks for name in names}
    clocks = [known[name] for name in names]
    if any(clock is None for clock in clocks):
        return None
    count = Counter(plan_options.mesh.coordinates(rank).pp for rank in range(plan_options.mesh.size))
    return StepPower(
        tuple(clock for clock in clocks if clock is not None),
        tuple(count[rank] for rank in range(plan_options.mesh.pp)),
    )
