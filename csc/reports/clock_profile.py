"""`csc profile --clocks`: what forwards and backwards take at each clock of the GPU at hand, in seconds and joules.

Terms: see csc.analysis.clocks. Each part of each variant runs for a while at a locked clock, as NVML's counter of
joules moves in steps of some 20 ms; a forward's figures are the sums over the parts of all regions, a backward's those
of B and W.

    clock_profile(run, device, source, clocks, seconds) -> ClockProfile
    parts(program, model, batch, fuse) -> run            run(measure): calls measure(kind, regions, call) for every part
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from csc.analysis.clocks import ClockProfile, relative
from csc.errors import InputError
from csc.ir.program import Program
from csc.reports.part_functions import PartFunction, Role
from csc.reports.part_times import whole_step
from csc.runtime.clocks import RIGHTS

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
    found = {"F": (0.0, 0.0), "B": (0.0, 0.0)}

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
        total, spent = found[kind]
        found[kind] = (total + regions * seconds / times, spent + regions * joules / times)

    run(measure)
    return found


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
