"""Attention where keys come to queries: each rank attends from its own queries to its own keys, then to foreign ones.

Terms
  lent       blocks of this rank's keys that another rank attends to
  borrowed   blocks of other ranks' keys; they come by rank and are put in the order of tokens

    KVExchange(group, where, number, mask, shard, blocks, device, everything)
    .forward(q, k, v, scale, softcap) -> (out, lse)
    .backward(d_out, q, k, v, out, lse, scale, softcap) -> (dq, dk, dv)

Who lends what is worked out once and serves all layers of a mask. Foreign keys travel while the own part runs, in both
passes; in the backward, half of it waits until gradients of foreign keys travel back, where they take long enough by
the model. A rank adds the gradients that come back in ascending order of ranks: the bits do not depend on timing.
"""

from __future__ import annotations

from typing import Any

import torch

from csc.kernels import packing
from csc.kernels.mask import Mask
from csc.kernels.operators import exact, heads_last
from csc.runtime.exchange import (
    Membership,
    Tensors,
    added,
    count,
    empty_blocks,
    in_blocks,
    in_heads,
    places,
    put,
    room,
    taken,
)
from csc.runtime.spread import AttentionPart, Spread, backward, forward, part, parts

Pair = tuple[torch.Tensor, torch.Tensor]
SPLITTING = 1e-4  # seconds that must be hidden to run a part as two: launches and one more sum; assumed, not measured


class KVExchange:
    """One rank, one mask. everything: all keys go to all ranks (all-gather), else each rank gets what it sees."""

    def __init__(
        self, group: Membership, where: Spread, number: int, mask: Mask, shard: int, blocks: tuple[int, int],
        device: torch.device, everything: bool,
    ) -> None:  # fmt: skip
        me = group.index
        self._group, self._block = group, where.block
        self._own, self._foreign = parts(mask, where, number, me, shard, blocks, device, everything)
        self._early = [] if self._own is None else [(slice(0, shard), self._own)]
        self._late: list[tuple[slice, AttentionPart]] = []
        held = {(to, of): where.held(None if everything else number, to, of)
                for r in group.others for to, of in ((r, me), (me, r))}  # fmt: skip
        lent = {r: torch.searchsorted(where.blocks(me), held[r, me]) for r in group.others if len(held[r, me])}
        self._lent = {r: places(one, device) for r, one in lent.items()}
        self._views = all(isinstance(one, slice) for one in self._lent.values())
        self._lent_together = torch.cat([*lent.values(), torch.empty(0, dtype=torch.int64)]).to(device)
        borrowed = {r: held[me, r] for r in group.others if len(held[me, r])}
        ordered = torch.cat([*borrowed.values(), torch.empty(0, dtype=torch.int64)]).sort().values
        back = {r: torch.searchsorted(ordered, one) for r, one in borrowed.items()}
        self._borrowed = {r: places(one, device) for r, one in back.items()}
        self._back = places(torch.cat([*back.values(), torch.empty(0, dtype=torch.int64)]), device)
        own, half = where.tokens[me], shard // where.block // 2 * where.block
        if (
            self._own is not None
            and 0 < half < len(own)
            and _worth_splitting(self._own, where, sum(map(len, lent.values())))
        ):
            cuts = (slice(0, half), slice(half, shard))
            self._early, self._late = ([(cut, part(mask, own[cut], cut.stop - cut.start, own, shard, blocks, device))]
                                       for cut in cuts)  # fmt: skip

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float) -> Pair:
        """q: [B, H, shard, D]; k, v: [B, Hkv, shard, D]."""
        coming = self._ask(k, v)
        results = [forward(q, k, v, self._own, scale, softcap)] if self._own is not None else []
        foreign_k, foreign_v = self._arrived(coming)
        if self._foreign is not None:
            results.append(forward(q, foreign_k, foreign_v, self._foreign, scale, softcap))
        return _joined(results, q)

    def backward(
        self, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scale: float, softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of this rank's q, k and v. Each part is given the whole output and log-sum-exp."""
        coming = self._ask(k, v)
        dqs, own = list[torch.Tensor](), list[Tensors]()

        def attend(arrived: list[tuple[slice, AttentionPart]]) -> None:
            for slots, one in arrived:
                dq, *shards = backward(d_out, q, k[:, :, slots], v[:, :, slots], out, lse, one, scale, softcap)
                dqs.append(dq)
                own.append(shards)

        attend(self._early)
        foreign_k, foreign_v = self._arrived(coming)
        given: list[torch.Tensor] = []
        if self._foreign is not None:
            dq, *given = backward(d_out, q, foreign_k, foreign_v, out, lse, self._foreign, scale, softcap)
            dqs.append(dq)
        returning = self._give_back(given, k)
        attend(self._late)
        totals = [_side_by_side([shards[i] for shards in own], like) for i, like in enumerate((k, v))]
        dq = _summed(dqs, q)
        for index, arrived in self._group.finish(returning).items():
            for total, shard in zip(totals, arrived):
                added(in_blocks(total, self._block), self._lent[index], shard)
        return dq, totals[0].to(k.dtype), totals[1].to(v.dtype)

    def _ask(self, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Send the keys and values that others attend to, and announce those that this rank does."""
        sends: dict[int, Tensors] = {}
        if self._lent:
            sources = [in_blocks(one, self._block) for one in (k, v)]
            if self._views:
                sends = {r: [taken(one, chosen) for one in sources] for r, chosen in self._lent.items()}
            else:
                sends = self._split([one.index_select(0, self._lent_together) for one in sources], self._lent)
        into = [empty_blocks(k, count(self._back), self._block) for _ in range(2)]
        receives = {r: [room(one, chosen) for one in into] for r, chosen in self._borrowed.items()}
        return into, self._group.start(sends, receives, "keys and values")

    def _arrived(self, coming: tuple[Tensors, Any]) -> Tensors:
        """Foreign keys and values in ascending order of tokens."""
        into, ticket = coming
        for index, shards in self._group.finish(ticket).items():
            for total, shard in zip(into, shards):
                put(total, self._borrowed[index], shard)
        return [in_heads(one) for one in into]

    def _give_back(self, gradients: Tensors, k: torch.Tensor) -> Any:
        """Send each owner the gradients of its keys, and announce those of the lent ones."""
        sends: dict[int, Tensors] = {}
        if gradients:
            sends = self._split([taken(in_blocks(one, self._block), self._back) for one in gradients], self._borrowed)
        batch, heads, _, width = k.shape
        receives = {}
        for r, chosen in self._lent.items():
            shape = (count(chosen), batch, self._block, heads, width)
            receives[r] = [k.new_empty(shape) for _ in range(2)]
        return self._group.start(sends, receives, "gradients of keys")

    @staticmethod
    def _split(tensors: Tensors, chosen: dict[int, Any]) -> dict[int, Tensors]:
        """Blocks that were taken for several ranks at once, by rank."""
        cut = [one.split([count(some) for some in chosen.values()]) for one in tensors]
        return dict(zip(chosen, zip(*cut)))


def _worth_splitting(own: AttentionPart, where: Spread, lent: int) -> bool:
    """Whether half of the own part, run while gradients of lent keys come back, hides more than it costs."""
    rates = where.dispatch.prepared.workload.rates
    _, tiles = packing.unpack(own.packed, own.form)
    size = own.form.block_q * own.form.block_k / where.block**2
    load = float(tiles.of_queries.counts[..., 1].sum()) / len(own.packed) * size
    compute = load * rates.tile_seconds * rates.backward_compute / 2
    return min(compute, lent * rates.block_seconds * rates.backward_communication / 2) > SPLITTING


def _side_by_side(shards: Tensors, like: torch.Tensor) -> torch.Tensor:
    """What the parts of the own keys got, one after the other, in the dtype that sums are taken in."""
    if not shards:
        return heads_last(like, exact(like.dtype)).zero_()
    if len(shards) == 1:
        return shards[0].to(exact(like.dtype))
    joined = heads_last(like, exact(like.dtype))
    for place, shard in zip(joined.split([one.shape[2] for one in shards], 2), shards):
        place.copy_(shard)
    return joined


def _summed(dqs: Tensors, q: torch.Tensor) -> torch.Tensor:
    if not dqs:
        return heads_last(q).zero_()
    total = dqs[0]
    if len(dqs) > 1:
        total = total.to(exact(q.dtype))
        for more in dqs[1:]:
            total.add_(more)
    return total.to(q.dtype)


def _joined(results: list[Pair], q: torch.Tensor) -> Pair:
    """One softmax over all parts: each part's output weighed by its share of the exponentials."""
    if not results:
        return heads_last(q).zero_(), q.new_full(q.shape[:3], -float("inf"), dtype=exact(q.dtype))
    if len(results) == 1:
        return results[0]
    (first, first_lse), (second, second_lse) = results
    weight = torch.sigmoid(first_lse - second_lse).nan_to_num_(0.0)[..., None]  # rows that see nothing: inf - inf
    wide = weight.dtype
    if q.dtype == wide:
        return second.lerp_(first, weight), torch.logaddexp(first_lse, second_lse)
    joined = heads_last(q)
    joined.copy_(torch.lerp(second.to(wide), first.to(wide), weight))
    return joined, torch.logaddexp(first_lse, second_lse)
