"""What an emitted program asks of a context-parallel group: attention over the tokens of all its ranks, and wholes.

    attach(rank, microbatch) -> the microbatch with {component: ContextPlan}     nothing to do with cp = 1
    prepare(rank, microbatch)                               the same plans ahead of the step, for `attach` to find
    plan.tokens, .real          int64 [shard], bool [shard]: the rank's tokens by slot; which slots hold one
    plan.plan                   int64: its number, by which csc::context_attention and its like find it
    plan.attention(q, k, v, mask, scale, softcap) -> (out, lse)
    plan.attention_backward(d_out, q, k, v, out, lse, mask, scale, softcap) -> (dq, dk, dv)
    plan.gather(x, dim) -> whole                plan.gather_backward(d_whole, dim) -> dx
    plan.own(x, dim, repeat) -> shard           of what is equal on all ranks of the group

A rank computes its own queries; how they meet the keys of other ranks is chosen by the model, the same way on every
rank (docs/dispatch.md): keys come to the ranks whose queries see them, or to all (csc.runtime.kv_exchange), or
ranks divide the heads (csc.runtime.all_to_all). Plans hold nothing of a microbatch but its masks: those with equal
masks share one. A component's group is the part of the cp axis, or of the tp axis, that its tokens are spread over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from csc.ir.groups import CONTEXT
from csc.kernels import attention as kernels
from csc.kernels.context import numbered
from csc.kernels.mask import Mask
from csc.planning.dispatch.workload import ALL_GATHER, HEADS
from csc.runtime.all_gather import AllGather
from csc.runtime.all_to_all import AllToAll
from csc.runtime.exchange import Membership
from csc.runtime.kv_exchange import KVExchange
from csc.runtime.rank import Rank
from csc.runtime.specs import ContextSpec
from csc.runtime.spread import Spread

Pair = tuple[torch.Tensor, torch.Tensor]


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
    asked = {name for stage in rank.stages for name in stage.contexts}
    return [spec for spec in rank.program.manifest.contexts if spec.component in asked]


def _plan(spec: ContextSpec, rank: Rank, batch: Mapping[str, Any]) -> ContextPlan:
    masks = [_mask(spec, given) for given in rank.visibility[spec.component](batch, rank.constants)]
    known = rank.endpoint.recent.of(spec, masks)
    if rank.rank not in known.plans:
        known.plans.setdefault(rank.rank, ContextPlan(spec, known.masks, known.spread, rank))
    plan: ContextPlan = known.plans[rank.rank]
    return plan


def _mask(spec: ContextSpec, given: tuple[torch.Tensor | None, ...]) -> Mask:
    """The mask of the whole sequence on the CPU; one that shows everything where there is none."""
    ranges, admits, kinds = (None if tensor is None else tensor.cpu() for tensor in given)
    if ranges is None:
        ranges = torch.tensor([0, spec.tokens], dtype=torch.int32).expand(1, 1, spec.tokens, 2)
    return Mask(ranges, admits, kinds, spec.tokens)


class ContextPlan:
    """One rank's view of how microbatches with certain masks are spread.

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
        own = where.tokens[self._group.index]
        padded = torch.zeros(spec.shard, dtype=torch.int64)
        padded[: len(own)] = own
        self.plan = numbered(self)
        self.tokens = padded.to(rank.device)
        self.real = (torch.arange(spec.shard) < len(own)).to(rank.device)

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
        own = x.index_select(dim, self.tokens)
        return own if repeat else own * self.real.view([-1 if d == dim else 1 for d in range(x.dim())])

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
