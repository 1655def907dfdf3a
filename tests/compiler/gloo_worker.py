"""One rank of test_gloo.py: compile a test model, run steps, leave losses and gradients in files.

main({"model": "llava", ...}, directory)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

import csc
from tests.compiler.gloo_models import BATCHES, MODELS


def main(case: dict[str, Any], directory: Path) -> None:
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
        context=case.get("context"),
        hardware=case.get("hardware"),
    )
    losses = list[float]()
    before = [BATCHES[name](case["samples"]) for name in case.get("ahead", [])]
    for coming in compiled.ahead([*before, batch]) if before else [batch]:
        compiled.zero_grad()
        losses = [float(compiled.train_step(coming))]
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
    known = compiled.trainer().transport.endpoint(rank).recent.known
    ways = {type(way).__name__ for one in known for plan in one.plans.values() for way in plan._exchanges.values()}
    result = {"losses": losses, "norm": norm, "ways": sorted(ways)}
    (directory / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
