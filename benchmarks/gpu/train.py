"""Three steps over processes, beside the same in one process: torchrun ... -m benchmarks.gpu.train --mesh pp=2

Every process trains the LLaVA of benchmarks.gpu.model under csc; the first one compares losses with plain PyTorch's.
Exit code 1 if they differ by more than 1e-4 (TF32 is off).
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

import csc
from benchmarks.gpu.model import DEVICE, LLAVA, Batch, on_device

STEPS, RATE, TOLERANCE = 3, 1e-3, 1e-4


def eager(batch: Batch) -> list[float]:
    """Losses of plain PyTorch with AdamW."""
    model, _ = on_device(LLAVA)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--zero", type=int, default=0)
    arguments = parser.parse_args()
    model, batch = on_device(LLAVA)
    compiled = csc.compile(model, mesh=arguments.mesh, example=batch, zero=arguments.zero)
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(float(compiled.train_step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        expected = eager(batch)
        error = max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))
        backend = dist.get_backend() if dist.is_initialized() else "one process"
        print(f"{arguments.mesh}, zero={arguments.zero}, {backend}, {DEVICE.type}: losses {losses}, to {error:.1e}")
        sys.exit(error > TOLERANCE)


if __name__ == "__main__":
    main()
