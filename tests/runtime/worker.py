"""One rank of test_gloo.py, which checks itself against eager autograd and against the in-process run.

run(case, *directories)       returns if all is well
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import handmade
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from csc.errors import CscError, InputError, ProgramError, StepFailed
from csc.ir.mesh import Mesh
from csc.runtime.launch import setup_distributed
from csc.runtime.loaded_program import LoadedProgram, load
from csc.runtime.meeting import NOTHING
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from tests.launching import PATIENCE


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
    endpoint.finish_sum(endpoint.start_sum(value, (0, 1, 2), "test", ordered=True))
    assert value == 1.0

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


def axis(directory: Path, out: Path, *others: Path) -> None:
    """Two ranks of one axis: all that ranks check of each other, do together, and do once."""
    starts(directory, *others)
    program = load(directory)
    trainer = compare(program)
    batch = handmade.batch(program.manifest.microbatches * program.manifest.mesh.dp)
    loss, expected = handmade.eager(handmade.weights(), batch)
    trainer.zero_grad()
    torch.testing.assert_close(trainer.train_step(batch), loss)
    assert list(gradients(trainer)) == ["embed", "w0"]
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name])
    norm = torch.cat([expected[name].flatten() for name in ("embed", "w0")]).norm()
    torch.testing.assert_close(trainer.clip_grad_norm_(1e9), norm)

    trainer.save(out)
    with safe_open(out / "model.safetensors", "pt") as file:  # one rank has written it, and the other one nothing
        assert sorted(file.keys()) == sorted(handmade.SHAPES) and [one.name for one in out.iterdir()] == [
            "model.safetensors"
        ]
    with torch.no_grad():
        for parameter in trainer.state_dict().values():
            parameter += 1
    trainer.load(out)
    into = {name: torch.zeros_like(value) for name, value in handmade.weights().items()}
    trainer.collect(into)
    for name, value in handmade.weights().items():
        assert torch.equal(trainer.state_dict()[name], value) and torch.equal(into[name], value), name


def starts(directory: Path, *others: Path) -> None:
    """Two ranks start from other values, or from other files: both say so."""
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


def fails(directory: Path, out: Path) -> None:
    """Steps that fail on one rank fail on all, and the next one is that of a run without them, bit for bit."""
    rank = torch.distributed.get_rank()
    program = load(directory)
    trainer, local = Trainer(program, timeout=PATIENCE), Trainer(program, transport=InProcess(program))

    def same(seed: int) -> None:
        batch = handmade.batch(4, seed)
        assert torch.equal(trainer.train_step(batch), local.train_step(batch))
        for (name, mine), (_, expected) in zip(gradients(trainer).items(), held(), strict=True):
            assert torch.equal(mine, expected), name

    def held() -> list[tuple[str, torch.Tensor]]:
        own = dict(trainer.named_parameters())
        return [(name, p.grad) for name, p in local.named_parameters() if name in own and p.grad is not None]

    def failing(call: Callable[[], object], at: int, kind: type[BaseException], part: str) -> None:
        """`at`: the rank that fails with an error of this kind, which the others tell of."""
        before = gradients(trainer)
        try:
            call()
        except BaseException as error:
            wanted = kind if rank == at else StepFailed
            said = f"rank {at} failed in step {trainer.transport.meeting.step}: " if rank != at else ""
            assert type(error) is wanted and said in str(error) and part in str(error), (rank, repr(error))
            if rank == at:
                assert any("fails on every rank" in note for note in error.__notes__)
        else:
            raise AssertionError("nothing was raised")
        assert before.keys() == gradients(trainer).keys()
        assert all(torch.equal(g, before[n]) for n, g in gradients(trainer).items())

    same(0)
    bad = handmade.batch(4)
    bad["ids"][-1, -1] = handmade.VOCABULARY  # of the last microbatch: those before have passed all stages
    failing(lambda: trainer.train_step(bad), 0, IndexError, "out of")
    same(1)
    wrong = handmade.batch(4) | ({"tokens": torch.zeros(8, 5)} if rank == 2 else {})
    failing(lambda: trainer.train_step(wrong), 2, InputError, "key 'tokens' is not an input")
    same(2)
    for at, call in ((1, "forward"), (1, "backward_weight"), (2, "loss_tokens"), (0, "backward_input")):
        if rank == at:
            os.environ["TEST_STOPS"] = call
        failing(lambda: trainer.train_step(handmade.batch(4)), at, KeyboardInterrupt, "" if rank == at else "stopped")
        same(3)
    longer = {name: torch.cat([value, value]) for name, value in handmade.batch(4).items()}
    for batch, part in ((longer, "expected shape"),):
        failing(lambda batch=batch: trainer.train_step(batch if rank == 1 else handmade.batch(4)), 1, InputError, part)
    other = "rank 0 and rank 2 were given batches of the same sizes with other tokens"
    refused(lambda: trainer.train_step(handmade.batch(4, 9 if rank == 2 else 3)), other)
    for call in (lambda: trainer.clip_grad_norm_(1.0), lambda: trainer.save(out)):
        refused(lambda call=call: call() if rank == 1 else trainer.train_step(handmade.batch(4)), "rank 0 is at 'train")
    trainer.save(out)
    saved = sorted(out.iterdir())
    part = (
        "a file is where a directory is to be made"
        if rank == 1
        else "rank 1 failed at 'the shards of what is saved' after step"
    )
    refused(lambda: trainer.save(out / "file" if rank == 1 else out), part)
    trainer.transport.meeting.hold("a look", lambda: (NOTHING, None))  # all have removed what they had written
    assert sorted(out.iterdir()) == saved
    same(4)

    with ThreadPoolExecutor(1) as pool, trainer.transport.meeting.turn("train_step"):
        refused(pool.submit(trainer.train_step, handmade.batch(4)).result, "another thread of this process")
    same(5)
    meeting = trainer.transport.meeting
    if rank == 2:  # stopped after it has agreed to a step, before it begins
        with contextlib.suppress(KeyboardInterrupt), meeting.turn("train_step"):
            meeting.hold("train_step", lambda: trainer.ready(handmade.batch(4)))
            raise KeyboardInterrupt
    else:
        refused(lambda: trainer.train_step(handmade.batch(4)), "went away while this rank was at")
    refused(lambda: trainer.train_step(handmade.batch(4)), "the group of ranks is broken since something went wrong in")


def refused(call: Callable[[], object], part: str) -> None:
    try:
        call()
    except CscError as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"nobody said {part!r}")


def meshed(mesh: Mesh) -> LoadedProgram:
    """A program as far as a transport in this process looks at it."""
    return cast(LoadedProgram, SimpleNamespace(manifest=SimpleNamespace(mesh=mesh)))


@contextlib.contextmanager
def started(program: LoadedProgram) -> Iterator[Trainer]:
    """A trainer on one of several processes."""
    setup_distributed(timeout=PATIENCE)
    torch.set_num_threads(1)
    yield Trainer(program)
    torch.distributed.destroy_process_group()


def run(case: str, *directories: Path) -> None:
    setup_distributed(timeout=PATIENCE)
    torch.set_num_threads(1)
    cases: list[Callable[..., None]] = [stages, replicas, disagree, axis, fails]
    {one.__name__: one for one in cases}[case](*directories)
    torch.distributed.destroy_process_group()
