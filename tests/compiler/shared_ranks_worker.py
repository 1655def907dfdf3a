"""One rank of test_shared_ranks.py, in a process of its own.

own_samples(mesh, directory)       prints what comes of a local batch, of one that is another on each rank, of a
                                   balanced loader, and of a loader's position that is saved
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import csc
from tests.compiler.tensor_models import BATCHES, MODELS


class Counting:
    """A loader that knows how far it is."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def own_samples(mesh: str, directory: Path) -> None:
    batch = BATCHES["llava"](8)
    compiled = csc.compile(MODELS["llava"](), mesh=mesh, example=batch, microbatches=2, check=False)
    found: dict[str, Any] = {"share": [compiled.dp_rank, compiled.dp_size]}
    found["local"] = float(compiled.train_step(batch, local=True).detach())
    other = {**batch, "labels": batch["labels"].clamp(max=3)} if dist.get_rank() == 2 else batch
    try:
        compiled.train_step(other, local=True)
    except csc.CscError as error:
        found["others"] = str(error)
    samples = [{name: one[i] for name, one in batch.items()} for i in range(8)]
    length = batch["input_ids"].shape[1]
    (whole,) = csc.balanced(samples, compiled, lengths=[length] * 8, batch_size=8, collate=together, multiple=length)
    found["balanced"] = float(compiled.train_step(whole, local=True).detach())
    csc.CheckpointManager(directory, compiled, loader=Counting(3)).save(1).wait()
    again = Counting(0)
    csc.CheckpointManager(directory, compiled, loader=again).load()
    print(json.dumps({**found, "position": again.position}))
    dist.destroy_process_group()


def together(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
