"""What an emitted program asks of a context-parallel group: attention over the tokens of all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from csc.errors import InputError
from csc.ir.groups import CONTEXT
from csc.kernels import attention as kernels
from csc.kernels import packing
from csc.kernels.context import numbered
from csc.kernels.mask import Mask
from csc.kernels.operators import exact, heads_last
from csc.planning.dispatch.workload import ALL_GATHER, HEADS
from csc.runtime.rank import Rank
from csc.runtime.specs import ContextSpec
from csc.runtime.transport import (
    AttentionPart,
    Membership,
    Places,
    Spread,
    Tensors,
    added,
    attention_part,
    backward,
    count,
    empty_blocks,
    forward,
    in_blocks,
    in_heads,
    parts,
    places,
    put,
    room,
    taken,
)

# --- Attention where keys come to queries ----------------------------------------------------------------------------
#
# Each rank attends from its own queries to its own keys, then to foreign ones.
#
# Terms
#   lent       blocks of this rank's keys that another rank attends to
#   borrowed   blocks of other ranks' keys; they come by rank and are put in the order of tokens
#
# Who lends what is worked out once and serves all layers of a mask. Foreign keys travel while the own part runs, in
# both passes; in the backward, half of it waits until gradients of foreign keys travel back, where they take long
# enough by the model. A rank adds the gradients that come back in ascending order of ranks: the bits do not depend on
# timing.


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
        tokens, half = where.tokens[me], shard // where.block // 2 * where.block
        if (
            self._own is not None
            and 0 < half < len(tokens)
            and _worth_splitting(self._own, where, sum(map(len, lent.values())))
        ):
            cuts = (slice(0, half), slice(half, shard))
            self._early, self._late = (
                [(cut, attention_part(mask, tokens[cut], cut.stop - cut.start, tokens, shard, blocks, device))]
                for cut in cuts
            )

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
        dqs, own_gradients = list[torch.Tensor](), list[Tensors]()

        def attend(arrived: list[tuple[slice, AttentionPart]]) -> None:
            for slots, part in arrived:
                dq, *shards = backward(d_out, q, k[:, :, slots], v[:, :, slots], out, lse, part, scale, softcap)
                dqs.append(dq)
                own_gradients.append(shards)

        attend(self._early)
        foreign_k, foreign_v = self._arrived(coming)
        gradients: list[torch.Tensor] = []
        if self._foreign is not None:
            dq, *gradients = backward(d_out, q, foreign_k, foreign_v, out, lse, self._foreign, scale, softcap)
            dqs.append(dq)
        returning = self._give_back(gradients, k)
        attend(self._late)
        totals = [_side_by_side([shards[i] for shards in own_gradients], like) for i, like in enumerate((k, v))]
        dq = _summed(dqs, q)
        for index, arrived in self._group.finish(returning).items():
            for total, shard in zip(totals, arrived):
                added(in_blocks(total, self._block), self._lent[index], shard)
        return dq, totals[0].to(k.dtype), totals[1].to(v.dtype)

    def _ask(self, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Send the keys and values that others attend to, and announce those that this rank does."""
        sends: dict[int, Tensors] = {}
        if self._lent:
            sources = [in_blocks(tensor, self._block) for tensor in (k, v)]
            if self._views:
                sends = {r: [taken(tensor, chosen) for tensor in sources] for r, chosen in self._lent.items()}
            else:
                sends = self._split([tensor.index_select(0, self._lent_together) for tensor in sources], self._lent)
        into = [empty_blocks(k, count(self._back), self._block) for _ in range(2)]
        receives = {r: [room(buffer, chosen) for buffer in into] for r, chosen in self._borrowed.items()}
        return into, self._group.start(sends, receives, "keys and values")

    def _arrived(self, coming: tuple[Tensors, Any]) -> Tensors:
        """Foreign keys and values in ascending order of tokens."""
        into, ticket = coming
        for index, shards in self._group.finish(ticket).items():
            for total, shard in zip(into, shards):
                put(total, self._borrowed[index], shard)
        return [in_heads(buffer) for buffer in into]

    def _give_back(self, gradients: Tensors, k: torch.Tensor) -> Any:
        """Send each owner the gradients of its keys, and announce those of the lent ones."""
        sends: dict[int, Tensors] = {}
        if gradients:
            sends = self._split(
                [taken(in_blocks(gradient, self._block), self._back) for gradient in gradients], self._borrowed
            )
        batch, heads, _, width = k.shape
        receives = {}
        for r, chosen in self._lent.items():
            shape = (count(chosen), batch, self._block, heads, width)
            receives[r] = [k.new_empty(shape) for _ in range(2)]
        return self._group.start(sends, receives, "gradients of keys")

    @staticmethod
    def _split(tensors: Tensors, chosen: dict[int, Any]) -> dict[int, Tensors]:
        """Blocks that were taken for several ranks at once, by rank."""
        cut = [tensor.split([count(some) for some in chosen.values()]) for tensor in tensors]
        return dict(zip(chosen, zip(*cut)))


def _worth_splitting(own_part: AttentionPart, where: Spread, lent: int) -> bool:
    """Whether half of the own part, run while gradients of lent keys come back, hides more than it costs."""
    rates = where.dispatch.prepared.workload.rates
    _, tiles = packing.unpack(own_part.packed, own_part.form)
    size = own_part.form.block_q * own_part.form.block_k / where.block**2
    load = float(tiles.of_queries.counts[..., 1].sum()) / len(own_part.packed) * size
    compute = load * rates.tile_seconds * rates.backward_compute / 2
    return min(compute, lent * rates.block_seconds * rates.backward_communication / 2) > SPLITTING


def _side_by_side(shards: Tensors, like: torch.Tensor) -> torch.Tensor:
    """What the parts of the own keys got, one after the other, in the dtype that sums are taken in."""
    if not shards:
        return heads_last(like, exact(like.dtype)).zero_()
    if len(shards) == 1:
        return shards[0].to(exact(like.dtype))
    joined = heads_last(like, exact(like.dtype))
    for place, shard in zip(joined.split([shard.shape[2] for shard in shards], 2), shards):
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


# --- Attention where ranks divide the heads: each attends from all queries to all keys of some heads (Ulysses) -------
#
# Terms
#   heads of a rank    H / P heads of queries; of keys Hkv / P, or one that P / Hkv ranks have a copy of
#
# Before attention every rank gives the others their heads of its tokens, afterwards it gets its tokens back: what
# moves falls with the number of ranks, but nothing is computed while it does. Gradients of copied keys are added in
# the order of ranks, so the bits do not depend on timing.


class AllToAll:
    """One rank, one mask of the whole sequence."""

    def __init__(
        self, group: Membership, where: Spread, mask: Mask, blocks: tuple[int, int], device: torch.device
    ) -> None:
        self._group, self._block, self._ranks = group, where.block, len(group.members)
        self._places = [places(where.blocks(rank), device) for rank in range(self._ranks)]
        self._blocks = sum(map(count, self._places))
        tokens, padded = torch.arange(mask.keys), self._blocks * where.block
        self._whole = attention_part(mask, tokens, padded, tokens, padded, blocks, device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float) -> Pair:
        """q: [B, H, shard, D]; k, v: [B, Hkv, shard, D]."""
        heads_q, heads_k, heads_v = self._to_heads([q, k, v], "heads of queries, keys and values")
        out, lse = forward(heads_q, heads_k, heads_v, self._whole, scale, softcap)
        outs, lses = self._to_tokens([out, lse[..., None]], "outputs of heads")
        whole_lse = q.new_full(q.shape[:3], -float("inf"), dtype=lse.dtype)
        self._fill(whole_lse[..., None], lses)
        return self._filled(q, outs), whole_lse

    def backward(
        self, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, scale: float, softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of this rank's q, k and v."""
        tensors = [d_out, q, k, v, out, lse[..., None]]
        d_out, q_heads, k_heads, v_heads, out, lse = self._to_heads(tensors, "heads of gradients and their sources")
        gradients = backward(d_out, q_heads, k_heads, v_heads, out, lse[..., 0], self._whole, scale, softcap)
        dqs, dks, dvs = self._to_tokens(gradients, "gradients of heads")
        return self._filled(q, dqs), self._gradient(k, dks), self._gradient(v, dvs)

    def _heads_of(self, heads: int) -> Callable[[int], slice]:
        """Which of so many heads a rank has."""
        if heads % self._ranks == 0:
            heads_each = heads // self._ranks
            return lambda rank: slice(rank * heads_each, rank * heads_each + heads_each)
        if self._ranks % heads == 0:
            return lambda rank: slice(rank * heads // self._ranks, rank * heads // self._ranks + 1)
        fault = f"{heads} heads cannot be divided over {self._ranks} ranks"
        raise InputError(fault, "context parallelism over heads", "Let csc choose, or take another number of ranks")

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
        receives = {rank: [room(buffer, self._places[rank]) for buffer in into] for rank in self._group.others}
        for rank, arrived in self._group.finish(self._group.start(leaving, receives, why)).items():
            for buffer, tensor in zip(into, arrived):
                put(buffer, self._places[rank], tensor)
        return [in_heads(buffer) for buffer in into]

    def _to_tokens(self, tensors: Tensors, why: str) -> list[list[torch.Tensor]]:
        """[B, its heads, all tokens, D] -> of each tensor, this rank's blocks as they come from each rank."""
        mine = count(self._places[self._group.index])
        sources = [in_blocks(x, self._block) for x in tensors]
        cut = [[taken(tensor, chosen) for tensor in sources] for chosen in self._places]
        sends = {rank: cut[rank] for rank in self._group.others}
        receives = {
            rank: [tensor.new_empty((mine, *tensor.shape[1:])) for tensor in sources] for rank in self._group.others
        }
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
        total = [torch.stack([chunk.to(exact(like.dtype)) for chunk in chunks[i * copies : i * copies + copies]]).sum(0)
                 for i in range(heads)]  # fmt: skip
        return self._filled(like, total)


# --- Values made whole where the spread part of a component ends, and their gradients brought back to shards ---------
#
# Terms
#   shard    a rank's tokens of a value along one dimension; slots behind them are padding that never leaves the rank
#   part     of the gradient of a whole: what one rank's work adds to it; the sum over the group is the gradient
#
# Parts are added in ascending order of ranks: the bits do not depend on timing.


class AllGather:
    """One rank of a group, one spread of the tokens."""

    def __init__(self, group: Membership, where: Spread, shard: int, device: torch.device) -> None:
        self._group, self._shard = group, shard
        self._tokens = sum(map(len, where.tokens))
        self._places: list[Places] = [places(tokens, device) for tokens in where.tokens]

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x: `shard` slots along `dim`. Returns all tokens along it, contiguous."""
        me = self._group.index
        shard = x.narrow(dim, 0, count(self._places[me])).contiguous()
        receives = {
            rank: [x.new_empty(_resized(x, dim, count(self._places[rank])))] for rank in self._group.others
        }  # fmt: skip
        ticket = self._group.start({rank: [shard] for rank in self._group.others}, receives, "tokens of a whole value")
        gathered = x.new_empty(_resized(x, dim, self._tokens))
        _put(gathered, dim, self._places[me], shard)
        for rank, (arrived,) in self._group.finish(ticket).items():
            _put(gathered, dim, self._places[rank], arrived)
        return gathered

    def sum_to_shards(self, d_whole: torch.Tensor, dim: int) -> torch.Tensor:
        """d_whole: this rank's part, all tokens along `dim`. Returns `shard` slots along it, contiguous."""
        me = self._group.index
        sends = {rank: [_taken(d_whole, dim, self._places[rank])] for rank in self._group.others}
        shard_gradient = _taken(d_whole, dim, self._places[me])
        receives = {rank: [torch.empty_like(shard_gradient)] for rank in self._group.others}
        parts = {rank: received[0] for rank, received in self._group.finish(
            self._group.start(sends, receives, "gradients of a whole value")).items()}  # fmt: skip
        parts[me] = shard_gradient
        first, *rest = (parts[rank] for rank in sorted(parts))
        total = first.to(exact(first.dtype), copy=True)
        for part in rest:
            total += part
        summed = d_whole.new_zeros(_resized(d_whole, dim, self._shard))
        summed.narrow(dim, 0, shard_gradient.shape[dim]).copy_(total)
        return summed


def _resized(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _put(whole: torch.Tensor, dim: int, chosen: Places, values: torch.Tensor) -> None:
    if isinstance(chosen, slice):
        whole.narrow(dim, chosen.start, count(chosen)).copy_(values)
    else:
        whole.index_copy_(dim, chosen, values)


def _taken(whole: torch.Tensor, dim: int, chosen: Places) -> torch.Tensor:
    if isinstance(chosen, slice):
        return whole.narrow(dim, chosen.start, count(chosen)).contiguous()
    return whole.index_select(dim, chosen)


# --- What an emitted program asks of a context-parallel group --------------------------------------------------------
#
# A program asks for attention over the tokens of all its ranks, and for wholes.
#
# A rank computes its own queries; how they meet the keys of other ranks is chosen by the model, the same way on every
# rank (docs/dispatch.md): keys come to the ranks whose queries see them, or to all, or ranks
# divide the heads. Plans hold nothing of a microbatch but its masks: those with equal masks
# share one. A component's group is the part of the cp axis, or of the tp axis, that its tokens are spread over.


def attach(rank: Rank, microbatch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The microbatch with its plans, by component, under the key CONTEXT."""
    specs = contexts(rank)
    if not specs:
        return microbatch
    return {**microbatch, CONTEXT: {spec.component: _plan(spec, rank, microbatch) for spec in specs}}


def prepare(rank: Rank, microbatch: Mapping[str, Any]) -> None:
    """Plan a microbatch and all that its attention will ask for, as far as the steps before have shown it.

    microbatch: of its entries, those that masks are made of.
    """
    for spec in contexts(rank):
        _plan(spec, rank, microbatch).prepare()


def contexts(rank: Rank) -> list[ContextSpec]:
    """The components of whose tokens the rank's stages have shards."""
    components = {name for stage in rank.stages for name in stage.contexts}
    return [spec for spec in rank.program.manifest.contexts if spec.component in components]


def _plan(spec: ContextSpec, rank: Rank, batch: Mapping[str, Any]) -> ContextPlan:
    masks = [_mask(spec, tensors) for tensors in rank.visibility[spec.component](batch, rank.constants)]
    known = rank.endpoint.recent.of(spec, masks)
    if rank.rank not in known.plans:
        known.plans.setdefault(rank.rank, ContextPlan(spec, known.masks, known.spread, rank))
    plan: ContextPlan = known.plans[rank.rank]
    return plan


def _mask(spec: ContextSpec, tensors: tuple[torch.Tensor | None, ...]) -> Mask:
    """The mask of the whole sequence on the CPU; one that shows everything where there is none."""
    ranges, admits, kinds = (None if tensor is None else tensor.cpu() for tensor in tensors)
    if ranges is None:
        ranges = torch.tensor([0, spec.tokens], dtype=torch.int32).expand(1, 1, spec.tokens, 2)
    return Mask(ranges, admits, kinds, spec.tokens)


class ContextPlan:
    """One rank's view of how microbatches with certain masks are spread. tokens: int64 [shard], the rank's tokens by
    slot. real: bool [shard], which slots hold one. plan: int64, the number by which csc::context_attention and its like
    find it.

    collective: "exact", "all-gather" or "heads" (csc.planning.dispatch.workload); None takes the cheapest by
        the model.
    """

    def __init__(
        self, spec: ContextSpec, masks: Sequence[Mask], where: Spread, rank: Rank, collective: str | None = None
    ) -> None:
        self._spec, self._masks, self._spread, self._collective = spec, masks, where, collective
        self._device = rank.device
        members = rank.sharing(spec)
        self._group = Membership(rank.endpoint, members.index(rank.rank), members)
        self._exchanges: dict[Any, KVExchange | AllToAll] = {}
        self._asked = rank.endpoint.recent.asked.setdefault(spec, set())
        self._all_gather = AllGather(self._group, where, spec.shard, rank.device)
        tokens = where.tokens[self._group.index]
        padded = torch.zeros(spec.shard, dtype=torch.int64)
        padded[: len(tokens)] = tokens
        self.plan = numbered(self)
        self.tokens = padded.to(rank.device)
        self.real = (torch.arange(spec.shard) < len(tokens)).to(rank.device)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: int, scale: float, softcap: float
    ) -> Pair:
        """q: [B, H, shard, D]; k, v: [B, Hkv, shard, D] of this rank. Returns what csc::attention returns."""
        return self._exchange(mask, q, k).forward(q, k, v, scale, softcap)

    def attention_backward(
        self, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, mask: int, scale: float, softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of this rank's q, k and v."""
        return self._exchange(mask, q, k).backward(d_out, q, k, v, out, lse, scale, softcap)

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A shard, whose slots count along `dim`, as the whole value: the same on every rank of the group."""
        return self._all_gather.gather(x, dim)

    def gather_backward(self, d_whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's shard of the sum, over the group, of the ranks' parts of the gradient of the whole."""
        return self._all_gather.sum_to_shards(d_whole, dim)

    def own(self, x: torch.Tensor, dim: int, repeat: bool) -> torch.Tensor:
        """This rank's slots of a value with all tokens; those without one repeat token 0, or are zeros."""
        taken_tokens = x.index_select(dim, self.tokens)
        return (
            taken_tokens if repeat else taken_tokens * self.real.view([-1 if d == dim else 1 for d in range(x.dim())])
        )

    def _exchange(self, mask: int, q: torch.Tensor, k: torch.Tensor) -> KVExchange | AllToAll:
        """How queries meet keys under a mask; made when first asked for, the same for all layers like this one."""
        key = (mask, q.shape[1], k.shape[1], q.shape[3], q.dtype)
        if key not in self._exchanges:
            self._asked.add(key)
            self._exchanges[key] = self._made(*key)
        return self._exchanges[key]

    def prepare(self) -> None:
        """Make what plans like this one have been asked for."""
        for key in list(self._asked):
            if key not in self._exchanges:
                self._exchanges[key] = self._made(*key)

    def _made(self, mask: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> KVExchange | AllToAll:
        chosen = self._collective or self._spread.collective(heads, kv_heads)
        blocks = kernels.blocks(self._device, width, dtype)
        if chosen == HEADS:
            return AllToAll(self._group, self._spread, self._masks[mask], blocks, self._device)
        return KVExchange(
            self._group, self._spread, mask, self._masks[mask], self._spec.shard, blocks, self._device,
            everything=chosen == ALL_GATHER,
        )  # fmt: skip
