"""One rank of test_gloo.py, which checks itself against eager autograd and against the in-process run.

run(case, *directories)       returns if all is well
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import handmade
import torch
from safetensors.torch import save_file

from csc.errors import CscError, InputError, ProgramError
from csc.runtime.launch import setup_distributed
from csc.runtime.program import LoadedProgram, load
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in trainer.named_parameters() if p.grad is not None}


def compare(program: LoadedProgram) -> Trainer:
    """Two steps over gloo against the same two in this process: loss, gradients, norm and clipped gradients,
    bit for bit.
    """
    pieces = program.manifest.microbatches * program.manifest.mesh.dp
    trainer, local = Trainer(program), Trainer(program, transport=InProcess(program))
    for seed in range(2):
        batch = handmade.batch(pieces, seed)
        found, expected = trainer.train_step(batch), local.train_step(batch)
        assert torch.equal(found, expected), (found, expected)
    assert len(gradients(trainer)) == len(list(trainer.parameters()))
    for name, gradient in gradients(trainer).items():
        assert torch.equal(gradient, gradients(local)[name]), name
    torch.testing.assert_close(trainer.clip_grad_norm_(0.1), local.clip_grad_norm_(0.1))
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, gradients(local)[name])
    return trainer


def stages(one_f_one_b: Path, gpipe: Path, prefix: Path, out: Path) -> None:
    program = load(one_f_one_b)
    trainer = compare(program)
    rank = trainer.transport.ranks[0]
    held = {0: ["embed", "w0"], 1: ["w1", "b1"], 2: ["embed"]}[rank]
    assert [n for n, _ in trainer.named_parameters()] == held == list(trainer.state_dict())

    trainer.zero_grad()
    trainer.train_step(handmade.batch(4))
    _, expected = handmade.eager(handmade.weights(), handmade.batch(4))
    other = Trainer(load(gpipe))
    other.train_step(handmade.batch(4))
    for name, gradient in gradients(trainer).items():
        assert torch.equal(gradient, gradients(other)[name]), "gpipe and 1f1b differ"
        torch.testing.assert_close(gradient, expected[name])

    frozen = compare(load(prefix))
    assert not (rank == 0 and list(frozen.parameters()))

    try:
        trainer.train_step({"ids": torch.zeros(8, 5)})
        raise AssertionError("accepted a bad batch")
    except InputError:
        pass
    bad = handmade.batch(4)
    bad["labels"][:] = -100
    before = gradients(trainer)
    try:
        trainer.train_step(bad)
        raise AssertionError("accepted a loss of NaN")
    except CscError as error:
        assert "microbatch 0, 1, 2, 3 is not finite" in str(error)
    assert all(torch.equal(g, before[n]) for n, g in gradients(trainer).items())
    torch.testing.assert_close(  # and training goes on
        trainer.train_step(handmade.batch(4)), handmade.eager(handmade.weights(), handmade.batch(4))[0]
    )

    value = torch.tensor([1.0, 1e8, -1e8][rank])  # only "highest rank first" keeps the 1
    endpoint = trainer.transport.endpoint(rank)
    assert endpoint.finish_sum(endpoint.start_sum(value, (0, 1, 2), "test", ordered=True)) and value == 1.0

    other_weights = handmade.weights()
    other_weights["embed"] += rank
    try:
        Trainer(program, other_weights)
        raise AssertionError("accepted weights that differ")
    except InputError as error:
        assert "parameter 'embed' starts with other values on rank 2 than on rank 0" in str(error)

    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    optimizer.step()
    trainer.save(out)
    again = Trainer(program, out)
    assert all(torch.equal(t, trainer.state_dict()[n]) for n, t in again.state_dict().items())


def replicas(directory: Path) -> None:
    trainer = compare(load(directory))
    _, expected = handmade.eager(handmade.weights(), handmade.batch(4))
    trainer.zero_grad()
    trainer.train_step(handmade.batch(4))
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name])
    norm = trainer.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in expected.values()]).norm())


def disagree(one: Path, other: Path) -> None:
    mine = load(other if torch.distributed.get_rank() == 1 else one)
    try:
        Trainer(mine)
        raise AssertionError("accepted ranks that differ")
    except ProgramError as error:
        assert "schedules differ between rank 0 and rank 1" in str(error), error
    try:
        Trainer(load(Path(str(one) + "_3")))
        raise AssertionError("accepted a group of another size")
    except InputError as error:
        assert "is for 3 ranks (pp=3), the process group has 2" in str(error), error


def starts(directory: Path, *others: Path) -> None:
    """Two ranks of a cp axis start from other values, or from other files: both say so."""
    rank = torch.distributed.get_rank()
    program = load(directory)
    for name in handmade.SHAPES:  # "w1" and "b1" are frozen
        given = handmade.weights()
        given[name] += rank
        refused(lambda given=given: Trainer(program, given), f"parameter {name!r} starts with other values on rank 1")
    trainer = Trainer(program)
    save_file(given, directory.parent / f"read_by_{rank}.safetensors")
    refused(lambda: trainer.load(directory.parent / f"read_by_{rank}.safetensors"), "'b1' starts with other values")
    for other, part in zip(others, ("constant 'scale' starts with", "files of layers differ"), strict=True):
        refused(lambda other=other: Trainer(load(other if rank else directory)), part)


def refused(call: Callable[[], object], part: str) -> None:
    try:
        call()
    except CscError as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"nobody said {part!r}")


def run(case: str, *directories: Path) -> None:
    setup_distributed(timeout=30)
    torch.set_num_threads(1)
    cases: dict[str, Callable[..., None]] = {
        "stages": stages,
        "replicas": replicas,
        "disagree": disagree,
        "starts": starts,
    }
    cases[case](*directories)
    torch.distributed.destroy_process_group()
