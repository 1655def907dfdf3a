"""One rank of test_batch_loss.py: a step of two towers, its gradients in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

import csc


def main(case: dict[str, Any], directory: Path) -> None:
    from tests.compiler.test_batch_loss import Towers, batch, clip  # which imports this file

    compiled = csc.compile(Towers(clip), example=batch(), mesh=case["mesh"], microbatches=case["microbatches"])
    compiled.train_step(batch())
    gradients = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    save_file({n: p.contiguous() for n, p in gradients.items()}, directory / f"gradients_{dist.get_rank()}.safetensors")
    dist.destroy_process_group()
