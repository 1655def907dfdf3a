"""One rank of test_gloo.py: compile a test model, run steps, leave losses and gradients in files.

torchrun --nproc-per-node N tests/compiler/gloo_worker.py '{"model": "llava", ...}' DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

import csc
from tests.compiler.gloo_models import BATCHES, MODELS


def main() -> None:
    case, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    model = MODELS[case["model"]]()
    batch = BATCHES[case["model"]](case["samples"])
    compiled = csc.compile(
        model,
        mesh=case["mesh"],
        example=batch,
        freeze=case.get("freeze"),
        microbatches=case["microbatches"],
        schedule=case.get("schedule", "1f1b"),
        stages=case.get("stages"),
        placement=case.get("placement"),
        precision=case.get("precision"),
        recompute=case.get("recompute"),
    )
    losses = [float(compiled.train_step(batch))]
    norm = float(compiled.clip_grad_norm_(1e9))
    rank = dist.get_rank()
    gradients = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    save_file({name: g.contiguous() for name, g in gradients.items()}, directory / f"gradients_{rank}.safetensors")
    if "then_freeze" in case:
        import torch

        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        compiled = compiled.with_options(freeze=case["then_freeze"])
        losses.append(float(compiled.train_step(batch)))
        compiled.save(directory / "weights")
    (directory / f"result_{rank}.json").write_text(json.dumps({"losses": losses, "norm": norm}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
