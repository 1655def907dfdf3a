"""The clocks of a plan as a file, and what sets them ahead of each action, with an NVML that is made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from csc.errors import InputError
from csc.ir.schedule import Action, parse
from csc.reports.profiling import clock_profile, spread
from csc.runtime.clocks import ClockSetter, clock_setter, clocks_document, read_clocks

SCHEDULE = parse("# small\nrank 0: F 0 0 | B 0 0 | W 0 0 | REDUCE\nrank 1: F 1 0 | BW 1 0 | REDUCE")
CLOCKS = [[1410, 1200, 1200], [1300, 1410]]


def written(path: Path, **changes: object) -> Path:
    document = clocks_document("model", SCHEDULE, CLOCKS, 1.0, 2.0, ["a test"]) | changes
    path.write_text(json.dumps(document))
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = read_clocks(written(tmp_path / "c.json"), SCHEDULE)
    assert found == [
        {Action("F", 0, 0): 1410, Action("B", 0, 0): 1200, Action("W", 0, 0): 1200},
        {Action("F", 1, 0): 1300, Action("BW", 1, 0): 1410},
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "csc timeline"}, "these are no clocks"),
        ({"ranks": []}, "it is for 0 pipeline ranks, the program has 2"),
        ({"ranks": [[["F 0 0", 1]], []]}, "rank 0 has other actions"),
        ({"ranks": [[["F 0 0", 1], ["W 0 0", 1], ["B 0 0", 1]], []]}, "where the program runs 'B 0 0'"),
        ({"ranks": [[["F 0 0", 1.5], ["B 0 0", 1], ["W 0 0", 1]], []]}, r"has \['F 0 0', 1.5\] where"),
    ],
)
def test_refuses_files_of_other_plans(tmp_path: Path, changes, message) -> None:
    with pytest.raises(InputError, match=message):
        read_clocks(written(tmp_path / "c.json", **changes), SCHEDULE)
    with pytest.raises(InputError, match="these are no clocks"):
        read_clocks(tmp_path / "none.json", SCHEDULE)


def setter(lock, said: list[str], log: list[object]) -> ClockSetter:
    clocks = {Action("F", 0, 0): 1410, Action("B", 0, 0): 1200, Action("W", 0, 0): 1200}
    return ClockSetter(clocks, lock, lambda: log.append("unlock"), lambda: log.append("wait"), said.append)


def test_a_clock_is_set_where_it_changes_and_given_back() -> None:
    log: list[object] = []
    found = setter(log.append, [], log)
    for kind in ("F", "B", "W"):
        found.ahead_of(Action(kind, 0, 0))
    found.close()
    found.close()
    assert log == ["wait", 1410, "wait", 1200, "unlock"]
    assert found.changes == 2


def test_training_goes_on_when_a_clock_cannot_be_set() -> None:
    said: list[str] = []
    log: list[object] = []

    def lock(clock: int) -> None:
        if clock == 1200:
            raise OSError("Insufficient Permissions")

    found = setter(lock, said, log)
    for kind in ("F", "B", "W"):
        found.ahead_of(Action(kind, 0, 0))
    (sentence,) = said
    assert "1200 MHz could not be set: Insufficient Permissions. Training goes on" in sentence
    assert log.count("unlock") == 1


def test_says_why_clocks_cannot_be_set(monkeypatch) -> None:
    clocks = {Action("F", 0, 0): 1410}
    assert "this rank runs on a cpu" in str(clock_setter(clocks, torch.device("cpu"), print))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    assert "pynvml is not installed: pip install" in str(clock_setter(clocks, torch.device("cuda"), print))


def test_asks_nvml_for_the_clocks_of_this_device(monkeypatch) -> None:
    log: list[object] = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetSupportedMemoryClocks=lambda handle: [1593, 810],
        nvmlDeviceGetSupportedGraphicsClocks=lambda handle, memory: [1410, 1200],
        nvmlDeviceSetGpuLockedClocks=lambda handle, low, high: log.append((handle, low, high)),
        nvmlDeviceResetGpuLockedClocks=lambda handle: log.append("reset"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr("csc.devices.synchronize", lambda device: None)
    device = torch.device("cuda", 0)
    found = clock_setter({Action("F", 0, 0): 1410, Action("B", 0, 0): 1200}, device, print)
    assert isinstance(found, ClockSetter)
    found.ahead_of(Action("F", 0, 0))
    found.ahead_of(Action("B", 0, 0))
    found.close()
    assert log == [("GPU-abc", 1410, 1410), ("GPU-abc", 1200, 1200), "reset"]
    assert "no clock of 1000 MHz" in str(clock_setter({Action("F", 0, 0): 1000}, device, print))

    def refused(handle, low, high) -> None:
        raise OSError("Insufficient Permissions")

    nvml.nvmlDeviceSetGpuLockedClocks = refused
    assert "NVML refuses: Insufficient Permissions" in str(clock_setter({Action("F", 0, 0): 1410}, device, print))


class FakeGpu:
    """Its clock is also that of the test: time passes as it works, and power rises with the cube of its clock."""

    def __init__(self, allowed: bool = True) -> None:
        self.supported, self.clock, self.allowed = [1400, 1300, 1200, 1100, 1000, 500], 1400, allowed
        self.joules, self.now, self.log = 0.0, 0.0, []

    def pass_time(self, seconds: float, watts: float = 50.0) -> None:
        self.now += seconds
        self.joules += watts * seconds

    def lock(self, clock: int) -> None:
        if not self.allowed:
            raise OSError("Insufficient Permissions")
        self.clock = clock
        self.log.append(clock)

    def unlock(self) -> None:
        self.log.append("unlock")

    def wait(self) -> None:
        self.pass_time(1e-6)

    def work(self) -> None:
        self.pass_time(0.002 * 1400 / self.clock, 100.0 + 300.0 * (self.clock / 1400) ** 3)


def test_clocks_are_measured_and_given_back(monkeypatch) -> None:
    gpu = FakeGpu()
    time = SimpleNamespace(perf_counter=lambda: gpu.now, sleep=gpu.pass_time)
    monkeypatch.setattr("csc.reports.profiling.time", time)

    def run(measure) -> None:
        measure("F", 3, gpu.work)
        measure("B", 3, gpu.work)
        measure("B", 3, gpu.work)

    found = clock_profile(run, gpu, "a test", window=0.02)
    assert [setting.clock for setting in found.forward.settings] == [1400, 1300, 1200, 1100, 1000]
    assert found.forward.at(1000).seconds == pytest.approx(1.4, rel=1e-3)
    assert found.forward.highest.watts == pytest.approx(400.0, rel=1e-2)
    assert found.backward.at(1000).watts == pytest.approx(100 + 300 * (1000 / 1400) ** 3, rel=1e-2)
    assert found.waiting == pytest.approx(50.0)
    assert found.change_seconds == 0.0
    assert gpu.log[-1] == "unlock"
    with pytest.raises(InputError, match="the clock of the GPU cannot be set: Insufficient Permissions"):
        clock_profile(run, FakeGpu(allowed=False), "a test")


def test_measured_clocks_are_evenly_spaced() -> None:
    assert spread(list(range(1410, 200, -15)), 20)[:3] == [1410, 1380, 1350]
    with pytest.raises(InputError, match="1 clock that can be set"):
        spread([1400], 20)
