"""One rank of test_narrow.py, in a process of its own.

fails(mesh, victim)       prints [what was said of the failing step, whether the step after it has the first one's bits]
uneven(mesh)              prints losses of steps in which microbatches lack images
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

import csc
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.launching import PATIENCE
from tests.models import mixed

IMAGES = (1, 0, 0, 0)


def fails(mesh: str, victim: int) -> None:
    """The victim's second F raises."""
    batch = BATCHES["llava"](8)
    compiled = csc.compile(MODELS["llava"](), mesh=mesh, example=batch, microbatches=4, timeout=PATIENCE, check=False)

    def step() -> list[torch.Tensor]:
        compiled.zero_grad()
        loss = compiled.train_step(batch)
        return [loss, *(p.grad.clone() for _, p in compiled.named_parameters() if p.grad is not None)]

    before = step()
    functions = next(iter(compiled.trainer().ranks[0].functions.values()))
    forward, calls = functions.forward, list[None]()

    def failing(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise IndexError("index out of range")
        return forward(*arguments)

    if dist.get_rank() == victim:
        object.__setattr__(functions, "forward", failing)
    said = ""
    try:
        compiled.train_step(batch)
    except Exception as error:
        said = str(error)
    object.__setattr__(functions, "forward", forward)
    print(json.dumps([said, all(map(torch.equal, before, step()))]))
    dist.destroy_process_group()


def uneven(mesh: str) -> None:
    model, batch = mixed.built("LLaVA", IMAGES)
    compiled = csc.compile(model, mesh=mesh, example=batch, microbatches=2, check=False)
    optimizer = compiled.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(float(compiled.train_step(batch).detach()))
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps(losses))
    dist.destroy_process_group()
