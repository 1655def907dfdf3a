"""Attention where ranks divide the heads: each attends from all queries to all keys of some heads (Ulysses).

Terms
  heads of a rank    H / P heads of queries; of keys Hkv / P, or one that P / Hkv ranks have a copy of

    AllToAll(group, where, mask, blocks, device)
    .forward(q, k, v, scale, softcap) -> (out, lse)
    .backward(d_out, q, k, v, out, lse, scale, softcap) -> (dq, dk, dv)

Before attention every rank gives the others their heads of its tokens, afterwards it gets its tokens back: what moves
falls with the number of ranks, but nothing is computed while it does. Gradients of copied keys are added in the order
of ranks, so the bits do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.kernels.operators import exact, heads_last
from csc.runtime.exchange import Membership, Tensors, count, empty_blocks, in_blocks, in_heads, places, put, room, taken
from csc.runtime.spread import Spread, backward, forward, part

Pair = tuple[torch.Tensor, torch.Tensor]


class AllToAll:
    """One rank, one mask of the whole sequence."""

    def __init__(
        self, group: Membership, where: Spread, mask: Mask, blocks: tuple[int, int], device: torch.device
    ) -> None:
        self._group, self._block, self._ranks = group, where.block, len(group.members)
        self._places = [places(where.blocks(rank), device) for rank in range(self._ranks)]
        self._blocks = sum(map(count, self._places))
        tokens, padded = torch.arange(mask.keys), self._blocks * where.block
        self._whole = part(mask, tokens, padded, tokens, padded, blocks, device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float) -> Pair:
        """q: [B, H, shard, D]; k, v: [B, Hkv, shard, D]."""
        heads_q, heads_k, heads_v = self._to_heads([q, k, v], "heads of queries, keys and values")
        out, lse = forward(heads_q, heads_k, heads_v, self._whole, scale, softcap)
        outs, lses = self._to_tokens([out, lse[..., None]], "outputs of heads")
        found = q.new_full(q.shape[:3], -float("inf"), dtype=lse.dtype)
        self._fill(found[..., None], lses)
        return self._filled(q, outs), found

    def backward(
        self, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scale: float, softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of this rank's q, k and v."""
        tensors = [d_out, q, k, v, out, lse[..., None]]
        d_out, q_heads, k_heads, v_heads, out, lse = self._to_heads(tensors, "heads of gradients and their sources")
        found = backward(d_out, q_heads, k_heads, v_heads, out, lse[..., 0], self._whole, scale, softcap)
        dqs, dks, dvs = self._to_tokens(found, "gradients of heads")
        return self._filled(q, dqs), self._gradient(k, dks), self._gradient(v, dvs)

    def _heads_of(self, heads: int) -> Callable[[int], slice]:
        """Which of so many heads a rank has."""
        if heads % self._ranks == 0:
            each = heads // self._ranks
            return lambda rank: slice(rank * each, rank * each + each)
        if self._ranks % heads == 0:
            return lambda rank: slice(rank * heads // self._ranks, rank * heads // self._ranks + 1)
        what = f"{heads} heads cannot be divided over {self._ranks} ranks"
        raise InputError(what, "context parallelism over heads", "Let csc choose, or take another number of ranks")

    def _to_heads(self, tensors: Tensors, why: str) -> list[torch.Tensor]:
        """[B, H, shard, D] of this rank's tokens -> [B, its heads, all tokens, D], for each tensor."""
        me, mine = self._group.index, count(self._places[self._group.index])
        into: list[torch.Tensor] = []
        leaving: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._group.others}
        for x in tensors:
            heads, blocks = self._heads_of(x.shape[1]), in_blocks(x, self._block)[:mine]
            into.append(empty_blocks(x[:, heads(me)], self._blocks, self._block))
            put(into[-1], self._places[me], blocks[:, :, :, heads(me)])
            for rank, sent in leaving.items():
                sent.append(blocks[:, :, :, heads(rank)])
        receives = {rank: [room(one, self._places[rank]) for one in into] for rank in self._group.others}
        for rank, arrived in self._group.finish(self._group.start(leaving, receives, why)).items():
            for one, given in zip(into, arrived):
                put(one, self._places[rank], given)
        return [in_heads(one) for one in into]

    def _to_tokens(self, tensors: Tensors, why: str) -> list[list[torch.Tensor]]:
        """[B, its heads, all tokens, D] -> of each tensor, this rank's blocks as they come from each rank."""
        mine = count(self._places[self._group.index])
        sources = [in_blocks(x, self._block) for x in tensors]
        cut = [[taken(one, chosen) for one in sources] for chosen in self._places]
        sends = {rank: cut[rank] for rank in self._group.others}
        receives = {rank: [one.new_empty((mine, *one.shape[1:])) for one in sources] for rank in self._group.others}
        arrived = self._group.finish(self._group.start(sends, receives, why))
        by_rank = [arrived.get(rank, cut[rank]) for rank in range(self._ranks)]
        return [[some[i] for some in by_rank] for i in range(len(tensors))]

    def _fill(self, x: torch.Tensor, chunks: Tensors) -> None:
        """Write the heads that came from the ranks into [B, H, shard, D], up to this rank's last block."""
        heads = torch.cat(list(chunks), 3)
        in_blocks(x, self._block)[: len(heads)] = heads

    def _filled(self, like: torch.Tensor, chunks: Tensors) -> torch.Tensor:
        filled = heads_last(like).zero_()
        self._fill(filled, chunks)
        return filled

    def _gradient(self, like: torch.Tensor, chunks: Tensors) -> torch.Tensor:
        """Of keys or values; those of copies of a head are added."""
        heads = like.shape[1]
        if heads >= self._ranks:
            return self._filled(like, chunks)
        copies = self._ranks // heads
        total = [torch.stack([one.to(exact(like.dtype)) for one in chunks[i * copies : i * copies + copies]]).sum(0)
                 for i in range(heads)]  # fmt: skip
        return self._filled(like, total)
