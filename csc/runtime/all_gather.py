"""Values made whole where the spread part of a component ends, and their gradients brought back to shards.

Terms
  shard    a rank's tokens of a value along one dimension; slots behind them are padding that never leaves the rank
  part     of the gradient of a whole: what one rank's work adds to it; the sum over the group is the gradient

    AllGather(group, where, shard, device)
    .gather(x, dim) -> whole                 an all-gather of shards of unequal length
    .sum_to_shards(d_whole, dim) -> dx       its reduce-scatter; padding gets zeros

Parts are added in ascending order of ranks: the bits do not depend on timing.
"""

from __future__ import annotations

import torch

from csc.kernels.operators import exact
from csc.runtime.exchange import Membership, Places, count, places
from csc.runtime.spread import Spread


class AllGather:
    """One rank of a group, one spread of the tokens."""

    def __init__(self, group: Membership, where: Spread, shard: int, device: torch.device) -> None:
        self._group, self._shard = group, shard
        self._tokens = sum(map(len, where.tokens))
        self._places: list[Places] = [places(own, device) for own in where.tokens]

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x: `shard` slots along `dim`. Returns all tokens along it, contiguous."""
        me = self._group.index
        own = x.narrow(dim, 0, count(self._places[me])).contiguous()
        receives = {
            rank: [x.new_empty(_resized(x, dim, count(self._places[rank])))] for rank in self._group.others
        }  # fmt: skip
        ticket = self._group.start({rank: [own] for rank in self._group.others}, receives, "tokens of a whole value")
        whole = x.new_empty(_resized(x, dim, self._tokens))
        _put(whole, dim, self._places[me], own)
        for rank, (arrived,) in self._group.finish(ticket).items():
            _put(whole, dim, self._places[rank], arrived)
        return whole

    def sum_to_shards(self, d_whole: torch.Tensor, dim: int) -> torch.Tensor:
        """d_whole: this rank's part, all tokens along `dim`. Returns `shard` slots along it, contiguous."""
        me = self._group.index
        sends = {rank: [_taken(d_whole, dim, self._places[rank])] for rank in self._group.others}
        own = _taken(d_whole, dim, self._places[me])
        receives = {rank: [torch.empty_like(own)] for rank in self._group.others}
        parts = {rank: given[0] for rank, given in self._group.finish(
            self._group.start(sends, receives, "gradients of a whole value")).items()}  # fmt: skip
        parts[me] = own
        first, *rest = (parts[rank] for rank in sorted(parts))
        total = first.to(exact(first.dtype), copy=True)
        for part in rest:
            total += part
        found = d_whole.new_zeros(_resized(d_whole, dim, self._shard))
        found.narrow(dim, 0, own.shape[dim]).copy_(total)
        return found


def _resized(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _put(whole: torch.Tensor, dim: int, chosen: Places, given: torch.Tensor) -> None:
    if isinstance(chosen, slice):
        whole.narrow(dim, chosen.start, count(chosen)).copy_(given)
    else:
        whole.index_copy_(dim, chosen, given)


def _taken(whole: torch.Tensor, dim: int, chosen: Places) -> torch.Tensor:
    if isinstance(chosen, slice):
        return whole.narrow(dim, chosen.start, count(chosen)).contiguous()
    return whole.index_select(dim, chosen)
