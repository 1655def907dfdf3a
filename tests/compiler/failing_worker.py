"""One rank of test_failing_steps.py: what goes wrong on one rank is told to all, and the step after it is in order.

main(directory)      returns if all is well; the program is for the mesh pp=2,cp=2
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import csc
from csc.errors import CscError
from tests.compiler import small
from tests.launching import PATIENCE

Gradients = dict[str, torch.Tensor]


def main(directory: Path) -> None:
    model = small.dropped()
    batches = [small.text_batch(2, length=length) for length in (10, 10, 13, 17)]
    batches[1]["tokens"] = batches[1]["tokens"].flip(0)
    compiled = csc.compile(
        model, mesh="pp=2,cp=2", example=batches[0], microbatches=2, directory=directory / "program", timeout=PATIENCE
    )

    def step(number: int) -> tuple[torch.Tensor, Gradients]:
        compiled.zero_grad()
        loss = compiled.train_step(batches[number])
        return loss, {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}

    def same(one: tuple[torch.Tensor, Gradients], other: tuple[torch.Tensor, Gradients]) -> None:
        assert torch.equal(one[0], other[0]) and one[1].keys() == other[1].keys()
        for name, gradient in one[1].items():
            assert torch.equal(gradient, other[1][name]), name

    step(0)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # the first rank's draws decide
    undisturbed = [step(0), step(1)]

    def between(call: Callable[[], object], at: int | None, own: str, told: str = "") -> None:
        """A step, `call`, which fails, a step: the two are those of the undisturbed run. at: the rank that says `own`,
        the others tell of it (None: any may fail).
        """
        torch.manual_seed(rank)
        same(step(0), undisturbed[0])
        try:
            call()
        except Exception as error:
            part = own if rank == at else told or f"rank {at} failed "
            assert part in str(error), (rank, repr(error))
            assert isinstance(error, CscError) or at in (rank, None), repr(error)
        else:
            raise AssertionError("nothing was raised")
        for name, p in compiled.named_parameters():
            assert torch.equal(p.grad, undisturbed[0][1][name]), "a gradient was touched"
        same(step(1), undisturbed[1])

    def check_batch(batch: object) -> None:
        raise ValueError("a batch that the model does not like")

    def disliked() -> None:
        if rank == 3:
            model.check_batch = check_batch
        try:
            compiled.train_step(batches[0])
        finally:
            model.__dict__.pop("check_batch", None)

    between(disliked, 3, "does not like")

    def in_the_middle() -> None:
        """The first rank's F fails at the second microbatch."""
        functions = next(iter(compiled.trainer().ranks[0].functions.values()))
        forward, calls = functions.forward, []

        def failing(*arguments: Any) -> Any:
            calls.append(None)
            if len(calls) == 2:
                raise IndexError("index out of range")
            return forward(*arguments)

        if rank == 0:
            object.__setattr__(functions, "forward", failing)
        try:
            compiled.train_step(batches[0])
        finally:
            object.__setattr__(functions, "forward", forward)

    between(in_the_middle, None, "", "index out of range")
    outside = {name: value.clone() for name, value in batches[0].items()}
    outside["tokens"][1, -1] = 10**6
    between(lambda: compiled.train_step(outside), None, "", "is no row of")

    length = "microbatch 0: labels int64[1, 10] on rank 0, microbatch 0: labels int64[1, 13] on rank 2"
    between(lambda: compiled.train_step(batches[2 if rank == 2 else 0]), 4, "", length)
    ended = "rank 0 is at 'train_step', and rank 1 at 'save'"
    between(lambda: compiled.train_step(batches[0]) if rank != 1 else compiled.save(directory / "out"), 4, "", ended)

    def changed() -> None:
        if rank == 2:
            model.layers[0].gain = 2.0
        try:
            compiled.train_step(batches[0])
        except CscError as error:
            notes = "".join(getattr(error, "__notes__", ()))
            assert (rank == 2) == ("on this rank the model has changed since it was compiled: " in notes), (rank, notes)
            assert (rank == 2) == ("gain" in notes)
            raise
        finally:
            model.layers[0].__dict__.pop("gain", None)

    there = "the model has changed on rank 2 since it was compiled, and not on rank 0"
    between(changed, 4, "", there)

    def without_a_place() -> None:
        place = directory / "program-rank1-1"
        if rank == 1:
            place.write_text("no program")
        try:
            compiled.train_step(batches[2])
        finally:
            if rank == 1:
                place.unlink()

    between(without_a_place, 1, "holds no csc program", "rank 1 failed at 'compile'")
    step(2)
    step(3)
    compiled.save(directory / "out")
    dist.destroy_process_group()
