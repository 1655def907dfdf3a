"""A rank that sets its device's clock ahead of each action: what `csc.run --clocks` does of a plan of `csc energy`.

Terms: NVML is the library through which a driver takes such wishes; pynvml is its Python binding. To *lock* a clock is
to tell the device to keep to it; a device is given back as it was found, without a lock, when training ends.

    clock_setter(clocks, device) -> ClockSetter | str         str: why clocks cannot be set here, as a sentence
    ClockSetter.ahead_of(action)                              sets the action's clock, if it is another one
    ClockSetter.close()                                       the device chooses its clocks again

A GPU runs behind the process that launches its work: ahead of a change the process waits until the device has done what
it was given, so that no action runs at the clock of another.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from csc import devices
from csc.errors import installing
from csc.ir.schedule import Action


@dataclass
class ClockSetter:
    """lock: sets the device's clock, in MHz; it raises OSError, or what NVML raises, if it may not. wait: until the
    device has done all that it was given. failed: why no more clocks are set, once setting one has failed.
    """

    clocks: Mapping[Action, int]
    lock: Callable[[int], None]
    unlock: Callable[[], None]
    wait: Callable[[], None]
    tell: Callable[[str], None]
    now: int | None = None
    changes: int = 0
    failed: str = field(default="")

    def ahead_of(self, action: Action) -> None:
        """Training goes on if the clock cannot be set; why is said once."""
        clock = self.clocks.get(action)
        if clock is None or clock == self.now or self.failed:
            return
        self.wait()
        try:
            self.lock(clock)
        except Exception as error:  # whatever NVML's binding raises: training is worth more than its clocks
            self.failed = f"{clock} MHz could not be set: {error}"
            self.tell(f"{self.failed}. Training goes on at the clocks that the device chooses.")
            self.close()
            return
        self.now = clock
        self.changes += 1

    def close(self) -> None:
        """The device chooses its clocks again."""
        if self.now is not None:
            self.now = None
            try:
                self.unlock()
            except Exception as error:
                self.tell(f"the clock could not be given back: {error}. nvidia-smi -rgc does it.")


def clock_setter(
    clocks: Mapping[Action, int], device: torch.device, tell: Callable[[str], None]
) -> ClockSetter | str:  # fmt: skip
    """For the device of this rank. tell: called with a sentence if a clock cannot be set later on."""
    if device.type != "cuda":
        return f"clocks are those of NVIDIA GPUs, and this rank runs on a {device.type}"
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return f"pynvml is not installed: {installing('pynvml')}"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(_uuid(device))
        known = _supported(nvml, handle)
        missing = sorted(set(clocks.values()) - set(known))
        if missing:
            return f"the device has no clock of {', '.join(map(str, missing[:5]))} MHz: plan with its own profile"
        first = next(iter(clocks.values()))
        nvml.nvmlDeviceSetGpuLockedClocks(handle, first, first)
    except Exception as error:  # NVML's own errors, which only its binding knows by type
        return f"NVML refuses: {error}. Setting clocks takes root, or a container with the capability SYS_ADMIN"
    return ClockSetter(
        clocks,
        lambda clock: nvml.nvmlDeviceSetGpuLockedClocks(handle, clock, clock),
        lambda: nvml.nvmlDeviceResetGpuLockedClocks(handle),
        lambda: devices.synchronize(device),
        tell,
        now=first,
    )


def _uuid(device: torch.device) -> str:
    """As NVML writes it: numbers of devices are not the same there when CUDA_VISIBLE_DEVICES hides some."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _supported(nvml: Any, handle: Any) -> list[int]:
    memory = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle))
    return sorted(nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory), reverse=True)
