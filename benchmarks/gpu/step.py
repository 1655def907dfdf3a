"""A training step on one device: eager PyTorch, torch.compile, csc, each as it is, fused and recorded as CUDA graphs.

    python -m benchmarks.gpu.step [--rounds 10] [--rivals eager csc] [--width 1024] [--tokens 1024] [--dtype bfloat16]

Rivals take turns; a step is timed from an idle device until it is idle again. over eager: the median of pairs. kernels:
milliseconds in which the device computes, of a step under a profiler; what is more than that waits for the host.
planned: the bytes that csc's plan has for the step without an optimizer, beside the most that PyTorch's allocator held
without what was there before the rival came: models and gradients of the others.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from collections.abc import Mapping
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.autograd import DeviceType

import csc
from benchmarks.gpu.model import DEVICE, Batch, on_device
from benchmarks.step_time.cases import Case
from benchmarks.step_time.measure import COMPILE, CSC, EAGER, FUSED, Step, difference, result, turn
from csc import devices
from csc.reports.forecast import memory_forecast
from csc.runtime.graphed_stage import MET

RECORDED, AUTOTUNED = ", recorded", ", max-autotune"
MODES = {RECORDED: "reduce-overhead", AUTOTUNED: "max-autotune-no-cudagraphs"}  # of torch.compile
SLOW_TO_START = COMPILE + AUTOTUNED  # minutes: only where it is asked for
RIVALS = (EAGER, COMPILE, COMPILE + RECORDED, CSC, FUSED, CSC + RECORDED, FUSED + RECORDED)
WARM_UP = MET + 2  # steps after which all is recorded


def cases(width: int, layers: int, tokens: int) -> list[Case]:
    """One with all trained, one with a frozen encoder."""
    return [Case("llama", width, tokens, layers), Case("llava", width, tokens, layers, frozen="encoder")]


def step_of(name: str, model: nn.Module, batch: Batch) -> tuple[Step, csc.CompiledModel | None]:
    """A function that makes a step, and the compiled model behind it."""
    what, is_recorded = name.removesuffix(RECORDED).removesuffix(AUTOTUNED), name.endswith(RECORDED)
    if what in (CSC, FUSED):
        compiled = csc.compile(model, example=batch, check=False, fuse=what == FUSED, cuda_graphs=is_recorded)
        return lambda: compiled.train_step(batch), compiled
    mode = next((mode for suffix, mode in MODES.items() if name.endswith(suffix)), None)
    forward = torch.compile(model, dynamic=False, mode=mode) if what == COMPILE else model

    def step() -> torch.Tensor:
        if is_recorded:
            torch.compiler.cudagraph_mark_step_begin()
        loss: torch.Tensor = forward(**batch).loss
        loss.backward()
        return loss.detach()

    return step, None


def seconds(step: Step, model: nn.Module) -> float:
    """Of a step, until the device is idle."""
    devices.synchronize(DEVICE)
    start = time.perf_counter()
    step()
    devices.synchronize(DEVICE)
    spent = time.perf_counter() - start
    model.zero_grad()
    return spent


def kernel_ms(step: Step, model: nn.Module) -> float:
    """Milliseconds of all kernels of a step."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as seen:
        seconds(step, model)
    events = list(seen.events() or ())
    ranges = {one.name for one in events if one.is_user_annotation}  # told of the device, too, with what runs inside
    kernels = (one for one in events if one.device_type != DeviceType.CPU and one.name not in ranges)
    return sum(one.self_device_time_total for one in kernels) / 1e3


def planned_bytes(compiled: csc.CompiledModel) -> int:
    """Of the one rank, without what an optimizer would keep."""
    (rank,) = memory_forecast(compiled.program, compiled.options)
    return rank.total - rank.optimizer


def result_bytes(found: Mapping[str, torch.Tensor]) -> int:
    """Of copies that are kept for comparison."""
    return sum(one.untyped_storage().nbytes() for one in found.values())


def measure(case: Case, names: tuple[str, ...], rounds: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """All rivals of a case; see the module."""
    model, batch = on_device(case)
    model = model.to(dtype)
    batch = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    models: dict[str, nn.Module] = {}
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, float]] = {}
    results = {}
    for name in names:
        gc.collect()  # what the rival before left in cycles
        others = devices.held_memory(DEVICE)
        models[name] = copy.deepcopy(model)
        start = time.perf_counter()
        steps[name], compiled = step_of(name, models[name], batch)
        loss = steps[name]()
        devices.synchronize(DEVICE)
        found[name] = {"first_s": time.perf_counter() - start}
        results[name] = result(models[name], loss)
        found[name]["difference"] = difference(results[names[0]], results[name])
        for _ in range(WARM_UP if name.endswith(RECORDED) else 1):
            seconds(steps[name], models[name])
        devices.watch_memory(DEVICE)
        seconds(steps[name], models[name])
        found[name]["peak_mb"] = (devices.peak_memory(DEVICE) - others - result_bytes(results[name])) / 2**20
        if compiled is not None:
            found[name]["planned_mb"] = planned_bytes(compiled) / 2**20
    rows = [{name: seconds(steps[name], models[name]) for name in turn(names, i)} for i in range(rounds)]
    for name in names:
        found[name]["ms"] = 1e3 * median(row[name] for row in rows)
        found[name]["kernels_ms"] = kernel_ms(steps[name], models[name])
        found[name]["over_eager"] = median(row[name] / row[names[0]] for row in rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sample, of which there are two")
    parser.add_argument("--models", nargs="*", default=["llama", "llava"], choices=("llama", "llava"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=(*RIVALS, SLOW_TO_START))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    names = (EAGER, *(name for name in arguments.rivals if name != EAGER))
    rows = {
        str(case): measure(case, names, arguments.rounds, getattr(torch, arguments.dtype))
        for case in cases(arguments.width, arguments.layers, arguments.tokens)
        if case.model in arguments.models
    }
    if arguments.json:
        print(json.dumps({"device": devices.title(DEVICE), "dtype": arguments.dtype, "rows": rows}, indent=1))
        return
    shown = Table("case", "rival", "ms", "over eager", "kernels ms", "peak MB", "planned MB", "first s", "difference")
    for case, row in rows.items():
        for number, (name, one) in enumerate(row.items()):
            planned = f"{one['planned_mb']:.0f}" if "planned_mb" in one else ""
            shown.add_row(
                "" if number else case, name, f"{one['ms']:.2f}", f"{one['over_eager']:.3f}",
                f"{one['kernels_ms']:.2f}", f"{one['peak_mb']:.0f}", planned, f"{one['first_s']:.1f}",
                f"{one['difference']:.1e}",
            )  # fmt: skip
    Console(width=140).print(shown)


if __name__ == "__main__":
    main()
