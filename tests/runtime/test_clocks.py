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
from csc.runtime.clock_file import clocks_document, read_clocks
from csc.runtime.clock_setter import ClockSetter, clock_setter

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
