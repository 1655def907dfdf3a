"""Clocks of devices: the plan of them in a file, and the device that is set to them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from csc import devices
from csc.errors import InputError, MissingPackage
from csc.ir.schedule import Action, Schedule

# --- The clocks of a step as a file: what `csc energy -o` writes and `csc.run --clocks` reads ------------------------
#
# In the file a rank is the list of its computes in their order, each with its clock in MHz: [["F 0 0", 1410], ...].


FORMAT = "csc clocks"
VERSION = 1
REMEDY = "write it with `csc energy TARGET -o clocks.json`, for the plan that is run"


def clocks_document(
    name: str, schedule: Schedule, clocks: Sequence[Sequence[int]], seconds: float, joules: float,
    sources: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """clocks: MHz by rank, of every compute in its order. seconds, joules: of the step with them."""
    computes = ([action for action in actions if action.computes] for actions in schedule.ranks)
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "schedule": schedule.name,
        "seconds": seconds,
        "joules": joules,
        "sources": list(sources),
        "ranks": [
            [[str(a), clock] for a, clock in zip(actions, clocks_of_rank)]
            for actions, clocks_of_rank in zip(computes, clocks)
        ],
    }


def read_clocks(path: Path, schedule: Schedule) -> list[dict[Action, int]]:
    """By rank the clock of each compute. InputError, with the place, for a file that is none, or of another plan."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"these are no clocks: {error}", str(path), REMEDY) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise InputError("these are no clocks", str(path), REMEDY)
    rows = data.get("ranks")
    if not isinstance(rows, list) or len(rows) != len(schedule.ranks):
        count = len(rows) if isinstance(rows, list) else 0
        raise InputError(f"it is for {count} pipeline ranks, the program has {len(schedule.ranks)}", str(path), REMEDY)
    clocks = []
    for rank, (actions, listed) in enumerate(zip(schedule.ranks, rows)):
        computes = [action for action in actions if action.computes]
        clock_of: dict[Action, int] = {}
        if not isinstance(listed, list) or len(listed) != len(computes):
            raise InputError(f"rank {rank} has other actions than the program", str(path), REMEDY)
        for action, row in zip(computes, listed):
            good = isinstance(row, list) and len(row) == 2 and type(row[1]) is int and row[1] > 0
            if not good or row[0] != str(action):
                raise InputError(f"rank {rank} has {row!r} where the program runs '{action}'", str(path), REMEDY)
            clock_of[action] = row[1]
        clocks.append(clock_of)
    return clocks


# --- A rank that sets its device's clock ahead of each action --------------------------------------------------------
#
# It is what `csc.run --clocks` does with a plan of `csc energy`.
#
# Terms: NVML is the library through which a driver takes such wishes; pynvml is its Python binding. To *lock* a clock
# is to tell the device to keep to it; a device is given back as it was found, without a lock, when training ends.
#
# A GPU runs behind the process that launches its work: ahead of a change the process waits until the device has done
# what it was given, so that no action runs at the clock of another.


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


class NvmlDevice:
    """One GPU as NVML sees it.

    Raises MissingPackage without pynvml, and whatever NVML raises: its binding alone knows its errors by type.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError as error:
            missing = MissingPackage.of(error, "NVML")
            raise missing or error from error
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(devices.uuid(device))
        self._device = device

    @property
    def supported(self) -> list[int]:
        """Clocks in MHz at the highest memory clock, the highest first."""
        memory = max(self._nvml.nvmlDeviceGetSupportedMemoryClocks(self._handle))
        return sorted(self._nvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle, memory), reverse=True)

    @property
    def clock(self) -> int:
        """What it runs at now, in MHz."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    @property
    def joules(self) -> float:
        """Since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def lock(self, clock: int) -> None:
        """Keep to this clock."""
        self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, clock, clock)

    def unlock(self) -> None:
        """Choose its clocks itself again."""
        self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)

    def wait(self) -> None:
        """Until it has done all that it was given."""
        devices.synchronize(self._device)


RIGHTS = "Setting clocks takes root, or a container with the capability SYS_ADMIN"


def clock_setter(
    clocks: Mapping[Action, int], device: torch.device, tell: Callable[[str], None]
) -> ClockSetter | str:  # fmt: skip
    """For the device of this rank. tell: called with a sentence if a clock cannot be set later on."""
    if devices.uuid(device) is None:
        return f"clocks are those of NVIDIA GPUs, and this rank runs on a {device.type}"
    try:
        gpu = NvmlDevice(device)
        missing = sorted(set(clocks.values()) - set(gpu.supported))
        if missing:
            return f"the device has no clock of {', '.join(map(str, missing[:5]))} MHz: plan with its own profile"
        first = next(iter(clocks.values()))
        gpu.lock(first)
    except MissingPackage as error:
        return f"{error.what}: {error.remedy}"
    except Exception as error:
        return f"NVML refuses: {error}. {RIGHTS}"
    return ClockSetter(clocks, gpu.lock, gpu.unlock, gpu.wait, tell, now=first)
