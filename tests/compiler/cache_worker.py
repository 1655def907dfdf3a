"""One rank of test_cache_ranks.py: train on microbatches of two lengths, leave what it did and its gradients in files.

main({"wrong": "no_such_part", "lengths": [8, 8]}, directory)
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

import csc
from csc.errors import CscError
from tests.compiler import small


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(case: dict[str, Any], directory: Path) -> None:
    rank = int(os.environ["RANK"])
    heard = Lines()
    logging.getLogger("csc").addHandler(heard)
    logging.getLogger("csc").setLevel(logging.INFO)
    batch = [small.text_batch(2, length) for length in case["lengths"]]
    passes, error = list[str](), ""
    compiled = csc.compile(small.text(2), mesh={"pp": 2}, example=batch[:2], microbatches=2, schedule="1f1b")
    compiled.inspected.progress = passes.append
    if case["wrong"]:
        try:
            compiled.with_options(freeze=[case["wrong"]]).train_step(batch[:2])
        except CscError as problem:
            error = f"{type(problem).__name__}: {problem}"
        passes.clear()
    for start in range(0, len(batch), 2):
        compiled.zero_grad()
        loss = float(compiled.train_step(batch[start : start + 2]))
    gradients = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
    save_file({name: g.contiguous() for name, g in gradients.items()}, directory / f"gradients_{rank}.safetensors")
    result = {"passes": passes, "log": heard.lines, "error": error, "loss": loss}
    (directory / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
