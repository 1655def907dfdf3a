"""What F, B and W of every template variant take, measured over whole steps of one microbatch in this process.

A step runs every region of the model, so parts are timed with the values, the memory and the caches of real training.

    measure(program, model, batch, seconds, fuse) -> {variant: (F, B, W)}
    whole_step(program, model, batch, fuse) -> step       step(call): calls what `call` is given for every part in order
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.cache.inductor_folder import inductor_folder
from csc.cache.store import store
from csc.capture.batch import device_of
from csc.ir.groups import LOSS_WEIGHTS
from csc.ir.program import LOSS, Program, Region, compute_dtypes
from csc.passes.dropout import SEED
from csc.reports.part_functions import PartFunction, Role, part_function
from csc.runtime.compile_pool import FunctionFolder

Seconds = tuple[float, float, float]
Call = Callable[[tuple[str, int], PartFunction, Mapping[Role, torch.Tensor]], Any]
WARM_UP, LEAST, ENOUGH = 2, 3, 20  # steps before measuring; steps whatever they take; steps if time allows
STABLE, WINDOW = 0.01, 5  # done when the sum of all medians moved by no more than this share over so many steps


class _Timer:
    """Collects seconds by (variant, part); waits for the device before it reads the clock. One thread on a CPU is
    measured by the time that it had the processor: what else the machine does is no part of that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self.samples: dict[tuple[str, int], list[float]] = {}

    def __call__(self, key: tuple[str, int], function: PartFunction, values: Mapping[Role, torch.Tensor]) -> Any:
        arguments = [values[role] for role in function.roles]
        start = self._now()
        result = function.call(*arguments)
        self.samples.setdefault(key, []).append(self._now() - start)
        return result

    def _now(self) -> float:
        devices.synchronize(self.device)
        return self._clock()

    def medians(self) -> dict[tuple[str, int], float]:
        return {key: statistics.median(found) for key, found in self.samples.items()}


@torch.no_grad()
def measure(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor], budget: float = 20.0, fuse: bool = False
) -> dict[str, Seconds]:
    """Median seconds of F, B and W of every variant, over whole steps of one microbatch in this process.

    batch: one microbatch on the model's device, with the sizes that the program was lowered for. Steps repeat until the
    sum of the medians is stable, or `budget` seconds are over. fuse: as Inductor compiles them.
    """
    step = whole_step(program, model, batch, fuse)
    for _ in range(WARM_UP):
        step(_Timer(device_of(model)))
    timer = _Timer(device_of(model))
    totals: list[float] = []
    end = time.perf_counter() + budget
    while len(totals) < LEAST or (time.perf_counter() < end and (len(totals) < ENOUGH or _moving(totals))):
        step(timer)
        totals.append(
            sum(median * len(timer.samples[key]) for key, median in timer.medians().items()) / (len(totals) + 1)
        )
    medians = timer.medians()
    return {
        name: (medians.get((name, 0), 0.0), medians.get((name, 1), 0.0), medians.get((name, 2), 0.0))
        for name in program.variants
    }


def whole_step(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor], fuse: bool = False
) -> Callable[[Call], None]:
    """A step of one microbatch, part by part: `call` gets (variant, part), the function and its values, and returns
    what the function does. Run it without gradients.
    """
    folder = FunctionFolder.of(inductor_folder(store())) if fuse else None
    functions = {
        name: [part_function(part, folder) for part in (v.forward, v.backward_input, v.backward_weight)]
        for name, v in program.variants.items()
    }
    dtypes = compute_dtypes(program)
    weights = {name: p.detach().to(dtypes.get(name, p.dtype)) for name, p in model.named_parameters()}
    tables = _tables(program, batch, device_of(model))
    return lambda call: _step(program, functions, weights, tables, call)


def _moving(totals: Sequence[float]) -> bool:
    last = totals[-WINDOW:]
    return max(last) - min(last) > STABLE * last[-1]


def _tables(program: Program, batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """What every stage makes from the batch and constants alone."""
    if program.shared is None:
        return {}
    entries: dict[Role, torch.Tensor] = {("input", name): tensor for name, tensor in batch.items()}
    entries |= {("constant", name): tensor.to(device) for name, tensor in program.constants.items()}
    entries[SEED] = torch.zeros((), dtype=torch.int64)
    entries[LOSS_WEIGHTS] = torch.ones(len(program.combination.divisors), dtype=torch.float64, device=device)
    function = part_function(program.shared)
    assert function is not None
    made = function.call(*(entries[role] for role in function.roles))
    return dict(zip(program.shared.output_node().meta["names"], made))


def _step(
    program: Program,
    functions: Mapping[str, Sequence[PartFunction | None]],
    weights: Mapping[str, torch.Tensor],
    tables: Mapping[str, torch.Tensor],
    timer: Call,
) -> None:
    """F of all regions in order, then B and W from the last to the first; values are dropped after their last use."""
    last_reader = {value: i for i, region in enumerate(program.regions) for value in region.activations}
    made: dict[str, torch.Tensor] = {}
    saved: list[Sequence[torch.Tensor]] = []
    for position, region in enumerate(program.regions):
        forward, backward, _ = functions[region.variant]
        assert forward is not None
        values = _given(program, region, weights, tables)
        values |= {("activation", str(i)): made[value] for i, value in enumerate(region.activations)}
        result = timer((region.variant, 0), forward, values)
        outputs, kept = result if backward is not None else (result, ())
        made.update(zip(region.outputs, outputs))
        saved.append(kept)
        for value in {*region.activations, *region.outputs}:
            if last_reader.get(value, position) <= position and value != LOSS:
                made.pop(value, None)
    gradients = {LOSS: torch.ones_like(made[LOSS])}
    for region in reversed(program.regions):
        _, backward, weight = functions[region.variant]
        kept = saved.pop()
        if backward is None:
            continue
        template, variant = program.templates[region.template], program.variants[region.variant]
        values = _given(program, region, weights, tables) | _saved(backward, kept)
        values |= {
            ("tangent", template.outputs[i]): gradients.pop(value)
            for i, value in enumerate(region.outputs)
            if variant.tangents[i]
        }
        values |= {
            ("tangent", template.activations[i]): gradients[region.activations[i]]
            for i in template.threaded
            if variant.dx[i]
        }
        found, left = timer((region.variant, 1), backward, values)
        gradients.update(zip((v for v, needed in zip(region.activations, region.dx) if needed), found))
        if weight is not None:
            timer((region.variant, 2), weight, _given(program, region, weights, tables) | _saved(weight, left))


def _given(
    program: Program, region: Region, weights: Mapping[str, torch.Tensor], tables: Mapping[str, torch.Tensor]
) -> dict[Role, torch.Tensor]:
    """The parameters and tables of a region, by role."""
    template = program.templates[region.template]
    values: dict[Role, torch.Tensor] = {}
    values |= {("parameter", own): weights[name] for own, name in zip(template.parameters, region.parameters)}
    values |= {("shared", own): tables[name] for own, name in zip(template.shared, region.shared)}
    return values


def _saved(function: PartFunction, kept: Sequence[torch.Tensor]) -> dict[Role, torch.Tensor]:
    """What an earlier part left, for the placeholders that take it, in order."""
    return dict(zip((role for role in function.roles if role[0] == "saved"), kept, strict=True))
