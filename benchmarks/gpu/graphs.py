"""Steps with cuda_graphs=True beside steps that launch each kernel: python -m benchmarks.gpu.graphs

Of the LLaVA (benchmarks.gpu.model) on one stage and on two, with B and W apart and as one: whether loss and every
gradient have the same bits, milliseconds of a step from an idle device until it is idle again, the most memory, the
seconds that recording took, and which parts are recorded; what runs as it is says why. Exit code 1 if bits differ.
Where the device has no graphs it says what would be recorded.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import csc
from benchmarks.gpu.model import DEVICE, LLAVA, Batch, on_device
from csc import devices
from csc.analysis.unfit_parts import unfit_parts
from csc.runtime.graphed_stage import MET, GraphRow

MESHES = (("pp=1", "1f1b"), ("pp=2", "1f1b"), ("pp=2", "zb-h1"))
MICROBATCHES = 2
ROUNDS = 20
WARM_UP = 2 * MET // MICROBATCHES  # steps, after which all is recorded


@dataclass(frozen=True)
class Measured:
    """ms: of a step. peak: bytes, without what was there before. first: seconds of the first steps."""

    ms: float
    peak: int
    first: float
    result: dict[str, torch.Tensor]
    rows: tuple[GraphRow, ...]


def measured(model: nn.Module, batch: Batch, mesh: str, schedule: str, graphs: bool, rounds: int) -> Measured:
    """Of steps on the same batch, without an optimizer."""
    before = devices.held_memory(DEVICE)
    compiled = csc.compile(
        copy.deepcopy(model), mesh=mesh, schedule=schedule, example=batch, microbatches=MICROBATCHES, check=False,
        cuda_graphs=graphs,
    )  # fmt: skip
    start = time.perf_counter()
    for _ in range(WARM_UP):
        compiled.train_step(batch)
        compiled.model.zero_grad()
    devices.synchronize(DEVICE)
    first, spent = time.perf_counter() - start, []
    devices.watch_memory(DEVICE)
    for _ in range(rounds):
        compiled.model.zero_grad()
        devices.synchronize(DEVICE)
        start = time.perf_counter()
        loss = compiled.train_step(batch)
        devices.synchronize(DEVICE)
        spent.append(time.perf_counter() - start)
    peak = devices.peak_memory(DEVICE) - before
    result = {name: p.grad for name, p in compiled.model.named_parameters() if p.grad is not None} | {"loss": loss}
    rows = [row for trainer in compiled._programs.trainers for row in trainer.graphs.rows()]
    return Measured(1e3 * median(spent), peak, first, result, tuple(rows))


def differing(one: Measured, other: Measured) -> list[str]:
    """The names of what has other bits."""
    names = {**one.result, **other.result}
    both = {name for name in names if name in one.result and name in other.result}
    return [name for name in names if name not in both or not torch.equal(one.result[name], other.result[name])]


def told(rows: tuple[GraphRow, ...]) -> str:
    """What is recorded, and what is not."""
    recorded = [f"{row.part} {row.stage} x{row.instances}" for row in rows if row.instances]
    refused = [f"{row.part} {row.stage}: {row.why}" for row in rows if row.why]
    return "; ".join([" ".join(recorded) or "nothing", *refused])


def foreseen(model: nn.Module, batch: Batch, mesh: str) -> str:
    """What speaks against recording, as the graphs tell it."""
    compiled = csc.compile(model, mesh=mesh, example=batch, microbatches=MICROBATCHES, check=False)
    found = [
        f"{part.part} of stage {part.stage}: {part.why}"
        for part in unfit_parts(compiled.program, compiled.options.mesh)
    ]
    return "; ".join(found) or f"all {len(compiled.program.stages)} stages"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    model, batch = on_device(LLAVA)
    if devices.graphs(DEVICE) is None:
        print(f"a device of type {DEVICE.type} records nothing; on one with graphs these would be recorded:")
        for mesh in dict(MESHES):
            print(f"  {mesh}: {foreseen(model, batch, mesh)}")
        return
    shown = Table("mesh", "schedule", "", "ms", "peak MB", "first steps, s", "same bits", "recorded")
    wrong = []
    for mesh, schedule in MESHES:
        plain, graphs = (measured(model, batch, mesh, schedule, one, arguments.rounds) for one in (False, True))
        names = differing(plain, graphs)
        wrong += names
        for what, one in (("launched", plain), ("recorded", graphs)):
            bits = "" if one is plain else "NO: " + ", ".join(names[:3]) if names else "yes"
            figures = (f"{one.ms:.2f}", f"{one.peak / 2**20:.0f}", f"{one.first:.1f}")
            shown.add_row(mesh, schedule, what, *figures, bits, told(one.rows) if one is graphs else "")
    Console(width=160).print(shown)
    if wrong:
        raise SystemExit("recorded steps have other bits than launched ones")


if __name__ == "__main__":
    main()
