"""Attention where keys come to queries: each rank attends from its own queries to its own keys, then to foreign ones.

Terms
  lent       blocks of this rank's keys that another rank attends to
  borrowed   blocks of other ranks' keys; they come by rank and are put in the order of tokens

    Keys(group, where, number, mask, share, blocks, device, everything)
    .forward(q, k, v, scale, softcap) -> (out, lse)
    .backward(d_out, q, k, v, out, lse, scale, softcap) -> (dq, dk, dv)

Who lends what is worked out once and serves all layers of a mask. Foreign keys travel while the own part runs, in both
passes; a rank adds the gradients that come back in ascending order of ranks, so the bits do not depend on timing.
"""

from __future__ import annotations

from typing import Any

import torch

from csc.kernels.layout import exact, heads_last
from csc.kernels.mask import Mask
from csc.runtime.exchange import (
    Group,
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
from csc.runtime.spread import Spread, backward, forward, parts

Pair = tuple[torch.Tensor, torch.Tensor]


class Keys:
    """One rank, one mask. everything: all keys go to all ranks (all-gather), else each rank gets what it sees."""

    def __init__(
        self, group: Group, where: Spread, number: int, mask: Mask, share: int, blocks: tuple[int, int],
        device: torch.device, everything: bool,
    ) -> None:  # fmt: skip
        me = group.piece
        self._group, self._block = group, where.block
        self._own, self._foreign = parts(mask, where, number, me, share, blocks, device, everything)
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

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float) -> Pair:
        """q: [B, H, share, D]; k, v: [B, Hkv, share, D]."""
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
        dq: torch.Tensor | None = None
        own: list[torch.Tensor] = []
        if self._own is not None:
            dq, *own = backward(d_out, q, k, v, out, lse, self._own, scale, softcap)
        foreign_k, foreign_v = self._arrived(coming)
        given: list[torch.Tensor] = []
        if self._foreign is not None:
            more, *given = backward(d_out, q, foreign_k, foreign_v, out, lse, self._foreign, scale, softcap)
        returning = self._give_back(given, k)
        if self._foreign is not None:  # while the gradients of keys travel
            dq = more if dq is None else dq.to(exact(q.dtype)).add_(more).to(q.dtype)
        dq = heads_last(q).zero_() if dq is None else dq
        totals = [one.to(exact(k.dtype)) for one in own or (heads_last(k).zero_(), heads_last(v).zero_())]
        for piece, shares in self._group.finish(returning).items():
            for total, share in zip(totals, shares):
                added(in_blocks(total, self._block), self._lent[piece], share)
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
        for piece, shares in self._group.finish(ticket).items():
            for total, share in zip(into, shares):
                put(total, self._borrowed[piece], share)
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


def _joined(results: list[Pair], q: torch.Tensor) -> Pair:
    """One softmax over all parts: each part's output weighed by its share of the exponentials."""
    if not results:
        return heads_last(q).zero_(), q.new_full(q.shape[:3], -float("inf"), dtype=exact(q.dtype))
    if len(results) == 1:
        return results[0]
    (first, first_lse), (second, second_lse) = results
    weight = torch.sigmoid(first_lse - second_lse).nan_to_num_(0.0)[..., None]  # rows that see nothing: inf - inf
    wide, joined = weight.dtype, heads_last(q)
    joined.copy_(torch.lerp(second.to(wide), first.to(wide), weight))
    return joined, torch.logaddexp(first_lse, second_lse)
