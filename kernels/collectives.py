"""Collectives of a group of ranks, as operators that a graph can hold, with the gradient that their types ask for.

    csc::all_reduce(x, group) -> total                       parts -> equal; backward: nothing, the gradient is equal
    csc::share(x, group) -> x                                equal -> shared; backward: an all-reduce
    csc::all_gather(x, group, dim, ranks) -> whole           shard -> shared; backward: a reduce-scatter
    csc::reduce_scatter(x, group, dim, ranks) -> shard       parts -> shard; backward: an all-gather
    csc::all_to_all(x, group, cut, joined, ranks) -> y       shard of `joined` -> shard of `cut`; backward: the way back

Terms: see csc.ir.groups; *shared* is equal, but read by calls that differ from rank to rank, so that its gradient is
parts. Shards are equally long and lie along `dim` in the order of the ranks. Parts are added in that order, in float32
or float64: every rank has the same bits. group: the number of a `Meeting`, whose group has `ranks` ranks.

    numbered(meeting) -> number            int64 without dimensions; as long as the meeting lives
    meeting_of(number) -> meeting          RuntimeError if it is none, or gone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from csc.kernels.memory_layout import exact
from csc.kernels.numbered import Numbered


class Meeting(Protocol):
    """One rank's place in a group of `ranks` ranks, over whatever its transport is. index: which of them it is."""

    ranks: int
    index: int

    def exchange(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """tensors: contiguous, one for each rank of the group, this one included, all of one shape. Returns what each
        has for this one, in the same order: to be read only.
        """


_MEETINGS: Numbered[Meeting] = Numbered("a collective runs on the ranks of a compiled program only")
numbered = _MEETINGS.number
meeting_of = _MEETINGS.find
csc = torch.ops.csc


def _divided(x: torch.Tensor, dim: int, ranks: int) -> int:
    if x.shape[dim] % ranks:
        raise ValueError(f"dimension {dim} of {list(x.shape)} does not divide by {ranks} ranks")
    return x.shape[dim] // ranks


def _resized(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    return x.new_empty([sizes.get(dim, size) for dim, size in enumerate(x.shape)])


def _chunks(x: torch.Tensor, dim: int, ranks: int) -> list[torch.Tensor]:
    return [chunk.contiguous() for chunk in x.split(_divided(x, dim, ranks), dim)]


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *rest = parts
    total = first.to(exact(first.dtype) if first.is_floating_point() else first.dtype, copy=True)
    for part in rest:
        total += part
    return total.to(first.dtype)


@torch.library.custom_op("csc::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    meeting = _MEETINGS.find(group)
    return _sum(meeting.exchange([x.contiguous()] * meeting.ranks))


@torch.library.custom_op("csc::share", mutates_args=())
def _share(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_all_reduce.register_fake
@_share.register_fake
def _(x: Any, group: Any) -> Any:
    return _resized(x, {})


@torch.library.custom_op("csc::all_gather", mutates_args=())
def _all_gather(x: torch.Tensor, group: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    return torch.cat(list(_MEETINGS.find(group).exchange([x.contiguous()] * ranks)), dim)


@_all_gather.register_fake
def _(x: Any, group: Any, dim: int, ranks: int) -> Any:
    return _resized(x, {dim: x.shape[dim] * ranks})


@torch.library.custom_op("csc::reduce_scatter", mutates_args=())
def _reduce_scatter(x: torch.Tensor, group: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    return _sum(_MEETINGS.find(group).exchange(_chunks(x, dim, ranks)))


@_reduce_scatter.register_fake
def _(x: Any, group: Any, dim: int, ranks: int) -> Any:
    return _resized(x, {dim: _divided(x, dim, ranks)})


@torch.library.custom_op("csc::all_to_all", mutates_args=())
def _all_to_all(x: torch.Tensor, group: torch.Tensor, cut: int, joined: int, ranks: int) -> torch.Tensor:
    return torch.cat(list(_MEETINGS.find(group).exchange(_chunks(x, cut, ranks))), joined)


@_all_to_all.register_fake
def _(x: Any, group: Any, cut: int, joined: int, ranks: int) -> Any:
    return _resized(x, {cut: _divided(x, cut, ranks), joined: x.shape[joined] * ranks})


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, group, *ctx.rest = inputs
    ctx.save_for_backward(group)


_all_reduce.register_autograd(lambda ctx, d: (csc.share(d, *ctx.saved_tensors), None), setup_context=_remember)
_share.register_autograd(lambda ctx, d: (csc.all_reduce(d, *ctx.saved_tensors), None), setup_context=_remember)
_all_gather.register_autograd(
    lambda ctx, d: (csc.reduce_scatter(d, *ctx.saved_tensors, *ctx.rest), None, None, None), setup_context=_remember
)
_reduce_scatter.register_autograd(
    lambda ctx, d: (csc.all_gather(d, *ctx.saved_tensors, *ctx.rest), None, None, None), setup_context=_remember
)


def _returned(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
    cut, joined, ranks = ctx.rest
    return csc.all_to_all(d, *ctx.saved_tensors, joined, cut, ranks), None, None, None, None


_all_to_all.register_autograd(_returned, setup_context=_remember)

ALL_REDUCE = torch.ops.csc.all_reduce.default
SHARE = torch.ops.csc.share.default
