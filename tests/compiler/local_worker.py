"""One rank of test_local.py: steps to which each rank brings its replica's samples.

main({"mesh": "dp=2,pp=2", ...}, directory)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import csc
from csc.errors import CscError
from tests.launching import PATIENCE
from tests.models import captions

Batch = dict[str, torch.Tensor]

# Two microbatches of each of two replicas: other lengths, other numbers of images, none on one of them, none at all.
STEPS: dict[str, list[list[Batch]]] = {
    "images": [
        [captions.batch([[1, 2], []]), captions.batch([[3], [1]])],
        [captions.batch([[2]]), captions.batch([[1], [2, 1], [1]], length=11)],
    ],
    "one without images": [
        [captions.batch([[1]]), captions.batch([[2], [1]])],
        [captions.batch([[], []], length=9), captions.batch([[]])],
    ],
    "sounds": [
        [captions.batch([[], []], [1, 0]), captions.batch([[], []])],
        [captions.batch([[], []]), captions.batch([[], []], [0, 2])],
    ],
}  # fmt: skip


def relabelled(batch: Batch, number: int) -> Batch:
    """Other labels, of which some do not count: their numbers differ from microbatch to microbatch. The first has the
    very tensor of its tokens, as is common.
    """
    if not number:
        return {**batch, "labels": batch["input_ids"]}
    labels = batch["labels"].clone()
    labels[:, : 1 + 2 * number] = -100
    return {**batch, "labels": labels}


def steps(name: str) -> list[list[Batch]]:
    """By replica."""
    return [
        [relabelled(microbatch, 2 * replica + place) for place, microbatch in enumerate(own)]
        for replica, own in enumerate(STEPS[name])
    ]


def example() -> list[Batch]:
    """A global batch with all entries."""
    return [captions.batch([[1, 2], []], [1, 0])] * 4


def compiled_for(mesh: str, **options: Any) -> csc.CompiledModel:
    return csc.compile(captions.Captions(), mesh=mesh, example=example(), microbatches=2, schedule="1f1b", **options)


def gradients(compiled: csc.CompiledModel) -> Batch:
    return {name: p.grad.contiguous() for name, p in compiled.named_parameters() if p.grad is not None}


def main(case: dict[str, Any], directory: Path) -> None:
    compiled = compiled_for(case["mesh"], timeout=PATIENCE)
    compiled.parameters()  # joins the group
    rank, needs = dist.get_rank(), compiled.needs
    losses = {}
    for name in case["steps"]:
        own = [
            {entry: one for entry, one in microbatch.items() if entry in needs}
            for microbatch in steps(name)[compiled.dp_rank]
        ]
        for _ in range(2):  # with new programs, and without
            compiled.zero_grad()
            losses[name] = float(compiled.train_step(own, local=True))
        save_file(gradients(compiled), directory / f"{name}_{rank}.safetensors")
    compiled.clip_grad_norm_(1.0)
    shared = {name: compiled.metrics[name] for name in ("loss", "grad_norm", "tokens", "samples")}
    told = refusals(compiled, rank) if case.get("refusals") else {}
    result = {"losses": losses, "needs": sorted(needs), "place": [compiled.dp_rank, compiled.dp_size], "told": told,
              "metrics": shared}  # fmt: skip
    (directory / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def refusals(compiled: csc.CompiledModel, rank: int) -> dict[str, str]:
    """What is said of steps that cannot be, after each of which the next one is in order."""
    own = steps("images")[compiled.dp_rank]
    right = float(compiled.train_step(own, local=True))
    told = {}

    def refused(name: str, batch: Sequence[Batch]) -> None:
        try:
            compiled.train_step(batch, local=True)
        except CscError as error:
            told[name] = str(error)
        assert float(compiled.train_step(own, local=True)) == right

    refused("tokens", [own[0], relabelled(own[1], 5)] if rank == 1 else own)
    refused("length", [own[0], captions.batch([[]], length=12)] if rank == 1 else own)
    refused("few", own[:1] if rank == 1 else own)
    absent = {name: one.to("meta") if name == "pixel_values" else one for name, one in own[1].items()}
    refused("absent", [own[0], absent] if "pixel_values" in compiled.needs else own)
    if compiled.dp_rank == 1:  # whose data ends early
        try:
            compiled.zero_grad()
            compiled.clip_grad_norm_(1.0)
        except CscError as error:
            told["early"] = str(error)
    else:
        refused("early", own)
        return told
    assert float(compiled.train_step(own, local=True)) == right
    return told
