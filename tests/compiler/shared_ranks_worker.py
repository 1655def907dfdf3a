"""One rank of test_shared_ranks.py, in a process of its own.

own_samples(mesh)       prints what is said of samples of a replica's own: of dp_rank, and of a local batch
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import csc
from tests.compiler.tensor_models import BATCHES, MODELS


def own_samples(mesh: str) -> None:
    compiled = csc.compile(MODELS["llava"](), mesh=mesh, example=BATCHES["llava"](8), microbatches=2, check=False)
    compiled.train_step(BATCHES["llava"](8))
    print(
        json.dumps([said(lambda: compiled.dp_rank), said(lambda: compiled.train_step(BATCHES["llava"](4), local=True))])
    )
    dist.destroy_process_group()


def said(call: Callable[[], Any]) -> str:
    try:
        return f"nothing: {call()}"
    except csc.CscError as error:
        return str(error)
