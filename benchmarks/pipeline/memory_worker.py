"""One rank of the memory part: what it holds at its fullest, as the system and torch's allocator see it.

    torchrun --nproc-per-node 2 -m benchmarks.pipeline.memory_worker WEIGHTS SCHEDULE RECOMPUTE RESULTS

*system*: memory of its own beyond what the process had before it read its weights, at its fullest in a step.
*allocator*: bytes of torch's tensors: those that were there before a step, and what its profiler says of the step.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline.real_model import batch, compiled
from benchmarks.zero import forget, resident

STEPS = 3  # before the one that is looked at
MIB = 2.0**20


def main() -> None:
    weights, schedule, recompute, results = sys.argv[1:5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = compiled(hardware="cpu", schedule=schedule, recompute=recompute, check=False, meta=True)
    samples = batch()
    model.prepare()
    before = resident("VmRSS")
    model.load(Path(weights))
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-5, fused=True)

    def step() -> None:
        model.train_step(samples)

    for number in range(STEPS):
        if number:
            forget()
        step()
        if number < STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
    system = (resident("VmHWM") - before) * MIB
    optimizer.step()
    optimizer.zero_grad()
    held = _alive()
    allocator = held + _most_allocated(step)
    row: dict[str, Any] = {
        "rank": rank, "predicted": model.metrics["planned_memory"], "system": system, "allocator": allocator
    }  # fmt: skip
    Path(results, f"{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def _alive() -> float:
    """Bytes of all tensors that there are, each block once."""
    gc.collect()
    blocks = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
    return float(sum(blocks.values()))


def _most_allocated(step: Any) -> float:
    """The most bytes of tensors that a step has made and not dropped, at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return float(most)


if __name__ == "__main__":
    main()
