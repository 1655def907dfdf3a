"""Devices: named in one file; on the CPU what torch itself says; what a machine without a GPU answers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csc import devices
from csc.errors import InputError
from csc.runtime.parameters import refuse_elsewhere

ROOT = Path(__file__).parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = re.compile(r"(?i:cuda)(?![ _-]graphs)|nccl|Backend\.NCCL")  # which are called as torch's users call them


def test_devices_are_named_in_one_file() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("csc", "passes", "codegen", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != ROOT / "csc/devices.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMES.search(line)
    ]
    assert not found, "ask csc.devices instead:\n" + "\n".join(found)


def test_the_cpu() -> None:
    before = torch.get_rng_state()
    assert torch.equal(devices.generator(CPU), before)
    with devices.forked(CPU):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    devices.set_generator(CPU, before)
    assert torch.equal(torch.rand(3), drawn)
    with devices.at(CPU), devices.stream():
        devices.synchronize(CPU)
    assert not devices.is_recording(CPU)
    assert devices.present(CPU, "here") == CPU and devices.placed("cpu", 1, 2) == (CPU, "gloo")
    assert devices.title(CPU) == devices.profile("cpu") == "cpu" and devices.capability(CPU) is None
    assert devices.memory(CPU) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for backends in ("cpu:gloo", "cpu:gloo,cuda:nccl"):
        assert devices.wire(CPU, backends) == devices.meeting_place(backends) == CPU
    assert not devices.aborts("gloo") and devices.aborts("nccl")


class Module:
    """What csc asks of torch.TYPE, for a machine with so many devices."""

    def __init__(self, count: int) -> None:
        self.count, self.on = count, 0

    def is_available(self) -> bool:
        return self.count > 0

    def is_initialized(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.on

    def set_device(self, device: torch.device) -> None:
        self.on = device.index

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=7 << 30)


def machine(monkeypatch: pytest.MonkeyPatch, count: int, backend: bool = True) -> Module:
    module = Module(count)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: backend)
    return module


class Streams(Module):
    """And of what torch.TYPE records graphs with. told: in order, what was asked of it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.told: list[str] = []
        self.stream_now = self.main = self._stream("main")
        self.fails = False

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.told.append(f"{name} waits for {other.name}"),
            synchronize=lambda: self.told.append(f"the host waits for {name}"),
        )  # fmt: skip

    def Stream(self, device: torch.device) -> Any:
        return self._stream("beside")

    def current_stream(self, device: torch.device | None = None) -> Any:
        return self.stream_now

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Any:
        def begin(pool: str, capture_error_mode: str) -> None:
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            self.told.append(f"begins on {self.stream_now.name}")

        def end() -> None:
            self.told.append("ends")
            if self.fails:
                raise RuntimeError("operation failed due to a previous error during capture")

        return SimpleNamespace(
            capture_begin=begin, capture_end=end, replay=lambda: self.told.append(f"launched on {self.stream_now.name}")
        )


def test_graphs_are_recorded_beside_and_launched_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up on the stream of the capture, in a pool; back after an error. Nothing waits for the whole device: on it
    a receive may be under way that ends once another rank has what is computed here.
    """
    module = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    graphs = devices.graphs(torch.device("cuda", 0))
    assert graphs is not None
    seen: list[str] = []
    graphs.warm(lambda: seen.append(module.stream_now.name))
    assert module.told == ["beside waits for main", "main waits for beside"] and module.stream_now is module.main
    pool = graphs.pool()
    assert pool[0] == "pool" and module.told[2:] == ["begins on beside", "ends"], "an empty recording keeps a pool"
    module.told.clear()
    launch, made = graphs.record(lambda: seen.append(module.stream_now.name) or 7, pool)
    launch()
    assert (made, seen) == (7, ["beside", "beside"])
    graphs.finish()
    assert module.told == ["begins on beside", "ends", "launched on main", "the host waits for main"]
    module.fails = True

    def fail() -> None:
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        graphs.record(fail, pool)
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.record(lambda: None, pool)
    assert module.told[-2:] == ["begins on beside", "ends"] and module.stream_now is module.main
    assert devices.graphs(CPU) is None


def test_a_thread_works_on_the_stream_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with module.stream("side"):
        stream = devices.stream()
    with stream:
        assert module.stream_now == "side"
    assert module.stream_now is module.main


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_machine_without_the_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    machine(monkeypatch, 0)
    assert devices.default() == CPU and devices.current() is None
    said = "the program is for CUDA, and there is no CUDA device here"
    with pytest.raises(InputError, match=said):
        devices.present(torch.device(device), "here")
    with pytest.raises(InputError, match=said):
        devices.placed(device, 0, 1)


def test_processes_of_a_machine_with_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    module = machine(monkeypatch, 2)
    assert devices.placed("cuda", 1, 2) == (torch.device("cuda", 1), "nccl") and module.on == 1
    assert devices.placed("cuda", 2, 3) == (torch.device("cuda", 0), "gloo"), "they share devices"
    assert devices.default() == GPU and devices.current() == torch.device("cuda", 0)
    module.set_device(torch.device("cuda", 1))
    assert devices.present(GPU, "here") == devices.current() == torch.device("cuda", 1)
    assert devices.present(torch.device("cuda", 0), "here").index == 0
    assert devices.memory(GPU) == 7 << 30 and devices.profile("cuda") == "h100"
    assert devices.wire(GPU, "cuda:nccl") == GPU and devices.wire(GPU, "cpu:gloo") == CPU
    assert devices.meeting_place("cuda:nccl") == torch.device("cuda", 1)
    assert devices.meeting_place("cpu:gloo,cuda:nccl") == CPU


def test_a_machine_whose_torch_lacks_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2, backend=False)
    assert devices.placed("cuda", 0, 2) == (torch.device("cuda", 0), "gloo")


def test_modules_of_torch_have_what_is_asked() -> None:
    """The names that docs/devices.md lists are those that csc calls, and torch has them, GPU or not."""
    text = (ROOT / "docs/devices.md").read_text()
    asked = re.findall(r"`(\w+)`", text[text.index("needs what csc calls") : text.index("Where one is absent")])
    assert len(asked) > 10
    for one in devices.ACCELERATORS:
        assert [name for name in asked if name != "total_memory" and not hasattr(one.module, name)] == []
        assert [name for name in one.asked if not hasattr(one.module, name)] == []
    used = set(re.findall(r"\.module\.(\w+)", (ROOT / "csc/devices.py").read_text()))
    assert used == set(asked) - {"total_memory"}


def test_parameters_on_another_device_of_the_machine_are_refused() -> None:
    """As of a rank whose model was made on the first GPU. No data: these tensors have none."""
    from csc.torch_private.traces import FakeTensorMode

    with FakeTensorMode():
        values = {"a": torch.empty(2), "b": torch.empty(2, device="cuda:1")}
    refuse_elsewhere(values, torch.device("cuda:1"))
    refuse_elsewhere({"a": torch.empty(2, device="meta")}, torch.device("cuda:0"))
    with pytest.raises(InputError, match="parameter 'b' is on cuda:1, and this process works on cuda:0"):
        refuse_elsewhere(values, torch.device("cuda:0"))
