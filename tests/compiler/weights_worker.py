"""One rank of the tests that write and read weights on several processes.

torchrun --nproc-per-node 2 tests/compiler/weights_worker.py '{"peft": "llama", "steps": 2}' DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import csc
from tests.compiler.peft_models import peft_model, text_batch


def main() -> None:
    case, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    batch = text_batch(2)
    compiled = csc.compile(peft_model(case["peft"]), mesh="pp=2", example=batch)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    for _ in range(case["steps"]):
        compiled.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
    compiled.save_adapter(directory / "adapter")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
