"""Models on the GPU for `csc verify` and `csc profile`: small, with everything that kernels differ in.

    csc verify benchmarks/gpu/model.py:llava --mesh pp=2       a LLaVA, encoder frozen
    csc verify benchmarks/gpu/model.py:llama --mesh cp=2       a Llama, documents packed in rows

CSC_GPU_DEVICE names another device than the accelerators of this machine. Under torchrun each process has its own, as
csc places it.
"""

from __future__ import annotations

import os

import torch
from torch import nn

import csc
from benchmarks.step_time.cases import Case
from benchmarks.step_time.models import build
from csc import devices


def own_device(device: torch.device | str) -> torch.device:
    """Of this process: rank 1 of a machine with two GPUs makes its model on the second one."""
    local, neighbours = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    return torch.device(device) if local is None else devices.placed(device, int(local), int(neighbours))[0]


DEVICE = own_device(os.environ.get("CSC_GPU_DEVICE") or devices.default())
LLAVA = Case("llava", 256, 256, layers=4, frozen="encoder")
LLAMA = Case("llama", 256, 512, layers=4, padded=False)
DOCUMENT = 128  # tokens

Batch = dict[str, torch.Tensor]


def on_device(case: Case) -> tuple[nn.Module, Batch]:
    """The model of a case and its batch."""
    model, batch = build(case)
    return model.to(DEVICE), {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def packed() -> Batch:
    """Rows of documents that do not see each other: positions that begin again."""
    batch = on_device(LLAMA)[1]
    positions = torch.arange(LLAMA.tokens, device=DEVICE) % DOCUMENT
    return batch | {"position_ids": positions.expand(batch["input_ids"].shape)}


@csc.compile(example=lambda: on_device(LLAVA)[1])
def llava() -> nn.Module:
    return on_device(LLAVA)[0]


@csc.compile(example=packed)
def llama() -> nn.Module:
    return on_device(LLAMA)[0]
