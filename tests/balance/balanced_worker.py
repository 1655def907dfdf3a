"""One rank of test_exact.py: a balanced loader under several processes.

main(directory)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

import csc
from csc.balance.loader import BalancedLoader, EpochOrder
from csc.errors import CscError
from tests.balance.captions import Captions, Sample, collate
from tests.launching import PATIENCE
from tests.models import captions

STEP, SEED = 16, 1


def compiled_for(mesh: str) -> csc.CompiledModel:
    samples = Captions(40)
    example = collate([samples[i] for i in range(8)], 40)
    return csc.compile(
        captions.Captions(), mesh=mesh, example=example, microbatches=2, schedule="1f1b", timeout=PATIENCE
    )


def loader_for(compiled: csc.CompiledModel, dataset: Captions, seed: int = SEED) -> BalancedLoader:
    return csc.balanced(
        dataset, compiled, lengths=dataset.lengths, batch_size=STEP, collate=collate, multiple=8, shuffle=True,
        seed=seed, drop_last=True,
    )  # fmt: skip


def sampled(count: int) -> list[list[int]]:
    """The samples of each step, as the seed orders them."""
    order = EpochOrder(count, None, True, SEED).of(0)
    return [order[start : start + STEP] for start in range(0, count - STEP + 1, STEP)]


class Counting(Captions):
    """That knows what was loaded once `loaded` is emptied."""

    def __init__(self, count: int) -> None:
        super().__init__(count, lacking=True)
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> Sample:
        self.loaded.append(int(index))
        return super().__getitem__(index)


def main(directory: Path) -> None:
    compiled = compiled_for("dp=2,pp=2")
    dataset = Counting(40)
    loader = loader_for(compiled, dataset)
    dataset.loaded.clear()
    rank, losses = dist.get_rank(), []
    for number, step in enumerate(loader):
        if not number:
            compiled.compile_for(step)  # no step: gradients and what follows are as without it
            assert all(p.grad is None for p in compiled.parameters())
        losses.append(float(compiled.train_step(step)))
        save_file(
            {name: p.grad.contiguous() for name, p in compiled.named_parameters() if p.grad is not None},
            directory / f"{number}_{rank}.safetensors",
        )
        compiled.zero_grad()
        if number == 0:
            compiled.save(directory / "saved", loader=loader)
    result = {"losses": losses, "sizes": [list(one) for one in loader.sizes], "loaded": list(dataset.loaded)}
    compiled.load(directory / "saved", loader=loader)
    result["resumed"] = [float(compiled.train_step(step)) for step in loader]
    loader.set_epoch(5 + rank // 2)  # replicas that go through the data in other orders
    try:
        compiled.train_step(next(iter(loader)))
    except CscError as error:
        result["other"] = str(error)
    (directory / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
