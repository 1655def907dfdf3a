"""Attention over the tokens of a context-parallel group: what an emitted program calls as `plan.attention(...)`.

A rank computes its own queries. Keys that its mask lets them see and that other ranks hold come from those ranks, no
others do. While they are on their way the rank attends to its own keys; the two parts are joined by their
log-sum-exps. Backward asks for the keys again and sends dK and dV back the same way; a rank adds what comes in
ascending order of ranks, so the bits do not depend on timing.

    attach(rank, microbatches) -> microbatches with "context": a Plan each      nothing to do with cp = 1
    Plan.tokens, .real          int64 [share], bool [share]: the rank's tokens by slot; which slots hold one
    Plan.attention(q, k, v, mask, scale, softcap) -> (out, lse)
    Plan.attention_backward(d_out, q, k, v, out, lse, mask, scale, softcap) -> (dq, dk, dv)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from csc.kernels import attention as kernels
from csc.kernels.layout import exact, heads_last
from csc.kernels.mask import Mask
from csc.runtime.rank import Rank
from csc.runtime.specs import ContextSpec
from csc.runtime.spread import Part, Spread, parts, spread
from csc.runtime.transport import Endpoint

Pair = tuple[torch.Tensor, torch.Tensor]


def attach(rank: Rank, microbatches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The microbatches with the plan of each under the key "context"."""
    spec = rank.program.manifest.context
    if spec is None or rank.visibility is None or not any(stage.context for stage in rank.stages):
        return list(microbatches)
    planned: list[Mapping[str, Any]] = []
    for batch in microbatches:
        masks = [_mask(spec, given) for given in rank.visibility(batch, rank.constants)]
        planned.append({**batch, "context": Plan(spec, masks, spread(spec, masks), rank)})
    return planned


def _mask(spec: ContextSpec, given: tuple[torch.Tensor | None, ...]) -> Mask:
    """The mask of the whole sequence on the CPU; one that shows everything where there is none."""
    ranges, admits, kinds = (None if tensor is None else tensor.cpu() for tensor in given)
    if ranges is None:
        ranges = torch.tensor([0, spec.tokens], dtype=torch.int32).expand(1, 1, spec.tokens, 2)
    return Mask(ranges, admits, kinds, spec.tokens)


class Plan:
    """One rank's view of how one microbatch is spread."""

    def __init__(self, spec: ContextSpec, masks: Sequence[Mask], where: Spread, rank: Rank) -> None:
        self._spec, self._masks, self._spread = spec, masks, where
        self._endpoint: Endpoint = rank.endpoint
        self._device = rank.device
        self._piece = rank.piece
        self._peers = {r: member for r, member in enumerate(rank.context_group) if r != rank.piece}
        self._parts: dict[tuple[int, tuple[int, int]], tuple[Part | None, Part | None]] = {}
        self._slot_of = torch.zeros(spec.tokens, dtype=torch.int64)
        own = where.tokens[self._piece]
        self._slot_of[own] = torch.arange(len(own))
        padded = torch.zeros(spec.share, dtype=torch.int64)
        padded[: len(own)] = own
        self.tokens = padded.to(rank.device)
        self.real = (torch.arange(spec.share) < len(own)).to(rank.device)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: int, scale: float, softcap: float
    ) -> Pair:
        """q: [B, H, share, D]; k, v: [B, Hkv, share, D] of this rank. Returns what csc::attention returns."""
        own, foreign = self._both(mask, q)
        coming = self._ask(mask, k, v)
        results = []
        if own is not None:
            results.append(_forward(q, *self._own(own, k, v), own, scale, softcap))
        arrived = self._arrived(mask, coming, k)
        if foreign is not None:
            results.append(_forward(q, *arrived, foreign, scale, softcap))
        return _joined(results, q)

    def attention_backward(
        self, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, mask: int, scale: float, softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradients of this rank's q, k and v. Each part is given the whole output and log-sum-exp."""
        own, foreign = self._both(mask, q)
        coming = self._ask(mask, k, v)
        sums = [torch.zeros_like(heads_last(x), dtype=exact(x.dtype)) for x in (q, k, v)]
        if own is not None:
            dq, *kept = _backward(d_out, q, *self._own(own, k, v), out, lse, own, scale, softcap)
            sums[0] += dq
            slots = self._slots(own.keys)
            for total, share in zip(sums[1:], kept):
                total.index_add_(2, slots, share.to(total.dtype))
        arrived = self._arrived(mask, coming, k)
        found: Pair = (arrived[0].new_zeros(arrived[0].shape), arrived[1].new_zeros(arrived[1].shape))
        if foreign is not None:
            dq, *given = _backward(d_out, q, *arrived, out, lse, foreign, scale, softcap)
            found = (given[0], given[1])
            sums[0] += dq
        for slots, pair in self._give_back(mask, found, k):
            for total, share in zip(sums[1:], pair):
                total.index_add_(2, slots, share.to(total.dtype))
        return tuple(total.to(x.dtype) for total, x in zip(sums, (q, k, v)))  # type: ignore[return-value]

    # parts

    def _both(self, mask: int, q: torch.Tensor) -> tuple[Part | None, Part | None]:
        """(own, foreign) keys of a mask; made when first asked for, the same for all layers."""
        blocks = kernels.blocks(self._device, q.shape[-1], q.dtype)
        if (mask, blocks) not in self._parts:
            self._parts[mask, blocks] = parts(
                self._masks[mask], self._spread, mask, self._piece, self._spec.share, blocks, self._device
            )
        return self._parts[mask, blocks]

    def _slots(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._slot_of[tokens].to(self._device)

    def _own(self, own: Part, k: torch.Tensor, v: torch.Tensor) -> Pair:
        slots = self._slots(own.keys)
        return k.index_select(2, slots), v.index_select(2, slots)

    # messages

    def _ask(self, mask: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Send the keys and values that others need, and announce those that this rank needs."""
        sends, receives = {}, {}
        for r, member in self._peers.items():
            wanted = self._slots(self._spread.held(mask, r, self._piece))
            if len(wanted):
                sends[member] = torch.stack([k.index_select(2, wanted), v.index_select(2, wanted)])
            count = len(self._spread.held(mask, self._piece, r))
            if count:
                receives[member] = k.new_empty((2, *k.shape[:2], count, k.shape[3]))
        return self._endpoint.start_exchange(sends, receives, "keys and values")

    def _arrived(self, mask: int, coming: Any, k: torch.Tensor) -> Pair:
        """Foreign keys and values in ascending order of tokens."""
        arrived = self._endpoint.finish_exchange(coming)
        pieces = [arrived[member] for member in self._peers.values() if member in arrived]
        if not pieces:
            empty = k.new_empty((*k.shape[:2], 0, k.shape[3]))
            return empty, empty
        tokens = torch.cat([self._spread.held(mask, self._piece, r) for r in self._peers])
        ordered = torch.cat(pieces, 3).index_select(3, tokens.argsort().to(self._device))
        return ordered[0], ordered[1]

    def _give_back(self, mask: int, found: Pair, k: torch.Tensor) -> list[tuple[torch.Tensor, Pair]]:
        """Send each owner the gradients of its keys; (slots, (dK, dV)) of this rank's that come back, by rank."""
        held = {r: self._spread.held(mask, self._piece, r) for r in self._peers}
        order = torch.cat(list(held.values())).sort().values
        sends, receives, slots = {}, {}, {}
        for r, member in self._peers.items():
            if len(held[r]):
                places = torch.searchsorted(order, held[r]).to(self._device)
                sends[member] = torch.stack([share.index_select(2, places) for share in found])
            lent = self._spread.held(mask, r, self._piece)
            if len(lent):
                slots[member] = self._slots(lent)
                receives[member] = k.new_empty((2, *k.shape[:2], len(lent), k.shape[3]))
        arrived = self._endpoint.finish_exchange(self._endpoint.start_exchange(sends, receives, "gradients of keys"))
        return [(slots[m], (arrived[m][0], arrived[m][1])) for m in self._peers.values() if m in slots]


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, one: Part, scale: float, softcap: float) -> Pair:
    return torch.ops.csc.attention(q, k, v, one.packed, *_numbers(one), scale, softcap)


def _backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    one: Part, scale: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    numbers = _numbers(one)
    return torch.ops.csc.attention_backward(d_out, q, k, v, out, lse, one.packed, *numbers, scale, softcap)


def _numbers(one: Part) -> tuple[int, bool, int, int]:
    return one.form.rules, one.form.kinds, one.form.block_q, one.form.block_k


def _joined(results: Sequence[Pair], q: torch.Tensor) -> Pair:
    """One softmax over all parts: each part's output weighed by its share of the exponentials."""
    if not results:
        return heads_last(q).zero_(), q.new_full(q.shape[:3], -float("inf"), dtype=exact(q.dtype))
    if len(results) == 1:
        return results[0]
    (first, first_lse), (second, second_lse) = results
    lse = torch.logaddexp(first_lse, second_lse)
    safe = lse.masked_fill(lse == -float("inf"), 0.0)
    weights = [torch.exp(one - safe)[..., None] for one in (first_lse, second_lse)]
    joined = heads_last(q)
    joined.copy_(weights[0] * first + weights[1] * second)
    return joined, lse
