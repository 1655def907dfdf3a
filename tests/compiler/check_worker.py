"""One rank of test_check.py's processes: a model that changes between steps, then a program that is wrong.

main(directory) leaves, in result_RANK.json, losses, what was logged and the errors of two steps of the wrong program.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import csc
from csc.driver.compiler import Compiler
from csc.errors import CscError
from tests.compiler import small
from tests.compiler.cache_worker import Lines

BATCH = small.text_batch(4)


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    heard = Lines()
    logging.getLogger("csc").addHandler(heard)
    logging.getLogger("csc").setLevel(logging.INFO)
    compiled = csc.compile(small.text(2), mesh="pp=2", example=BATCH, microbatches=2, cache=False, check=2)
    losses = [float(compiled.train_step(BATCH)) for _ in range(3)]
    compiled.model.layers[1].register_forward_hook(lambda module, given, result: 2 * result)
    losses.append(float(compiled.train_step(BATCH)))
    lines, errors = list(heard.lines), []
    if rank == 0:  # which compiles for all
        Compiler.emit = tampered  # type: ignore[method-assign]
    wrong = csc.compile(small.text(2), mesh="pp=2", example=BATCH, microbatches=2, cache=False)
    for _ in range(2):
        try:
            wrong.train_step(BATCH)
        except CscError as error:
            errors.append(f"{type(error).__name__}: {error}")
    grads = [name for name, p in wrong.model.named_parameters() if p.grad is not None]
    (directory / f"result_{rank}.json").write_text(
        json.dumps({"losses": losses, "log": lines, "errors": errors, "gradients": grads})
    )
    dist.destroy_process_group()


EMIT = Compiler.emit


def tampered(self: Compiler, program: Any, options: Any, directory: Path, *rest: Any) -> Path:
    """Emit another activation."""
    written = EMIT(self, program, options, directory, *rest)
    for file in (directory / "layers").glob("*.py"):
        file.write_text(file.read_text().replace("aten.silu_backward.", "aten.gelu_backward."))
    return written
