"""`csc profile`: what F, B and W of every template variant take on the device at hand, and the cost model fitted to it.

Terms
  part      F, B or W of a variant; a step runs every region of the model, so parts are timed with the values, the
            memory and the caches of real training
  fit       the efficiency of matmuls, the bandwidth and the launch time for which the model of csc.analysis.costs is
            nearest to the measured seconds

    measure(program, model, batch, seconds) -> {variant: (F, B, W)}
    fit(base, parts) -> Hardware
    profile(compiled, base, seconds) -> Profile
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from csc import devices
from csc.analysis.costs import seconds, variant_cost, variant_key
from csc.analysis.hardware import Hardware, hardware, names, toml_text
from csc.analysis.kernels import Kernels
from csc.capture.batch import device_of, placed, split_batch
from csc.capture.trace.meta_init import with_weights
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import LOSS, Program, Region, Variant, compute_dtypes
from csc.passes.dropout import SEED
from csc.reports import wire_profile
from csc.reports.varied_sizes import sampler

Role = tuple[str, str]
Seconds = tuple[float, float, float]
WARM_UP, LEAST, ENOUGH = 2, 3, 20  # steps before measuring; steps whatever they take; steps if time allows
STABLE, WINDOW = 0.01, 5  # done when the sum of all medians moved by no more than this share over so many steps


@dataclass(frozen=True)
class VariantRow:
    """One variant. regions: how many run it; error: (modelled - measured) / measured, of F + B + W."""

    variant: str
    key: str
    regions: int
    measured: Seconds
    modelled: Seconds

    @property
    def error(self) -> float:
        return sum(self.modelled) / sum(self.measured) - 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class Profile:
    """The fitted hardware, with the measured seconds in it, and how near the model comes."""

    hardware: Hardware
    rows: Sequence[VariantRow]

    @property
    def error(self) -> float:
        """(modelled - measured) / measured, of one microbatch through the whole model."""
        measured = sum(row.regions * sum(row.measured) for row in self.rows)
        return sum(row.regions * sum(row.modelled) for row in self.rows) / measured - 1

    @property
    def mean_error(self) -> float:
        """Mean of |modelled - measured| over all parts, as a share of the measured time."""
        off = sum(row.regions * abs(a - b) for row in self.rows for a, b in zip(row.modelled, row.measured))
        return off / sum(row.regions * sum(row.measured) for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "hardware": asdict(self.hardware),
            "error": self.error,
            "mean_error": self.mean_error,
            "variants": [row.as_dict() for row in self.rows],
        }


def profile(
    compiled: CompiledModel,
    base: str | Path | None = None,
    budget: float = 20.0,
    output: Path | None = None,
    wires: bool = True,
) -> Profile:
    """Measure the compiled model's variants on one microbatch of its example, where the model is, and fit `base` to it.

    base: the profile whose peaks, memory and network are kept; None: the one named like the device. budget: seconds to
    measure for; a few steps run whatever they take. output: where to write the profile, as a .toml file for
    `--hardware`, which it is named like. wires: measure messages, collectives and the runtime, too
    (csc.reports.wire_profile); what lies between nodes is kept from `base`. Raises InputError if the device has no
    profile, or `output` another suffix.
    """
    if output is not None and output.suffix != ".toml":
        raise InputError(
            f"{output} is no .toml file", "--output", f"call it {output.with_suffix('.toml').name}: profiles are TOML"
        )
    device = device_of(with_weights(compiled.model, "profile"))
    chosen = hardware(base if base is not None else profile_of(device))
    source = sampler(compiled)
    program = source.program()
    source.progress("measuring")
    tensors, _ = split_batch(source.microbatch)
    measured = measure(program, compiled.model, placed(tensors, device), budget)
    regions = {name: sum(region.variant == name for region in program.regions) for name in program.variants}
    works = {name: _works(variant) for name, variant in program.variants.items()}
    fitted = fit(chosen, [(w, t, regions[n]) for n in works for w, t in zip(works[n], measured[n])])
    keys = {name: variant_key(variant) for name, variant in program.variants.items()}
    rows = [
        VariantRow(name, keys[name], regions[name], measured[name], _modelled(works[name], fitted)) for name in works
    ]
    if wires:
        fitted = _with_wires(fitted, wire_profile.measure(device))
    found = replace(fitted, measured_on=described(device), measured={keys[n]: measured[n] for n in measured})
    if output is not None:
        found = replace(found, name=output.stem)
        output.write_text(toml_text(found), encoding="utf-8")
    return Profile(found, rows)


def _with_wires(fitted: Hardware, host: wire_profile.Host) -> Hardware:
    if host.message is not None:
        fitted = replace(fitted, within=host.message, collective=host.collective)
    return replace(fitted, action=host.host.action, handling=host.host.handling) if host.host is not None else fitted


def profile_of(device: torch.device) -> str:
    """The name of the profile of a device. InputError for a GPU that none is for."""
    if device.type == "cpu":
        return "cpu"
    title = devices.title(device).lower()
    found = [name for name in names() if name in title.replace("-", " ").split()]
    if not found:
        raise InputError(
            f"there is no profile for {title}",
            "--hardware",
            f"name the nearest of {', '.join(names())}, or the path of a .toml file with its peaks and network",
        )
    return found[0]


def described(device: torch.device) -> str:
    """`AMD EPYC (x86_64), 2 threads, torch 2.13.0`."""
    if device.type != "cpu":
        return f"{devices.title(device)}, torch {torch.__version__}"
    count = torch.get_num_threads()
    return f"{_processor()}, {count} thread{'s' if count > 1 else ''}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()  # Linux; elsewhere Python knows
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _works(variant: Variant) -> tuple[Kernels, Kernels, Kernels]:
    cost = variant_cost(variant)
    return cost.forward, cost.backward_input, cost.backward_weight


def _modelled(works: Sequence[Kernels], fitted: Hardware) -> Seconds:
    forward, backward_input, backward_weight = (seconds(work, fitted) for work in works)
    return forward, backward_input, backward_weight


# --- measuring ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """A graph as Python, called with tensors by role."""

    call: Callable[..., Any]
    roles: tuple[Role, ...]

    def __call__(self, values: Mapping[Role, torch.Tensor]) -> Any:
        return self.call(*(values[role] for role in self.roles))


def _function(graph: fx.Graph | None) -> _Function | None:
    if graph is None:
        return None
    return _Function(
        fx.GraphModule(nn.Module(), graph).forward, tuple(node.meta["role"] for node in g.placeholders(graph))
    )


class _Timer:
    """Collects seconds by (variant, part); waits for the device before it reads the clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: dict[tuple[str, int], list[float]] = {}

    def __call__(self, key: tuple[str, int], function: _Function, values: Mapping[Role, torch.Tensor]) -> Any:
        arguments = [values[role] for role in function.roles]
        start = self._now()
        result = function.call(*arguments)
        self.samples.setdefault(key, []).append(self._now() - start)
        return result

    def _now(self) -> float:
        devices.synchronize(self.device)
        return time.perf_counter()

    def medians(self) -> dict[tuple[str, int], float]:
        return {key: statistics.median(found) for key, found in self.samples.items()}


@torch.no_grad()
def measure(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor], budget: float = 20.0
) -> dict[str, Seconds]:
    """Median seconds of F, B and W of every variant, over whole steps of one microbatch in this process.

    batch: one microbatch on the model's device, with the sizes that the program was lowered for. Steps repeat until the
    sum of the medians is stable, or `budget` seconds are over.
    """
    functions = {
        name: [_function(part) for part in (v.forward, v.backward_input, v.backward_weight)]
        for name, v in program.variants.items()
    }
    dtypes = compute_dtypes(program)
    weights = {name: p.detach().to(dtypes.get(name, p.dtype)) for name, p in model.named_parameters()}
    tables = _tables(program, batch, device_of(model))
    for _ in range(WARM_UP):
        timer = _Timer(device_of(model))
        _step(program, functions, weights, tables, timer)
    timer = _Timer(device_of(model))
    totals: list[float] = []
    end = time.perf_counter() + budget
    while len(totals) < LEAST or (time.perf_counter() < end and (len(totals) < ENOUGH or _moving(totals))):
        _step(program, functions, weights, tables, timer)
        totals.append(
            sum(median * len(timer.samples[key]) for key, median in timer.medians().items()) / (len(totals) + 1)
        )
    medians = timer.medians()
    return {
        name: (medians.get((name, 0), 0.0), medians.get((name, 1), 0.0), medians.get((name, 2), 0.0))
        for name in program.variants
    }


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
    function = _function(program.shared)
    assert function is not None
    return dict(zip(program.shared.output_node().meta["names"], function(entries)))


def _step(
    program: Program,
    functions: Mapping[str, Sequence[_Function | None]],
    weights: Mapping[str, torch.Tensor],
    tables: Mapping[str, torch.Tensor],
    timer: _Timer,
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


def _saved(function: _Function, kept: Sequence[torch.Tensor]) -> dict[Role, torch.Tensor]:
    """What an earlier part left, for the placeholders that take it, in order."""
    return dict(zip((role for role in function.roles if role[0] == "saved"), kept, strict=True))


# --- fitting -----------------------------------------------------------------------------------------------------

Part = tuple[Kernels, float, int]  # work, measured seconds, how many regions run it
BOUNDS = ((0.2, 1e3), (0.2, 1e3), (0.0, 1e-2))  # peak / reached rate, bandwidth / reached, seconds per kernel


def fit(base: Hardware, parts: Sequence[Part]) -> Hardware:
    """`base` with the efficiencies and the launch time for which the model is nearest to the measured parts.

    With x = 1 / matmul_efficiency, y = 1 / bandwidth_efficiency and z = launch the roofline is linear once it is known
    which calls are bound by compute: least squares of the errors over the square roots of the times, within bounds,
    alternating with that choice. A parameter that no part depends on stays as in `base`. A device that is faster than
    the base says gets higher peaks or bandwidth, and an efficiency of 1.
    """
    parts = [part for part in parts if part[0].calls and part[1] > 0]
    if not parts:
        return base
    best = (1 / base.matmul_efficiency, 1 / base.bandwidth_efficiency, base.launch)
    least = _misfit(base, best, parts)
    current = best
    for _ in range(30):
        rows = [_columns(base, current, work) for work, _, _ in parts]
        current = _least_squares(rows, [t for _, t, _ in parts], [n / t for _, t, n in parts], current)
        off = _misfit(base, current, parts)
        if off >= least:
            break
        best, least = current, off
    return _with(base, best)


def _with(base: Hardware, found: tuple[float, float, float]) -> Hardware:
    compute, memory = 1 / found[0], 1 / found[1]
    return replace(
        base,
        peak={dtype: rate * max(1.0, compute) for dtype, rate in base.peak.items()},
        bandwidth=base.bandwidth * max(1.0, memory),
        matmul_efficiency=min(1.0, compute),
        bandwidth_efficiency=min(1.0, memory),
        launch=found[2],
    )


def _misfit(base: Hardware, parameters: tuple[float, float, float], parts: Sequence[Part]) -> float:
    tried = _with(base, parameters)
    return sum(count * (seconds(work, tried) - measured) ** 2 / measured for work, measured, count in parts)


def _columns(base: Hardware, parameters: tuple[float, float, float], work: Kernels) -> tuple[float, float, float]:
    """What x, y and z are multiplied by in the time of the work, given which calls are bound by compute."""
    compute = memory = 0.0
    for call in work.calls:
        flops = call.flops / (base.peak[call.dtype] * base.share(call.flops)) if call.flops else 0.0
        moved = call.bytes / base.bandwidth
        if flops * parameters[0] > moved * parameters[1]:
            compute += flops
        else:
            memory += moved
    return compute, memory, float(work.kernels)


def _least_squares(
    rows: Sequence[tuple[float, float, float]],
    targets: Sequence[float],
    weights: Sequence[float],
    start: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Weighted least squares within BOUNDS: the best of all choices of which unknowns are free and which at a bound.

    An unknown that no row depends on stays as in `start`.
    """
    root = np.sqrt(np.array(weights))
    matrix, right = np.array(rows) * root[:, None], np.array(targets) * root
    scale = np.abs(matrix).max(axis=0)  # seconds per kernel are a million times smaller than the other two
    choices = [(None, low, high) if size > 0 else (value,) for (low, high), size, value in zip(BOUNDS, scale, start)]
    best, least = start, float("inf")
    for fixed in product(*choices):
        found = np.array([0.0 if value is None else value for value in fixed])
        free = [i for i, value in enumerate(fixed) if value is None]
        if free:
            solution = np.linalg.lstsq(matrix[:, free] / scale[free], right - matrix @ found, rcond=None)[0]
            found[free] = solution / scale[free]
        if not all(BOUNDS[i][0] <= found[i] <= BOUNDS[i][1] for i in free):
            continue
        off = float(((matrix @ found - right) ** 2).sum())
        if off < least:
            best, least = (float(found[0]), float(found[1]), float(found[2])), off
    return best
