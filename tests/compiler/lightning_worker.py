"""One rank of the test that trains with Lightning on two processes.

main(directory)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

import csc
from tests.compiler.peft_models import llama, text_batch
from tests.compiler.test_integrations import ROWS, STEPS, with_lightning


def main(directory: Path) -> None:
    compiled = csc.compile(llama(), mesh="pp=2", example=text_batch(ROWS), microbatches=2)
    losses, _ = with_lightning(compiled, directory, ranks=True, total=2 * STEPS)
    if dist.get_rank() == 0:
        (directory / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()
