"""One rank of test_encode_ahead.py: steps that encode for the next one.

main({"mesh": "dp=2,pp=2", "local": False, "microbatches": 4}, directory)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import csc
from tests.compiler.features_worker import Batch, gradients, share
from tests.launching import PATIENCE
from tests.models.hf import llava, llava_batch


def model() -> nn.Module:
    """Its encoder takes longer than a rank of two waits."""
    return llava(vision_layers=9, text_layers=3)


def compiled_for(mesh: str, microbatches: int, **options: Any) -> csc.CompiledModel:
    return csc.compile(
        model(), mesh=mesh, example=llava_batch(8), freeze=["vision_tower"], microbatches=microbatches,
        schedule="1f1b", **options,
    )  # fmt: skip


def batch_of(step: int) -> Batch:
    """Of one size, with other pixels in each step."""
    batch = llava_batch(8)
    return {**batch, "pixel_values": batch["pixel_values"] + 0.01 * step}


def main(case: dict[str, Any], directory: Path) -> None:
    compiled = compiled_for(case["mesh"], case["microbatches"], encode_ahead=True, timeout=PATIENCE)
    compiled.parameters()  # joins the group
    rank, told = dist.get_rank(), []

    def given(step: int) -> Batch:
        batch = batch_of(step)
        return share(batch, compiled.dp_rank, compiled.dp_size, compiled.needs) if case["local"] else batch

    for step in range(case["steps"]):
        compiled.zero_grad()
        coming = given(step + 1)
        if case.get("apart") == step and rank == 1:
            coming["pixel_values"] = coming["pixel_values"] + 1.0  # this rank was told of other images
        loss = float(compiled.train_step(given(step), local=case["local"], ahead=coming))
        told.append([loss, compiled.metrics["features_ahead"], compiled.metrics["features_made"]])
    save_file(gradients(compiled), directory / f"gradients_{rank}.safetensors")
    orders = compiled.program.plan.ahead if compiled.program.plan is not None else None
    result = {"told": told, "needs": sorted(compiled.needs), "orders": [sorted(one.items()) for one in orders or ()]}
    (directory / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
