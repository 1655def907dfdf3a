"""One rank of test_training_checkpoints.py.

first(case, directory)         trains, saves while it goes on, goes on, and goes back
again(case, directory, name)   takes up what another mesh has saved, and goes on
failing(directory)             a disk of one rank that fails; a writer that is killed
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import csc
from csc.checkpoints import files, writing
from tests.compiler import small, tensor_models
from tests.compiler.zero_models import BATCHES, MODELS

MODELS = {**MODELS, "gpt2_dropped": lambda: tensor_models.gpt2(0.1), "small": small.dropped}
BATCHES = {**BATCHES, "gpt2_dropped": tensor_models.text, "small": small.text_batch}


class Run:
    """What is trained: a model at a mesh, with AdamW and a schedule."""

    def __init__(self, case: dict[str, Any], directory: Path, **options: Any) -> None:
        self.batch = BATCHES[case["model"]](case["samples"])
        self.compiled = csc.compile(
            MODELS[case["model"]](), mesh=case["mesh"], example=self.batch, microbatches=case.get("microbatches", 1),
            zero=case.get("zero", 0), freeze=case.get("freeze", ()), check=False,
        )  # fmt: skip
        self.optimizer = self.compiled.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-6)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 8)
        self.checkpoints = csc.CheckpointManager(
            directory / "run", self.compiled, optimizer=self.optimizer, scheduler=self.scheduler, **options
        )

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(float(self.compiled.train_step(self.batch)))
            self.compiled.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses


def first(case: dict[str, Any], directory: Path) -> None:
    writing.PART = 256  # so that boxes are written in several parts, too
    run = Run(case, directory, asynchronous=True)
    torch.manual_seed(3)
    run.steps(2)
    run.compiled.save(directory / "weights")
    saving = run.checkpoints.save(2, {"seen": 7})
    later = run.steps(3)
    restored = run.checkpoints.load()
    assert restored is not None and (restored.step, restored.extra, restored.begun) == (2, {"seen": 7}, ())
    result = {"later": later, "again": run.steps(3), "copied": saving.copied}
    (directory / f"first_{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def again(case: dict[str, Any], directory: Path, name: str) -> None:
    run = Run(case, directory)
    restored = run.checkpoints.load()
    assert restored is not None and restored.step == 2
    (directory / f"{name}_{dist.get_rank()}.json").write_text(json.dumps(run.steps(3)))
    dist.destroy_process_group()


def failing(directory: Path) -> None:
    """Rank 1 cannot write: all say so, the checkpoint before stays; then it is killed while it writes."""
    run = Run({"model": "small", "mesh": "pp=2", "samples": 4}, directory, asynchronous=True)
    run.steps(1)
    run.checkpoints.save(1)
    later = run.steps(1)
    rank, write = dist.get_rank(), files.write
    (directory / f"later_{rank}.json").write_text(json.dumps(later))

    def full(*arguments: Any) -> Any:
        raise csc.InputError("it cannot be written (no space left)", "the disk")

    if rank:
        files.write = full
    run.checkpoints.save(2)
    said = ""
    try:
        run.checkpoints.wait()
    except csc.CscError as error:
        said = str(error)
    (directory / f"said_{rank}.txt").write_text(said)
    assert run.checkpoints.steps == [1] and run.checkpoints.load().step == 1
    files.write = write
    run.checkpoints.save(3).wait()
    assert run.checkpoints.steps == [1, 3]
    if rank:
        files.write = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    run.checkpoints.save(4)
    try:
        run.checkpoints.wait()
    except csc.CscError as error:
        (directory / "lost.txt").write_text(str(error))
    os._exit(0)
