"""Would CUDA graphs pay? Each function of a program launched as it is, and replayed: python -m benchmarks.gpu.graphs

Of every F, B and W of the LLaVA (benchmarks.gpu.model), with the values that a step gives it: milliseconds from an idle
device until it is idle again, launched and replayed, those of copying what comes into the graph's own tensors, and
whether the results have the same bits. What cannot be captured says why. csc has no CUDA graphs until this has run: a
graph spares launches, and takes copies and a memory pool of its own for each microbatch in flight.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

import csc
from benchmarks.gpu.model import DEVICE, LLAVA, on_device
from csc import devices
from csc.analysis.exchanges import exchange
from csc.analysis.operators.randomness import draws
from csc.capture.batch import split_batch
from csc.ir import graph as g
from csc.reports.part_functions import PartFunction, Role
from csc.reports.part_times import whole_step
from csc.reports.varied_sizes import sampler
from csc.runtime.flat_tensors import tensors_of

PARTS = ("F", "B", "W")
TIMES, WARM_UP = 30, 3


@dataclass(frozen=True)
class GraphRow:
    """One function. refused: why it is not captured; else milliseconds, and whether bits are the same."""

    name: str
    calls: int
    refused: str = ""
    launched: float = 0.0
    replayed: float = 0.0
    copied: float = 0.0
    same: bool = True


def refused(graph: fx.Graph) -> str:
    """Why a function is not to be captured; empty if nothing speaks against it."""
    for node in g.calls(graph):
        name = g.op_name(node)
        if draws(node):
            return f"{name}: a replay would draw the same numbers again"
        if exchange(node) is not None:
            return f"{name}: it meets other ranks"
        if name.startswith("csc::opaque"):
            return f"{name}: it runs code of the model's own"
    return ""


def milliseconds(run: Callable[[], Any]) -> float:
    """Of one run, from an idle device until it is idle again, on average."""
    devices.synchronize(DEVICE)
    start = time.perf_counter()
    for _ in range(TIMES):
        run()
    devices.synchronize(DEVICE)
    return 1e3 * (time.perf_counter() - start) / TIMES


def replayed(name: str, calls: int, function: PartFunction, given: Sequence[torch.Tensor]) -> GraphRow:
    """Capture the function after a warm-up, replay it on copies of what is given, compare and time."""
    elsewhere = [one for one in given if one.device.type != DEVICE.type]
    if elsewhere:
        return GraphRow(name, calls, "it is given tensors of the CPU")
    own = [one.clone() for one in given]  # the graph reads these places
    expected = tensors_of(function.call(*given))
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            function.call(*own)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):  # in a pool of its own
            made = tensors_of(function.call(*own))
    except RuntimeError as error:  # a kernel that waits for the host
        return GraphRow(name, calls, str(error).partition("\n")[0][:80])
    graph.replay()
    same = all(map(torch.equal, made, expected))
    return GraphRow(
        name, calls, "", milliseconds(lambda: function.call(*given)), milliseconds(graph.replay),
        milliseconds(lambda: [place.copy_(one) for place, one in zip(own, given)]), same,
    )  # fmt: skip


def shown(rows: Sequence[GraphRow], runs: Mapping[str, int]) -> Table:
    """With the sum of a step below. runs: how often a step calls each function."""
    table = Table("function", "calls", "launched, ms", "replayed", "copies", "same bits")
    for row in rows:
        figures = (f"{row.launched:.3f}", f"{row.replayed:.3f}", f"{row.copied:.3f}", "yes" if row.same else "NO")
        table.add_row(row.name, str(row.calls), *((row.refused, "", "", "") if row.refused else figures))
    taken = [row for row in rows if not row.refused]
    sums = [sum(runs[row.name] * getattr(row, one) for row in taken) for one in ("launched", "replayed", "copied")]
    table.add_row(f"a step: {len(taken)} of {len(rows)}", "", *(f"{one:.3f}" for one in sums), "")
    return table


@torch.no_grad()
def measured(fuse: bool) -> tuple[list[GraphRow], dict[str, int]]:
    """Every function of the program once, and how often a step calls it."""
    model, batch = on_device(LLAVA)
    source = sampler(csc.compile(model, example=batch, check=False, fuse=fuse))
    program, tensors = source.program(), split_batch(source.microbatch)[0]
    rows: dict[str, GraphRow] = {}
    runs: dict[str, int] = {}

    def call(key: tuple[str, int], function: PartFunction, values: Mapping[Role, torch.Tensor]) -> Any:
        name = f"{key[0]} {PARTS[key[1]]}"
        runs[name] = runs.get(name, 0) + 1
        given = [values[role] for role in function.roles]
        if name not in rows:
            variant = program.variants[key[0]]
            graph = (variant.forward, variant.backward_input, variant.backward_weight)[key[1]]
            assert graph is not None
            calls, why = len(list(g.calls(graph))), refused(graph)
            rows[name] = GraphRow(name, calls, why) if why else replayed(name, calls, function, given)
        return function.call(*given)

    whole_step(program, model, tensors, fuse)(call)
    return list(rows.values()), runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuse", action="store_true", help="functions as Inductor compiles them")
    arguments = parser.parse_args()
    if DEVICE.type != "cuda":
        print("CUDA graphs take a CUDA device; there is none here")
        return
    rows, runs = measured(arguments.fuse)
    Console(width=140).print(shown(rows, runs))
    if not all(row.same for row in rows):
        raise SystemExit("replayed functions have other bits than launched ones")


if __name__ == "__main__":
    main()
