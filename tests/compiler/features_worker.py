"""One rank of test_features.py: steps whose features of a frozen encoder are kept on disk.

main({"mesh": "dp=2,pp=2", ...}, directory)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import csc
from tests.launching import PATIENCE
from tests.models.hf import llava, llava_batch

Batch = dict[str, torch.Tensor]


def compiled_for(mesh: str, folder: Path | None, **options: Any) -> csc.CompiledModel:
    return csc.compile(
        llava(), mesh=mesh, example=llava_batch(4), freeze=["vision_tower"], microbatches=2, schedule="1f1b",
        cache_features=folder, **options,
    )  # fmt: skip


def gradients(compiled: csc.CompiledModel) -> Batch:
    return {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}


def share(batch: Batch, number: int, count: int, needs: frozenset[str]) -> Batch:
    """The samples of one of so many replicas, without the values of what is not needed."""
    return {
        name: one.chunk(count)[number] if name in needs else one.chunk(count)[number].to("meta")
        for name, one in batch.items()
    }


def main(case: dict[str, Any], directory: Path) -> None:
    folder = directory / ("shared" if case["shared"] else f"own_{os.environ['RANK']}")
    compiled = compiled_for(case["mesh"], folder, timeout=PATIENCE)
    compiled.parameters()  # joins the group
    rank, told = dist.get_rank(), []
    for local in (False, True):
        for _ in range(2):
            compiled.zero_grad()
            batch = llava_batch(4)
            given = share(batch, compiled.dp_rank, compiled.dp_size, compiled.needs) if local else batch
            loss = float(compiled.train_step(given, local=local))
            told.append([loss, compiled.metrics["features_made"], compiled.metrics["features_read"]])
    save_file(gradients(compiled), directory / f"gradients_{rank}.safetensors")
    result = {"told": told, "needs": sorted(compiled.needs)}
    (directory / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
