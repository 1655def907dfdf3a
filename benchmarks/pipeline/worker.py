"""The processes of the measured part: one for each rank, over gloo, all on this machine.

    python -m benchmarks.pipeline.worker JOBS RANKS RESULTS

JOBS is a file of JSON, a list of jobs (see benchmarks.pipeline.emulated_ranks); RESULTS a directory in which
result_I.json appears as soon as job I is done. The ranks are forked after the imports, which would take longer than the
runs. A rank that fails writes error_RANK.txt and ends, and with it the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.pipeline.torch_emulated import Span, prepare
from benchmarks.pipeline.torch_gradients import check
from csc.ir.schedule import parse
from csc.reports import part_times
from csc.reports.wire_profile import SIZES, fastest, there_and_back, wire
from csc.runtime.c10d import Distributed
from csc.runtime.emulated import emulated, run
from csc.simulation.pipeline import from_json

TIMEOUT = timedelta(seconds=120)
CPU = torch.device("cpu")
FIRST = 0.1  # of their time, that waits take in a first step


def main() -> None:
    jobs, ranks, results = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    multiprocessing.start_processes(
        _rank, args=(json.loads(jobs.read_text()), ranks, results), nprocs=ranks, start_method="fork"
    )


def _rank(rank: int, jobs: list[dict[str, Any]], ranks: int, results: Path) -> None:
    try:
        meeting = f"file://{results.resolve()}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=TIMEOUT)
        for number, job in enumerate(jobs):
            found = KINDS[job["kind"]](job, rank, ranks)
            if rank == 0:
                partial = results / "partial.json"
                partial.write_text(json.dumps(found))
                partial.rename(results / f"result_{number}.json")
        dist.barrier()
    except Exception:
        (results / f"error_{rank}.txt").write_text(f"{time.perf_counter()}\n{traceback.format_exc()}")
        os._exit(1)  # the destructors of a broken group would wait for the others
    os._exit(0)


def _csc(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Steps of csc's own runtime."""
    program = emulated(from_json(job["pipeline"]), parse(job["schedule"]))
    transport = Distributed(program.program, CPU, TIMEOUT.total_seconds())

    def step(factor: float) -> list[Span]:
        (traces,) = run(program, transport, factor=factor)
        return [(timed.start, timed.end) for timed in traces[rank] if timed.action.computes]

    return _steps(step, job["steps"], ranks)


def _torch(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Steps of torch's runtime."""
    pipeline = from_json(job["pipeline"])
    return _steps(prepare(job["name"], pipeline, job["microbatches"], rank, ranks), job["steps"], ranks)


def _steps(step: Callable[[float], list[Span]], count: int, ranks: int) -> dict[str, Any]:
    """Seconds from the first start of a compute on any rank to the last end, by step. One more step comes first, with
    short waits, and is not counted. The clock is one for all processes of a machine.

    step(factor): with all waits multiplied by it.
    """
    makespans, busy = [], []
    for factor in (FIRST, *[1.0] * count):
        dist.barrier()
        spans = step(factor)
        ends = torch.tensor(
            [min(start for start, _ in spans), max(end for _, end in spans), sum(end - start for start, end in spans)],
            dtype=torch.float64,
        )
        rows = [torch.empty_like(ends) for _ in range(ranks)]
        dist.all_gather(rows, ends)
        makespans.append(float(max(row[1] for row in rows) - min(row[0] for row in rows)))
        busy.append([float(row[2]) for row in rows])
    return {"makespans": makespans[1:], "busy": busy[-1]}


def _link(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Between ranks 0 and 1."""
    seconds = []
    for size in SIZES:
        dist.barrier()
        if rank < 2:
            seconds.append(fastest(there_and_back(rank, size, CPU), CPU) / 2)
    return wire(seconds, SIZES)._asdict() if rank < 2 else {}


def _gradients(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    return check(job["name"], rank, ranks)


def _host(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """What csc's runtime takes for an action and for an end of a message, and what of that and of all else the process
    computes, of a processor, for each of these: the median of the ranks.
    """
    program = part_times.calibration(ranks, job["size"], job["wait"])
    transport = Distributed(program.program, CPU, TIMEOUT.total_seconds())
    first = run(program, transport)
    start = time.process_time()
    steps = run(program, transport, part_times.STEPS - 1)
    processor = (time.process_time() - start) / sum(len(traces[rank]) for traces in steps)
    taken = part_times.taken(program, [traces[rank] for traces in [*first, *steps]])
    own = torch.tensor([*taken, processor], dtype=torch.float64)
    rows = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(rows, own)
    return dict(zip(("action", "handling", "processor"), torch.stack(rows).median(dim=0).values.tolist()))


KINDS = {"csc": _csc, "host": _host, "torch": _torch, "link": _link, "gradients": _gradients}

if __name__ == "__main__":
    main()
