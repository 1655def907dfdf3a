"""What F, B and W of every template variant take on the device at hand: their functions, called and timed."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from csc import devices
from csc.cache.inductor_folder import inductor_folder
from csc.cache.store import store
from csc.capture.batch import device_of
from csc.capture.quantised_weights import weights_of
from csc.ir import graph as g
from csc.ir.groups import BATCH_LOSS, LOSS_WEIGHTS
from csc.ir.program import LOSS, Program, Region, compute_dtypes
from csc.kernels.batch_loss import STANDING_IN, numbered
from csc.passes.dropout import SEED
from csc.planning.schedules import SCHEDULES
from csc.runtime.compile_pool import FunctionFolder
from csc.runtime.emulated import Emulated, emulated
from csc.runtime.executor import Timed
from csc.runtime.flat_tensors import layouts_of, structure_of
from csc.simulation.pipeline import Pipeline, StageWork

# --- What the runtime itself takes of a rank's time ------------------------------------------------------------------
#
# It is measured on emulated ranks that send each other small messages.
#
# Terms
#   action     what an F, B or W takes besides its kernels: finding what it needs, handing on what it made
#   handling   what a message takes at each of its ends: a SEND, or a RECV that waits for nothing with its posting
#
# A rank sleeps before each action as it does in an emulated run: code that has not run for milliseconds is slower than
# a loop. With messages of a megabyte an end takes .15 ms after waits of 2 ms, .25 to .3 after 12. Medians count, as
# what else the machine does only ever adds.


CHUNKS, MICROBATCHES, STEPS = 4, 16, 3
WAIT, SIZE = 2e-3, 65536.0  # by default; a message's bytes are copied to the socket by its sender


class HostTime(NamedTuple):
    """Seconds; see the module's terms."""

    action: float
    handling: float


def calibration(ranks: int, size: float = SIZE, wait: float = WAIT) -> Emulated:
    """Interleaved 1F1B, stages in turns around the ranks. size: bytes of a message; wait: seconds of each action."""
    count = ranks * CHUNKS
    channels = [("F", s, s + 1) for s in range(count - 1)] + [("B", s + 1, s) for s in range(count - 1)]
    numbers = Pipeline((StageWork(wait, wait, wait),) * count, dict.fromkeys(channels, size))
    home = tuple(s % ranks for s in range(count))
    return emulated(numbers, SCHEDULES["interleaved-1f1b"](numbers, home, MICROBATCHES))


def taken(program: Emulated, steps: Sequence[Sequence[Timed]]) -> HostTime:
    """steps: what one rank did, step by step. A RECV that had to wait is no measure of its own work; of all of them the
    lower quarter had not. Receives are posted ahead of the action during which they come.
    """
    spent: dict[str, list[float]] = {"compute": [], "SEND": [], "RECV": []}
    ahead: dict[bool, list[float]] = {True: [], False: []}
    for trace in steps[1:]:
        for event in trace:
            kind, seconds = event.action.kind, event.end - event.start
            if event.action.computes:
                spent["compute"].append(seconds - program.pipeline.stages[event.action.stage].seconds(kind))
            elif kind in spent:
                spent[kind].append(seconds)
        for timed, other in pairwise(trace):
            ahead[other.action.computes].append(other.start - timed.end)
    between = statistics.median(ahead[False])
    action = max(0.0, statistics.median(spent["compute"])) + between
    if not spent["SEND"]:
        return HostTime(action, 0.0)
    posting = max(0.0, statistics.median(ahead[True]) - between) * len(spent["compute"]) / len(spent["RECV"])
    receive = statistics.quantiles(spent["RECV"], n=4)[0] + posting
    return HostTime(action, (statistics.median(spent["SEND"]) + receive) / 2 + between)


# --- F, B and W of a variant as Python, called with tensors by role --------------------------------------------------
#
# Inductor compiles them, if that is how they will run.


log = logging.getLogger("csc")
Role = tuple[str, str]


@dataclass(frozen=True)
class PartFunction:
    """roles: of what it is called with."""

    call: Callable[..., Any]
    roles: tuple[Role, ...]


def part_function(graph: fx.Graph | None, folder: FunctionFolder | None = None) -> PartFunction | None:
    """Of a graph; None without one."""
    if graph is None:
        return None
    module = fx.GraphModule(nn.Module(), graph)
    call = module.forward if folder is None else _Compiled(module.forward, module.code, folder)
    return PartFunction(call, tuple(node.meta["role"] for node in g.placeholders(graph)))


@dataclass
class _Compiled:
    """A function that is compiled for the layouts that it is called with; what Inductor refuses runs as it is."""

    plain: Callable[..., Any]
    text: str
    folder: FunctionFolder
    known: dict[Any, Callable[..., Any] | None] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        layouts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if layouts not in self.known:
            self.known[layouts] = self._made(tensors)
        compiled = self.known[layouts]
        return self.plain(*tensors) if compiled is None else compiled(tensors)

    def _made(self, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any] | None:
        from csc.runtime.compiled_function import KeptFunction  # which imports what only compilers need

        kept = KeptFunction("profiled", self.text, structure_of(tensors), layouts_of(tensors), self.folder.path)
        try:
            return kept.made(self.plain, tensors)[0]
        except Exception as error:  # of the compiler, of whatever kind
            reason = str(error).strip().partition("\n")[0]
            log.warning("profile: a function runs as it is: %s: %s", type(error).__name__, reason)
            return None


# --- What F, B and W of every template variant take, measured over whole steps of one microbatch in this process -----
#
# A step runs every region of the model, so parts are timed with the values, the memory and the caches of real
# training.


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
        return {key: statistics.median(samples) for key, samples in self.samples.items()}


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
    weights = {name: p.detach().to(dtypes.get(name, p.dtype)) for name, p in weights_of(model).items()}
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
    entries[BATCH_LOSS] = numbered(STANDING_IN)
    function = part_function(program.shared)
    assert function is not None
    tables = function.call(*(entries[role] for role in function.roles))
    return dict(zip(program.shared.output_node().meta["names"], tables))


def _step(
    program: Program,
    functions: Mapping[str, Sequence[PartFunction | None]],
    weights: Mapping[str, torch.Tensor],
    tables: Mapping[str, torch.Tensor],
    timer: Call,
) -> None:
    """F of all regions in order, then B and W from the last to the first; values are dropped after their last use."""
    last_reader = {value: i for i, region in enumerate(program.regions) for value in region.activations}
    activations: dict[str, torch.Tensor] = {}
    saved: list[Sequence[torch.Tensor]] = []
    for position, region in enumerate(program.regions):
        forward, backward, _ = functions[region.variant]
        assert forward is not None
        values = _given(program, region, weights, tables)
        values |= {("activation", str(i)): activations[value] for i, value in enumerate(region.activations)}
        result = timer((region.variant, 0), forward, values)
        outputs, kept = result if backward is not None else (result, ())
        activations.update(zip(region.outputs, outputs))
        saved.append(kept)
        for value in {*region.activations, *region.outputs}:
            if last_reader.get(value, position) <= position and value != LOSS:
                activations.pop(value, None)
    gradients = {LOSS: torch.ones_like(activations[LOSS])}
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
        gradients_found, left = timer((region.variant, 1), backward, values)
        gradients.update(zip((v for v, needed in zip(region.activations, region.dx) if needed), gradients_found))
        if weight is not None:
            timer((region.variant, 2), weight, _given(program, region, weights, tables) | _saved(weight, left))


def _given(
    program: Program, region: Region, weights: Mapping[str, torch.Tensor], tables: Mapping[str, torch.Tensor]
) -> dict[Role, torch.Tensor]:
    """The parameters and tables of a region, by role."""
    template = program.templates[region.template]
    values: dict[Role, torch.Tensor] = {}
    values |= {("parameter", local): weights[name] for local, name in zip(template.parameters, region.parameters)}
    values |= {("shared", local): tables[name] for local, name in zip(template.shared, region.shared)}
    return values


def _saved(function: PartFunction, kept: Sequence[torch.Tensor]) -> dict[Role, torch.Tensor]:
    """What an earlier part left, for the placeholders that take it, in order."""
    return dict(zip((role for role in function.roles if role[0] == "saved"), kept, strict=True))
