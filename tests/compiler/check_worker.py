"""One rank of test_check.py's processes: a model that changes between steps, then a program that is wrong.

main(directory) leaves, in result_RANK.json, losses, what was logged, how often this rank ran the program for the check,
and the errors: of two steps of the wrong program, and of one whose own step fails in the check; then losses of steps
with dropout beside eager's, what was logged, and the seeds of the program's steps for the check.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import csc
from csc.check.eager import SameMasks, WithoutChance, eager_step
from csc.driver import checking
from csc.driver.compiler import Compiler
from csc.errors import CscError
from csc.runtime import executor
from tests.compiler import small
from tests.compiler.cache_worker import Lines

BATCH = small.text_batch(4)


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    checking.step_of = OwnSteps.step_of  # type: ignore[assignment]
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
    Compiler.emit = EMIT  # type: ignore[method-assign]
    apart = small.text(2)
    if rank == 1:  # layers that rank 0 holds: of rank 1's copies nobody makes use
        torch.nn.init.zeros_(apart.layers[0].out.weight)
    compiled = csc.compile(apart, mesh="pp=2", example=BATCH, microbatches=2, cache=False)
    losses.append(float(compiled.train_step(BATCH)))
    ran, OwnSteps.fails = OwnSteps.made, True
    failing = csc.compile(small.text(2), mesh="pp=2", example=BATCH, microbatches=2, cache=False)
    try:
        failing.train_step(BATCH)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    OwnSteps.fails, heard.lines[:], ran_before = False, [], len(OwnSteps.seeds)
    dropped = [with_dropout(mesh) for mesh in ("pp=2", "dp=2")]
    found = {
        "losses": losses, "log": lines, "errors": errors, "gradients": grads, "ran": ran,
        "dropped": dropped, "dropped log": list(heard.lines), "ran dropped": OwnSteps.seeds[ran_before:],
    }  # fmt: skip
    (directory / f"result_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def with_dropout(mesh: str) -> list[float]:
    """The loss of a training step whose model drops something, and eager's with the step's masks."""
    compiled = csc.compile(small.dropped(), mesh=mesh, example=BATCH, microbatches=2, cache=False)
    torch.manual_seed(5 + dist.get_rank())  # rank 0 draws for all
    loss = float(compiled.train_step(BATCH))
    draws, count = compiled.trainer().program.manifest.draws, 4 if mesh == "dp=2" else 2
    torch.manual_seed(5)
    chance = WithoutChance(SameMasks(draws, executor.draw(), count))
    return [loss, eager_step(compiled.model, BATCH, {"embed.weight"}, chance=chance).loss]


EMIT = Compiler.emit
STEP_OF = checking.step_of


class OwnSteps:
    """Counts the steps that this rank made of the whole program."""

    made = 0
    fails = False
    seeds: ClassVar[list[int]] = []

    @classmethod
    def step_of(cls, *given: Any) -> Any:
        cls.made += 1
        cls.seeds.append(given[2])
        if cls.fails:
            raise ValueError("no room")
        return STEP_OF(*given)


def tampered(self: Compiler, program: Any, options: Any, directory: Path, *rest: Any) -> Path:
    """Emit another activation."""
    written = EMIT(self, program, options, directory, *rest)
    for file in (directory / "layers").glob("*.py"):
        file.write_text(file.read_text().replace("aten.silu_backward.", "aten.gelu_backward."))
    return written
