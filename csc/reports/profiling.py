"""`csc profile`: what F, B and W of every template variant take on the device at hand, and the cost model fitted to it.

profile(compiled, base, seconds) -> Profile
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from csc import devices
from csc.analysis.clocks import ClockProfile
from csc.analysis.costs import Kernels, seconds, variant_key, works_of
from csc.analysis.hardware import Hardware, hardware, names, toml_text
from csc.capture.batch import device_of, placed, split_batch
from csc.capture.trace.meta_init import with_weights
from csc.driver.compiled import CompiledModel
from csc.errors import CscError, InputError
from csc.ir.program import Program
from csc.reports import wire_profile
from csc.reports.clock_profile import clock_profile, parts
from csc.reports.part_times import Seconds, measure
from csc.reports.roofline_fit import fit
from csc.reports.varied_sizes import sampler
from csc.runtime.clocks import NvmlDevice


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
    each clock, too, which takes the right to set them (csc.reports.clock_profile). microbatches: to be measured too,
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
    programs = [(source.program(), source.microbatch), *((source.of(one), one) for one in microbatches)]
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
    found = replace(fitted, measured_on=described(device), measured={row.key: row.measured for row in rows})
    if output is not None:
        found = replace(found, name=output.stem)
        output.write_text(toml_text(found), encoding="utf-8")
    return Profile(found, rows)


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


def _modelled(works: Sequence[Kernels], fitted: Hardware) -> Seconds:
    forward, backward_input, backward_weight = (seconds(work, fitted) for work in works)
    return forward, backward_input, backward_weight
