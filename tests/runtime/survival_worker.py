"""One rank of a job in which ranks are killed, or stopped.

main(directory, mesh, faults)       writes losses and weights; faults: who is killed where
Fault(rank, step, place, times)     at the times-th time that the rank is at a place of a step, by its words
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import csc
from csc.driver.compiled import CompiledModel
from csc.errors import InputError, RankLost
from csc.runtime import joining
from tests.compiler import small

STEPS, MICROBATCHES = 5, 2


class Fault(NamedTuple):
    """signal: what the rank sends itself."""

    rank: int
    step: int
    place: str
    times: int = 1
    signal: int = int(signal.SIGKILL)


def samples(mesh: csc.Mesh) -> list[dict[str, torch.Tensor]]:
    """The batch of each step: all tokens are others."""
    batch = small.text_batch(2 * mesh.dp * MICROBATCHES)
    return [
        {name: torch.where(one < 0, one, (one + 5 * step) % small.VOCABULARY) for name, one in batch.items()}
        for step in range(STEPS)
    ]


def compiled_for(
    mesh: csc.Mesh, survive: int | csc.Survive | None, timeout: float = 60.0, zero: int = 0
) -> CompiledModel:
    """A model of two layers, with dropout: its masks are those of a microbatch, wherever that is computed."""
    torch.manual_seed(0)
    compiled = csc.compile(
        small.dropped(), mesh=mesh, example=samples(mesh)[0], microbatches=MICROBATCHES, schedule="1f1b", check=False,
        survive=survive, timeout=timeout, zero=zero,
    )  # fmt: skip
    assert isinstance(compiled, CompiledModel)
    return compiled


def trained(compiled: CompiledModel, mesh: csc.Mesh, losses: list[float], save: Path | None = None) -> None:
    """Some steps; losses: of each, as they come."""
    optimizer = compiled.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)  # Adam makes steps of rounding errors
    torch.manual_seed(1)
    for batch in samples(mesh):
        loss = compiled.train_step(batch)
        compiled.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if save is not None:
            compiled.save(save)
    if save is not None:
        csc.CheckpointManager(f"{save}_run", compiled, optimizer=optimizer).save(STEPS)


def strike(compiled: CompiledModel, faults: list[Fault], losses: list[float], directory: Path) -> None:
    """Have this rank end where its faults say."""
    rank = int(os.environ["RANK"])
    own = [Fault(*one) for one in faults if one[0] == rank]
    places = compiled.trainer().transport.meeting.positions
    seen: dict[Fault, int] = {}
    inner = type(places).moved

    def moved(self: Any, place: Any) -> None:
        for fault in own:
            if place is not None and len(losses) == fault.step and fault.place in str(place):
                seen[fault] = seen.get(fault, 0) + 1
                if seen[fault] == fault.times:
                    (directory / f"killed_{rank}.txt").write_text(str(time.time()))
                    os.kill(os.getpid(), fault.signal)
        inner(self, place)

    type(places).moved = moved  # type: ignore[method-assign]


def beside_the_store(*arguments: Any) -> None:
    """As `main`, with the store where processes find each other in rank 0: it dies with that, as with torchrun's agent
    of the first node.
    """
    outer = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    if os.environ["RANK"] == "0":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outer.set("port", str(store.port))
    os.environ["MASTER_PORT"] = outer.get("port").decode()
    main(*arguments)


def main(
    directory: Path, mesh: str, faults: list[Fault], survive: int | csc.Survive = 1, saves: bool = False, zero: int = 0
) -> None:
    """Train, and tell what came of it."""
    rank, of = int(os.environ["RANK"]), csc.Mesh.parse(mesh)
    compiled = compiled_for(of, survive, zero=zero)
    compiled.compile_for(samples(of)[0])
    losses: list[float] = []
    strike(compiled, faults, losses, directory)
    try:
        trained(compiled, of, losses, directory / "saved" if saves else None)
    except SystemExit as end:
        assert not end.code
        (directory / f"spare_{rank}.txt").touch()
        return
    survival: Any = compiled.trainer().transport.meeting.survival  # none where a pipeline has gone on without a rank
    compiled.trainer().own.refresh()
    weights = {name: p.detach().tolist() for name, p in compiled.trainer().own.values.items()}
    told = {"losses": losses, "weights": weights}
    if survival is not None:
        told |= {"recoveries": survival.recoveries, "dead": survival.deaths.dead}
    (directory / f"told_{rank}.json").write_text(json.dumps(told))


def mirrored(directory: Path, mesh: str, faults: list[Fault], zero: int = 0, check: bool = False) -> None:
    """All that ranks with mirrors take with them when they lose one: weights that were read, frozen and tied ones, two
    groups of an optimizer with momenta and a schedule of its rate, gradients of a step before, evaluation. It writes
    the losses, norms and weights; in one process without faults.
    """
    of, rank = csc.Mesh.parse(mesh), os.environ.get("RANK", "alone")
    model = small.dropped()
    model.head.weight = model.embed.weight
    compiled = csc.compile(
        model, mesh=mesh, example=samples(of)[0], microbatches=MICROBATCHES, schedule="1f1b", check=check, zero=zero,
        freeze=["*qkv.bias"], survive=csc.Survive(1, mirror=True),
    )  # fmt: skip
    compiled.load(directory.parent / "start.safetensors")
    if faults:
        with pytest.raises(InputError, match=r"no optimizer was made with compiled\.optimizer"):
            compiled.train_step(samples(of)[0])
    named = list(compiled.named_parameters())
    groups = [{"params": [pair for pair in named if ("mlp" in pair[0]) == is_mlp]} for is_mlp in (True, False)]
    optimizer = compiled.optimizer(torch.optim.SGD, groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses: list[float] = []
    torch.manual_seed(1)
    figures = [float(compiled.train_step(samples(of)[1], microbatches=1))]  # by another trainer than the others
    optimizer.step()
    optimizer.zero_grad()
    if faults:
        strike(compiled, faults, losses, directory)
    for step, batch in enumerate(samples(of)):
        figures.append(float(compiled.train_step(batch)))
        losses.append(float(compiled.train_step(samples(of)[step - 1])))
        figures.append(float(compiled.clip_grad_norm_(0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
        figures.append(float(compiled.eval_step(batch)))
    compiled.save(directory / "saved", optimizer=optimizer)
    weights = {name: value.tolist() for name, value in compiled.gather().state_dict().items()}
    told = [losses, figures, optimizer.param_groups[0]["lr"], weights, str(compiled.options.mesh)]
    (directory / f"told_{rank}.json").write_text(json.dumps(told))


def beside_a_stopped_rank(directory: Path, mesh: str, faults: list[Fault]) -> None:
    """Train until the job ends in a sentence, which is written; then end the ranks that are stopped."""
    rank, of = int(os.environ["RANK"]), csc.Mesh.parse(mesh)
    (directory / f"pid_{rank}.txt").write_text(str(os.getpid()))
    compiled = compiled_for(of, 1, timeout=8.0)  # longer than a rank may say nothing
    compiled.compile_for(samples(of)[0])
    strike(compiled, faults, losses := [], directory)
    began = time.monotonic()
    try:
        trained(compiled, of, losses)
    except RankLost as lost:
        (directory / f"said_{rank}.json").write_text(json.dumps([str(lost), time.monotonic() - began]))
    for fault in (Fault(*one) for one in faults):
        if fault.signal == signal.SIGSTOP:
            os.kill(int((directory / f"pid_{fault.rank}.txt").read_text()), signal.SIGKILL)


def rejoining(directory: Path, mesh: str, victims: list[int], zero: int = 0) -> None:
    """Train; each victim kills itself once, the first one before its third step, the next one two steps after that. The
    others train on without it for a step, and wait before the next one until all that were lost ask to be taken up.
    """
    rank, of = int(os.environ["RANK"]), csc.Mesh.parse(mesh)
    compiled = compiled_for(of, 1, zero=zero)
    done = compiled.rejoin()
    optimizer = compiled.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    if not done:
        torch.manual_seed(1)
    losses = []
    for step in range(done, 2 * len(victims) + 3):
        turn, is_odd = divmod(step - 2, 2)
        mark = directory / f"killed_{turn}"
        if not is_odd and 0 <= turn < len(victims) and victims[turn] == rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if is_odd and 0 <= turn < len(victims):
            _wait_for_lost(compiled)
        losses.append(float(compiled.train_step(samples(of)[step % STEPS])))
        compiled.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    compiled.trainer().own.refresh()
    weights = {name: p.detach().tolist() for name, p in compiled.trainer().own.values.items()}
    (directory / f"told_{rank}.json").write_text(json.dumps([done, losses, weights]))


def refused(directory: Path) -> None:
    """The second of two ranks is killed and started again, in a job that trains with an optimizer that csc does not
    know: it hears why it is not taken up, and the first one trains on.
    """
    rank, of = int(os.environ["RANK"]), csc.Mesh.parse("dp=2")
    compiled = compiled_for(of, 1)
    try:
        compiled.rejoin()
    except InputError as error:
        (directory / "refused.txt").write_text(str(error))
        return
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(STEPS):
        if rank and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2:
            _wait_for_lost(compiled)
        compiled.train_step(samples(of)[step])
        optimizer.step()
        optimizer.zero_grad()
    (directory / "done.txt").touch()


def _wait_for_lost(compiled: CompiledModel) -> None:
    survival: Any = compiled.trainer().transport.meeting.survival
    lost = [rank for rank in range(compiled.options.mesh.size) if rank not in survival.members]
    store = survival._store_of(survival.members[0])
    while lost and not joining.all_ask(store, lost):  # they may be there again already
        time.sleep(0.05)
