"""One rank of test_evaluation.py: its replica's samples, trained on with dropout and evaluated without.

main({"mesh": "dp=2,cp=2"}, directory)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import csc
from tests.compiler import small
from tests.launching import PATIENCE

Batch = dict[str, torch.Tensor]
SEED = 5


def batch(samples: int, length: int, uncounted: int) -> Batch:
    """The first labels of a sample do not count."""
    found = small.text_batch(samples, length=length)
    found["labels"][:, :uncounted] = -100
    return found


# One microbatch of each of two replicas, of other sizes and with other numbers of labels.
SAMPLES = [batch(2, 12, 1), batch(1, 16, 9)]


def compiled_for(mesh: str) -> csc.CompiledModel:
    return csc.compile(small.dropped(), mesh=mesh, example=SAMPLES, timeout=PATIENCE)


def main(case: dict[str, str], directory: Path) -> None:
    compiled = compiled_for(case["mesh"])
    own = [SAMPLES[compiled.dp_rank]]
    first = float(compiled.eval_step(own, local=True))
    assert all(p.grad is None for p in compiled.parameters())
    torch.manual_seed(SEED)
    loss = float(compiled.train_step(own, local=True))
    rank = dist.get_rank()
    gradients = {name: p.grad.contiguous() for name, p in compiled.named_parameters() if p.grad is not None}
    save_file(gradients, directory / f"gradients_{rank}.safetensors")
    torch.optim.SGD(compiled.parameters(), lr=0.5).step()
    evaluated = [first, float(compiled.eval_step(own, local=True)), float(compiled.eval_step(SAMPLES))]
    (directory / f"result_{rank}.json").write_text(json.dumps({"loss": loss, "evaluated": evaluated}))
    dist.destroy_process_group()
