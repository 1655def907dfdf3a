"""What a rank takes to start: host memory at its peak, and seconds, for shards of several sizes.

python -m benchmarks.startup [--json] [--sizes 24 96 384]

Terms: the *shard* of a rank is its parameters as they are stored. *Growth* is how much more memory the process holds at
its peak than after its imports and the meeting of the process group, *anon* how much more memory of its own (no pages
of mapped files) when it has started. The kernel counts both; nothing has to look at the right moment, and what
imports have freed is given back before, so that neither depends on it.

A model of equal layers is compiled for PP pipeline ranks; its weights are random numbers in one safetensors file. Real
processes (torchrun, gloo) then start: each loads the program and its own slices of the file, as `csc.run --weights`
does ("file"), or makes parameters of a model on the meta device and loads them, as `compiled.load` does ("meta").
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import csc
from csc import cores
from csc.runtime.c10d import Distributed
from csc.runtime.launch import setup_distributed
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer

PP = 4
LAYERS = 3  # a rank
MIB = 2**20


@dataclass(frozen=True)
class Start:
    """One rank's start. Sizes in bytes."""

    rank: int
    weights: str  # "file" or "meta"
    shard: int
    growth: int
    anon: int
    seconds: float


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.utils.skip_init(nn.Linear, width, width, bias=False)
        self.down = nn.utils.skip_init(nn.Linear, width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.silu(self.up(hidden)))


class Stack(nn.Module):
    """Equal layers of two square matrices each, so that all ranks hold the same."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def width_for(megabytes: float) -> int:
    """The width at which a rank's float32 parameters take about so many MiB."""
    return int((megabytes * MIB / 4 / (2 * LAYERS)) ** 0.5)


def prepare(directory: Path, megabytes: float, pp: int = PP) -> None:
    """Compile the model for shards of this size and write its weights: DIR/program, DIR/model.safetensors."""
    width = width_for(megabytes)
    model = Stack(width, LAYERS * pp)
    cuts = [f"layers.{LAYERS * position}" for position in range(1, pp)]
    compiled = csc.compile(model, mesh={"pp": pp}, cuts=cuts, schedule="1f1b", example={"x": torch.randn(2, width)})
    compiled.write(directory / "program")
    values = torch.randn(width, width)
    save_file(
        {name: values.roll(number) for number, (name, _) in enumerate(model.named_parameters())},
        directory / "model.safetensors",
    )


def measure(directory: Path, pp: int = PP) -> list[Start]:
    """Start the ranks, once in each way, as processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pp)]
    command += ["-m", "benchmarks.startup", "--worker", str(directory)]
    found = []
    for weights in ("file", "meta"):
        done = subprocess.run([*command, weights], env=cores.environment(), capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        rows = [json.loads((directory / f"{weights}-{rank}.json").read_text()) for rank in range(pp)]
        found += [Start(**row) for row in rows]
    return found


def start(directory: Path, weights: str) -> None:
    """One rank: start, and write down what it took."""
    launch = setup_distributed()
    (width,) = {spec.shape[0] for spec in load(directory / "program").manifest.parameters}
    with torch.device("meta"):  # its imports are not to be measured
        model = Stack(width, LAYERS * launch.world)
    _settle()
    own, resident = _own(), _status("VmRSS")
    begin = time.perf_counter()
    program = load(directory / "program", [launch.rank])
    transport = Distributed(program, launch.device)
    if weights == "file":
        trainer = Trainer(program, directory / "model.safetensors", transport)
    else:
        trainer = Trainer(program, dict(model.named_parameters()), transport)
        trainer.load(directory / "model.safetensors")
    found = Start(
        launch.rank,
        weights,
        seconds=time.perf_counter() - begin,
        shard=sum(tensor.nbytes for tensor in trainer.state_dict().values()),
        growth=_status("VmHWM") - resident,
        anon=_own() - own,
    )
    (directory / f"{weights}-{launch.rank}.json").write_text(json.dumps(asdict(found)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _settle() -> None:
    """Give freed memory back, and let the peak begin at what is held now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """Bytes by a name of /proc/self/status."""
    return _bytes("/proc/self/status", name)


def _own() -> int:
    """Bytes of memory that belongs to no file, counted page by page."""
    return _bytes("/proc/self/smaps_rollup", "Anonymous")


def _bytes(file: str, name: str) -> int:
    (line,) = (line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="What a rank takes to start.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--sizes", type=float, nargs="+", default=[24.0, 96.0, 384.0], help="MiB of a rank's shard")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        start(Path(given.worker[0]), given.worker[1])
        return
    if not given.json:
        print(f"{PP} ranks; the most of any of them, MiB\n shard  weights  growth  - shard    anon  seconds")
    for size in given.sizes:
        with tempfile.TemporaryDirectory(prefix="csc-startup-") as directory:
            prepare(Path(directory), size)
            found = measure(Path(directory))
        for row in found if given.json else []:
            print(json.dumps(asdict(row)))
        for weights in () if given.json else ("file", "meta"):
            rows = [row for row in found if row.weights == weights]
            most = [max(getattr(row, name) for row in rows) / MIB for name in ("shard", "growth", "anon")]
            shard, growth, anon = (f"{size:6.1f}" for size in most)
            seconds = max(row.seconds for row in rows)
            print(f"{shard}  {weights:7}  {growth}  {most[1] - most[0]:7.1f}  {anon}  {seconds:7.2f}")


if __name__ == "__main__":
    main()
