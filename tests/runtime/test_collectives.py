"""Collectives as operators: on ranks that take turns in one process, and over gloo, against plain sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import handmade
import pytest
import torch
import worker
from context_cases import on_ranks
from csc.kernels import collectives

from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.runtime.loaded_program import load
from csc.runtime.transport import InProcess, Met
from csc.runtime.transport import Membership as Members
from csc.torch_private.traces import FakeTensorMode
from tests.launching import ranks

csc = torch.ops.csc
SHAPE = (4, 12, 3)
EACH = 2  # ranks of a sub-group
# operator on (x, group, its ranks), (result on rank r of x on all ranks), (gradient there of those on all ranks)
Whole = Callable[[list[torch.Tensor], int], torch.Tensor]


def own(rank: int, ranks: int) -> slice:
    """The slots of six samples that a rank has."""
    return slice(rank * (size := -(-6 // ranks)), (rank + 1) * size)


CASES: dict[str, tuple[Callable[..., torch.Tensor], Whole, Whole]] = {
    "all_reduce": (lambda x, g, n: csc.all_reduce(x, g), lambda xs, r: sum(xs), lambda ds, r: ds[r]),
    "share": (lambda x, g, n: csc.share(x, g), lambda xs, r: xs[r], lambda ds, r: sum(ds)),
    "own_part": (
        lambda x, g, n: csc.own_part(x, 1, 6, n, True, g),
        lambda xs, r: (
            xs[r].unflatten(1, (6, 2))[:, [min(i, 5) for i in range(6 * 2)]][:, own(r, len(xs))].flatten(1, 2)
        ),
        lambda ds, r: torch.cat(ds, 1)[:, :12],
    ),
    "all_gather": (
        lambda x, g, n: csc.all_gather(x, 0, 4 * n - 1, n, g),
        lambda xs, r: torch.cat(xs)[:-1],
        lambda ds, r: torch.cat([ds[r], torch.zeros_like(ds[r][:1])]).chunk(len(ds))[r],
    ),
    "reduce_scatter": (
        lambda x, g, n: csc.reduce_scatter(x, 1, 6, n, True, g),
        lambda xs, r: CASES["own_part"][1]([sum(xs)] * len(xs), r),
        lambda ds, r: torch.cat(ds, 1)[:, :12],
    ),
    "gather_shared": (
        lambda x, g, n: csc.gather_shared(x, 0, 4 * n - 1, n, g),
        lambda xs, r: torch.cat(xs)[:-1],
        lambda ds, r: torch.cat([sum(ds), torch.zeros_like(ds[r][:1])]).chunk(len(ds))[r],
    ),
    "gather_pieces": (
        lambda x, g, n: csc.gather_pieces(x, g, 1, EACH),
        lambda xs, r: torch.cat(xs[r // EACH * EACH :][:EACH], 1),
        lambda ds, r: torch.stack(ds[r // EACH * EACH :][:EACH]).sum(0).chunk(EACH, 1)[r % EACH],
    ),
}  # type: ignore[dict-item]


def values(name: str, count: int, transposed: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each rank gives, and the gradient of what it gets; whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(len(name))
    xs = [torch.randint(-9, 9, SHAPE, generator=generator).float() for _ in range(count)]
    shape = CASES[name][1](xs, 0).shape
    ds = [torch.randint(-9, 9, shape, generator=generator).float() for _ in range(count)]
    return [x.transpose(0, 2).contiguous().transpose(0, 2) if transposed else x for x in xs], ds


def check(name: str, met: Met, rank: int, transposed: bool = False) -> None:
    """Forward and backward of one rank."""
    call, expected, gradient = CASES[name]
    xs, ds = values(name, met.ranks, transposed)
    with torch.enable_grad():
        x = xs[rank].requires_grad_()
        result = call(x, met.number, met.ranks)
        (dx,) = torch.autograd.grad(result, x, ds[rank])
    assert torch.equal(result, expected([x.detach() for x in xs], rank)) and result.is_contiguous()
    assert torch.equal(dx, gradient(ds, rank)) and dx.is_contiguous()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4, "dp": 2}, {"cp": 2, "tp": 1}, {"cp": 2, "tp": 2}], ids=str)
def test_among_threads_that_take_turns(name: str, sizes: dict[str, int]) -> None:
    """Several groups at once, each with its own sums."""
    mesh, what = Mesh(**sizes), Group.LAYER
    transport = InProcess(worker.meshed(mesh))

    def work(rank: int) -> None:
        members = mesh.group(what, rank)
        met = Met(Members(transport.endpoint(rank), members.index(rank), members))
        for transposed in (False, True):
            check(name, met, members.index(rank), transposed)

    on_ranks(transport, work)


@pytest.mark.gloo
def test_over_gloo(tmp_path: Path) -> None:
    ranks(over_gloo, 2, handmade.write(tmp_path / "p", placement=(0, 0, 0), tp=2))


def over_gloo(directory: Path) -> None:
    """One of two ranks."""
    with worker.started(load(directory)) as trainer:
        rank = trainer.transport.ranks[0]
        met = Met(Members(trainer.transport.endpoint(rank), rank, (0, 1)))
        for name in CASES:
            check(name, met, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "WORTH_A_LATENCY", 0)  # an all-reduce in two exchanges
            check("all_reduce", met, rank)
        trainer.transport.endpoint(rank).drain()


@pytest.mark.parametrize("name", CASES)
def test_fakes_say_what_comes_out(name: str) -> None:
    call, expected, gradient = CASES[name]
    xs, ds = values(name, 2)
    with FakeTensorMode():
        x, group = torch.empty(SHAPE, requires_grad=True), torch.zeros((), dtype=torch.int64)
        result = call(x, group, 2)
        (dx,) = torch.autograd.grad(result, x, torch.empty(ds[0].shape))
    assert result.shape == expected(xs, 0).shape and result.is_contiguous()
    assert dx.shape == gradient(ds, 0).shape and dx.is_contiguous()


def test_halves_are_summed_in_single() -> None:
    """1 and three times half of what bfloat16 can add to it: rounded once, not three times."""
    mesh = Mesh(tp=4)
    transport = InProcess(worker.meshed(mesh))

    def work(rank: int) -> list[float]:
        met = Met(Members(transport.endpoint(rank), rank, mesh.group(Group.TENSOR, rank)))
        part = torch.full((4,), 2.0**-8 if rank else 1.0, dtype=torch.bfloat16)
        return list(csc.all_reduce(part, met.number).tolist())

    assert on_ranks(transport, work) == [[1 + 2.0**-6] * 4] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", [{"tp": 3}, {"tp": 4, "dp": 2}], ids=str)
def test_a_large_sum_has_the_bits_of_a_small_one(sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Each rank sums a piece of it. At once, and begun before and finished after another."""
    mesh, entries = Mesh(**sizes), 2**20 + 5
    transport = InProcess(worker.meshed(mesh))
    generator = torch.Generator().manual_seed(0)
    given = [(99 * torch.randn(entries, generator=generator)).to(dtype)[:, None] for _ in range(mesh.tp)]
    assert collectives.arriving(given[0].nbytes, mesh.tp)[0] == 2

    def work(rank: int) -> list[torch.Tensor]:
        members = mesh.group(Group.TENSOR, rank)
        met = Met(Members(transport.endpoint(rank), members.index(rank), members))
        own, small = given[met.index], given[met.index][:7]
        ticket, other = csc.start_all_reduce(own, met.number), csc.start_all_reduce(small, met.number)
        apart = csc.finish_all_reduce(own, ticket, met.number), csc.finish_all_reduce(small, other, met.number)
        return [csc.all_reduce(own, met.number), *apart]

    total = collectives.summed(given)
    for whole, apart, small in on_ranks(transport, work):
        assert torch.equal(whole, total) and torch.equal(apart, total) and torch.equal(small, total[:7])
        assert whole.is_contiguous()


def test_what_comes_to_a_rank_in_a_sum() -> None:
    """Two exchanges where they spare a mebibyte: never between two ranks."""
    assert collectives.arriving(2**30, 2) == (1, 2**30)
    assert collectives.arriving(2**18, 4) == (1, 3 * 2**18)
    assert collectives.arriving(2**30, 8) == (2, 2**30 * 7 / 4)


def test_what_cannot_be() -> None:
    x, nobody = torch.ones(3), torch.tensor(10**9)
    with pytest.raises(RuntimeError, match="a collective runs on the ranks of a compiled program only"):
        csc.all_reduce(x, nobody)
