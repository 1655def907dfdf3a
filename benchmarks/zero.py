"""What a rank holds at its fullest with zero=0, 1, 2, 3: a Llama trained by AdamW over gloo, a process for each rank.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 \
        torchrun --standalone --nproc-per-node 4 -m benchmarks.zero --zero 3 [--rounds 3] [--json]

A Llama of 33 million parameters in float32 (8 layers of width 512), made without weights (csc.meta_init) and read from
a file, so that a process has its own part alone. Mesh dp=ranks; one sample of 32 tokens and one microbatch a replica,
so that little is saved. Memory is what the process takes beyond what it took before it read the weights: *between*
steps, and at its *fullest* in any of the last rounds (step, clipping and optimizer). Linux alone tells that, and glibc
gives back what is freed if it is told to. Seconds: the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import csc

MB = 2**20
STATUS = Path("/proc/self/status")


def build() -> LlamaForCausalLM:
    """The model."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, vocab_size=8000
        )
    )  # fmt: skip


def resident(what: str) -> float:
    """MB of this process: VmRSS, or since `forget` the most, VmHWM."""
    found = re.search(rf"{what}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) / 1024


def forget() -> None:
    """The most begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(zero: int, weights: Path, rounds: int) -> dict[str, float]:
    """Of this rank, in MB and seconds."""
    ids = torch.arange(dist.get_world_size() * 32).view(-1, 32) % 7919
    batch = {"input_ids": ids, "labels": ids}
    with csc.meta_init():
        model = build()
    compiled = csc.compile(model, mesh={"dp": dist.get_world_size()}, example=batch, zero=zero, check=False)
    compiled.prepare()
    before = resident("VmRSS")
    compiled.load(weights)
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    seconds = []
    for number in range(rounds + 1):
        if number == 1:
            forget()
        start = time.perf_counter()
        compiled.train_step(batch)
        compiled.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return {
        "zero": zero,
        "between": resident("VmRSS") - before,
        "fullest": resident("VmHWM") - before,
        "seconds": median(seconds[1:]),
        "planned": compiled.metrics["planned_memory"] / MB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--zero", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    home = Path(tempfile.gettempdir()) / f"csc-zero-{os.getuid()}.safetensors"
    if dist.get_rank() == 0 and not home.exists():
        model = build()
        save_file({n: p.detach() for n, p in model.named_parameters()}, home)
    dist.barrier()
    row = measured(given.zero, home, given.rounds)
    if dist.get_rank() == 0:
        words = (f"{name} {value:.4g}" for name, value in row.items())
        print(json.dumps(row) if given.json else ", ".join(words))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
