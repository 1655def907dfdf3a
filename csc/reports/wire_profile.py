"""What messages, collectives and the runtime itself take on the machine at hand.

Terms
  message   from one process to another, as pipeline ranks send them; collective: everyone gives everyone a part
  host      what the runtime does for an F, B or W and at each end of a message (csc.reports.part_times)

Both are wires with a latency and a bandwidth, from a small and a large size; the fastest tenth counts, as what else the
machine does only ever adds to it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from csc import devices
from csc.analysis.hardware import Wire
from csc.errors import CscError
from csc.installation import own_process
from csc.reports import part_times
from csc.runtime.c10d import Distributed
from csc.runtime.emulated import run

TURNS = 50
SIZES, LARGE = (64, 4 << 20), (64, 256 << 20)  # bytes; GPUs need large ones to reach their bandwidth
LIMIT = 120.0  # seconds after which a process that says nothing is given up


@dataclass(frozen=True)
class WireTimes:
    """message, collective: between two neighbours; None where there is one GPU alone. host: None where kernels are
    queued ahead, so that what the host does takes no time of the device.
    """

    message: Wire | None
    collective: Wire | None
    host: part_times.HostTime | None = None


def measure(device: torch.device) -> WireTimes:
    """A few seconds. CscError if the processes fail."""
    if device.type != "cpu" and devices.count(device) < 2:
        return WireTimes(None, None)
    with tempfile.TemporaryDirectory() as name:
        command = own_process("csc.reports.wire_profile")
        running = [
            subprocess.Popen(
                [*command, str(rank), name, device.type], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=LIMIT)[1] for process in running]
        except subprocess.TimeoutExpired as error:
            raise _failed(f"they did not end within {LIMIT:.0f} s") from error
        finally:
            for process in running:
                process.kill()
                process.wait()
        for process, text in zip(running, outputs):
            if process.returncode:
                raise _failed(text.strip().splitlines()[-1] if text.strip() else "they end without a word")
        wires = json.loads(Path(name, "wires.json").read_text())
    host = part_times.HostTime(*wires["host"]) if wires["host"] is not None else None
    return WireTimes(Wire(*wires["message"]), Wire(*wires["collective"]), host)


def _failed(why: str) -> CscError:
    return CscError(
        f"messages between two processes cannot be measured: {why}",
        "profile",
        "Pass --no-wires to keep the network of the profile that it starts from",
    )


def _rank(rank: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    device, backend = devices.placed(kind, rank, 2)
    sizes = SIZES if device.type == "cpu" else LARGE
    dist.init_process_group(
        backend,
        init_method=f"file://{(folder / 'meeting').resolve()}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LIMIT),
    )
    seconds: dict[str, list[float]] = {"message": [], "collective": []}
    for size in sizes:
        seconds["message"].append(fastest(there_and_back(rank, size, device), device) / 2)
        seconds["collective"].append(fastest(_everyone(size, device), device))
    host = _host(rank, device) if device.type == "cpu" else None
    if rank == 0:
        rows = {name: wire(times, sizes) for name, times in seconds.items()} | {"host": host}
        (folder / "wires.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _host(rank: int, device: torch.device) -> part_times.HostTime:
    program = part_times.calibration(2)
    steps = run(program, Distributed(program.program, device, LIMIT), part_times.STEPS)
    return part_times.taken(program, [traces[rank] for traces in steps])


def wire(times: list[float], sizes: tuple[int, int]) -> Wire:
    """From the seconds of a small and a large message."""
    small, large = times
    return Wire(small, (sizes[1] - sizes[0]) / max(large - small, large / 2))


def there_and_back(rank: int, size: int, device: torch.device) -> Callable[[], None]:
    """A message of so many bytes between ranks 0 and 1."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def turn() -> None:
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)

    return turn


def _everyone(size: int, device: torch.device) -> Callable[[], None]:
    """As csc's collectives run: `size` bytes come to each rank from the other."""
    sent = torch.zeros(2 * size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent)


def fastest(turn: Callable[[], None], device: torch.device) -> float:
    """Seconds of a turn, the fastest tenth of many."""
    times = []
    for _ in range(TURNS):
        devices.synchronize(device)
        start = time.perf_counter()
        turn()
        devices.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[TURNS // 10]


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
