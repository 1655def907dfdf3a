"""`csc profile`: what F, B and W of every template variant take on the device at hand, and the cost model fitted to
it.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from csc import devices
from csc.analysis.clocks import ClockProfile, relative
from csc.analysis.costs import Kernels, seconds, variant_key, works_of
from csc.analysis.hardware import Hardware, hardware, names, toml_text
from csc.capture.batch import device_of, placed, split_batch
from csc.capture.trace.meta_init import with_weights
from csc.driver.compiled import CompiledModel
from csc.errors import CscError, InputError
from csc.ir.program import Program
from csc.reports import wire_profile
from csc.reports.part_times import PartFunction, Role, Seconds, measure, whole_step
from csc.reports.varied_sizes import sampler
from csc.runtime.clocks import RIGHTS, NvmlDevice

# --- The cost model of csc.analysis.costs fitted to measured seconds -------------------------------------------------
#
# Terms: the *fit* is the efficiency of matmuls, the bandwidth and the launch time for which the model is nearest to
# them.


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


def _with(base: Hardware, fitted: tuple[float, float, float]) -> Hardware:
    compute, memory = 1 / fitted[0], 1 / fitted[1]
    return replace(
        base,
        peak={dtype: rate * max(1.0, compute) for dtype, rate in base.peak.items()},
        compiled={dtype: rate * max(1.0, compute) for dtype, rate in base.compiled.items()},
        bandwidth=base.bandwidth * max(1.0, memory),
        matmul_efficiency=min(1.0, compute),
        bandwidth_efficiency=min(1.0, memory),
        launch=fitted[2],
    )


def _misfit(base: Hardware, parameters: tuple[float, float, float], parts: Sequence[Part]) -> float:
    tried = _with(base, parameters)
    return sum(count * (seconds(work, tried) - measured) ** 2 / measured for work, measured, count in parts)


def _columns(base: Hardware, parameters: tuple[float, float, float], work: Kernels) -> tuple[float, float, float]:
    """What x, y and z are multiplied by in the time of the work, given which calls are bound by compute."""
    compute = memory = 0.0
    for call in work.calls:
        flops = call.flops / (base.peak_of(call.dtype, call.compiled) * base.share(call.flops)) if call.flops else 0.0
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
        solved = np.array([0.0 if value is None else value for value in fixed])
        free = [i for i, value in enumerate(fixed) if value is None]
        if free:
            solution = np.linalg.lstsq(matrix[:, free] / scale[free], right - matrix @ solved, rcond=None)[0]
            solved[free] = solution / scale[free]
        if not all(BOUNDS[i][0] <= solved[i] <= BOUNDS[i][1] for i in free):
            continue
        off = float(((matrix @ solved - right) ** 2).sum())
        if off < least:
            best, least = (float(solved[0]), float(solved[1]), float(solved[2])), off
    return best


# --- `csc profile --clocks` ------------------------------------------------------------------------------------------
#
# It measures what forwards and backwards take at each clock of the GPU at hand, in seconds and joules.
#
# Terms: see csc.analysis.clocks. Each part of each variant runs for a while at a locked clock, as NVML's counter of
# joules moves in steps of some 20 ms; a forward's figures are the sums over the parts of all regions, a backward's
# those of B and W.


CLOCKS = 20  # that are measured, evenly over those that the device has
LOWEST = 0.55  # of the highest clock: below that no action takes fewer joules
WINDOW = 0.25  # second for each part at each clock
SWITCHES = 6  # changes of clock that are timed
SETTLED = 0.5  # second after which a change is not waited for any longer

Measure = Callable[[str, int, Callable[[], Any]], None]  # F or B, how many regions have the part, and one run of it


class Gpu(Protocol):
    """What is asked of a device: csc.runtime.clocks.NvmlDevice."""

    @property
    def supported(self) -> list[int]: ...

    @property
    def clock(self) -> int: ...

    @property
    def joules(self) -> float: ...

    def lock(self, clock: int) -> None: ...

    def unlock(self) -> None: ...

    def wait(self) -> None: ...


def clock_profile(
    run: Callable[[Measure], None], device: Gpu, source: str, count: int = CLOCKS, window: float = WINDOW
) -> ClockProfile:  # fmt: skip
    """Measured on this device, which chooses its clocks itself again afterwards.

    InputError where the driver does not let clocks be set, and for curves that cannot be right.
    """
    chosen = spread(device.supported, count)
    try:
        device.lock(chosen[0])
    except Exception as error:  # NVML's own errors, which only its binding knows by type
        raise InputError(
            f"the clock of the GPU cannot be set: {error}", "--clocks", f"{RIGHTS}; or ask who runs the machine"
        ) from None
    try:
        waiting = _waiting(device, window)
        rows = []
        for clock in chosen:
            device.lock(clock)
            _settle(device, clock)
            rows.append(_at(run, device, window))
        change = _change_seconds(device, chosen)
    finally:
        device.unlock()
    curves = {
        kind: relative(chosen, [row[kind][0] for row in rows], [row[kind][1] / row[kind][0] for row in rows], source)
        for kind in ("F", "B")
    }
    return ClockProfile(source, waiting, curves["F"], curves["B"], change)


def spread(supported: Sequence[int], count: int) -> list[int]:
    """So many clocks of those that a device has, evenly from the highest down. InputError for fewer than two."""
    able = [clock for clock in sorted(set(supported), reverse=True) if clock >= LOWEST * max(supported)]
    if len(able) < 2:
        raise InputError(
            f"the device has {len(able)} clock that can be set", "--clocks", "there is nothing to choose from"
        )  # fmt: skip
    step = max(1, (len(able) - 1) // max(1, count - 1))
    return able[::step]


def _at(run: Callable[[Measure], None], device: Gpu, window: float) -> dict[str, tuple[float, float]]:
    """Seconds and joules of F and of B with W, of all regions."""
    sums = {"F": (0.0, 0.0), "B": (0.0, 0.0)}

    def measure(kind: str, regions: int, call: Callable[[], Any]) -> None:
        call()
        device.wait()
        times, start, before = 0, time.perf_counter(), device.joules
        while True:
            call()
            device.wait()
            times += 1
            seconds = time.perf_counter() - start
            if seconds >= window:
                break
        joules = device.joules - before
        total, spent = sums[kind]
        sums[kind] = (total + regions * seconds / times, spent + regions * joules / times)

    run(measure)
    return sums


def _waiting(device: Gpu, window: float) -> float:
    """Watts of the device while nothing runs on it."""
    device.wait()
    start, before = time.perf_counter(), device.joules
    time.sleep(4 * window)
    return (device.joules - before) / (time.perf_counter() - start)


def _settle(device: Gpu, clock: int) -> float:
    """Seconds until the device says that it runs at a clock, or does no better."""
    start = time.perf_counter()
    while abs(device.clock - clock) > 15 and time.perf_counter() - start < SETTLED:
        time.sleep(0.0005)
    return time.perf_counter() - start


def _change_seconds(device: Gpu, chosen: Sequence[int]) -> float:
    """The median of some changes between the highest clock and the lowest."""
    taken = []
    for number in range(SWITCHES):
        clock = chosen[-1 if number % 2 == 0 else 0]
        start = time.perf_counter()
        device.lock(clock)
        _settle(device, clock)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def parts(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor], fuse: bool = False
) -> Callable[[Measure], None]:
    """The parts of one microbatch's step, each variant once."""
    step = whole_step(program, model, batch, fuse)
    count = Counter(region.variant for region in program.regions)

    def run(measure: Measure) -> None:
        seen: set[tuple[str, int]] = set()

        def call(key: tuple[str, int], function: PartFunction, values: Mapping[Role, torch.Tensor]) -> Any:
            arguments = [values[role] for role in function.roles]
            if key not in seen:
                seen.add(key)
                measure("F" if key[1] == 0 else "B", count[key[0]], lambda: function.call(*arguments))
            return function.call(*arguments)

        with torch.no_grad():
            step(call)

    return run


# --- `csc profile`: what F, B and W of every template variant take on the device at hand -----------------------------
#
# The cost model is fitted to it.


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
        """(modelled - measured) / measured, of one microbatch of each size through the whole model."""
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
    clocks: bool = False,
    microbatches: Sequence[Mapping[str, Any]] = (),
) -> Profile:
    """Measure the compiled model's variants on one microbatch of its example, where the model is, and fit `base` to it.

    base: the profile whose peaks, memory and network are kept; None: the one named like the device. budget: seconds to
    measure for; a few steps run whatever they take. output: where to write the profile, as a .toml file for
    `--hardware`, which it is named like. wires: measure messages, collectives and the runtime, too
    (csc.reports.wire_profile); what lies between nodes is kept from `base`. clocks: measure seconds and joules at
    each clock, too, which takes the right to set them. microbatches: to be measured too,
    each with its part of the budget: sizes that steps will have. Raises InputError if the device has no profile,
    `output` another suffix, or clocks cannot be set.
    """
    if output is not None and output.suffix != ".toml":
        raise InputError(
            f"{output} is no .toml file", "--output", f"call it {output.with_suffix('.toml').name}: profiles are TOML"
        )
    device = device_of(with_weights(compiled.model, "profile"))
    chosen = hardware(base if base is not None else profile_of(device))
    source = sampler(compiled)
    programs = [(source.program(), source.microbatch), *((source.of(batch), batch) for batch in microbatches)]
    source.progress("measuring")
    rows, kernels, fuse = [], [], compiled.options.fuse
    for program, microbatch in programs:
        tensors = placed(split_batch(microbatch)[0], device)
        measured = measure(program, compiled.model, tensors, budget / len(programs), fuse)
        for name, variant in program.variants.items():
            regions = sum(region.variant == name for region in program.regions)
            kernels.append(works_of(variant, fuse))
            rows.append(VariantRow(name, variant_key(variant, fuse), regions, measured[name], measured[name]))
    parts = [(work, took, row.regions) for works, row in zip(kernels, rows) for work, took in zip(works, row.measured)]
    fitted = fit(chosen, parts)
    rows = [replace(row, modelled=_modelled(works, fitted)) for works, row in zip(kernels, rows)]
    if clocks:
        source.progress("clocks")
        fitted = replace(
            fitted, clocks=_clocks(programs[0][0], compiled, placed(split_batch(source.microbatch)[0], device))
        )
    if wires:
        fitted = _with_wires(fitted, wire_profile.measure(device))
    profile = replace(fitted, measured_on=described(device), measured={row.key: row.measured for row in rows})
    if output is not None:
        profile = replace(profile, name=output.stem)
        output.write_text(toml_text(profile), encoding="utf-8")
    return Profile(profile, rows)


def _with_wires(fitted: Hardware, host: wire_profile.WireTimes) -> Hardware:
    if host.message is not None:
        fitted = replace(fitted, within=host.message, collective=host.collective)
    return replace(fitted, action=host.host.action, handling=host.host.handling) if host.host is not None else fitted


def _clocks(program: Program, compiled: CompiledModel, tensors: Mapping[str, torch.Tensor]) -> ClockProfile:
    """Of the GPU that the model is on. InputError for other devices, and where NVML does not let clocks be set."""
    device = device_of(compiled.model)
    if devices.uuid(device) is None:
        raise InputError(
            f"a {device.type} has no clocks that csc can set", "--clocks", "measure on an NVIDIA GPU"
        )  # fmt: skip
    run = parts(program, compiled.model, tensors, compiled.options.fuse)
    try:
        gpu = NvmlDevice(device)
    except CscError:
        raise
    except Exception as error:  # NVML's own errors
        raise InputError(f"NVML does not answer: {error}", "--clocks", "look at nvidia-smi") from None
    return clock_profile(run, gpu, f"measured on {described(device)}, layers of {type(compiled.model).__name__}")


def profile_of(device: torch.device) -> str:
    """The name of the profile of a device. InputError for a GPU that none is for."""
    if device.type == "cpu":
        return "cpu"
    title = devices.title(device).lower()
    matches = [name for name in names() if name in title.replace("-", " ").split()]
    if not matches:
        raise InputError(
            f"there is no profile for {title}",
            "--hardware",
            f"name the nearest of {', '.join(names())}, or the path of a .toml file with its peaks and network",
        )
    return matches[0]


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


def _modelled(works: Sequence[Kernels], fitted: Hardware) -> Seconds:
    forward, backward_input, backward_weight = (seconds(work, fitted) for work in works)
    return forward, backward_input, backward_weight
