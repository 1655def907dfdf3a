"""Gradients of one step on one rank: added up over microbatches, then over ranks.

Terms: a parameter is *tied* if several stages use it; each of them then has a part of its gradient. A
*bucket* is a flat buffer of about 25 MB that holds the gradients of several parameters, so that few, large
sums run.

    GradientSums(parameters, stages).add(stage, microbatch, pairs)     what one W gives
    reduce(sums, rank)        a generator: over tied stages, highest first, then over the ranks that have parts
    of_any(sums, names, rank)        a generator: which parameters any rank has a gradient of

The generator yields what it waits for while a sum is not ready; a transport that blocks never makes it yield.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence

import torch

from csc.errors import ProgramError
from csc.ir.groups import Group
from csc.runtime.buckets import filled
from csc.runtime.rank import Rank
from csc.runtime.scatter import Scattered
from csc.runtime.specs import ParameterSpec
from csc.runtime.transport import Endpoint

Pair = tuple[str, torch.Tensor]


class GradientSums:
    """Buffers by parameter name, in the parameter's dtype.

    Each stage's microbatches are added in ascending order, whatever the order of their W's: the sum has the same
    bits under every schedule. What comes early waits. The first contribution is kept as it is, without a copy: it
    may share memory with another gradient or with an activation. The second one makes a buffer of our own, and
    later ones are added to that in place. `own` names the parameters that have one.
    """

    def __init__(
        self, parameters: Iterable[ParameterSpec], stages: Iterable[int], scattered: Scattered | None = None
    ) -> None:
        """scattered: where gradients go that ranks divide."""
        self.scattered = scattered
        self.specs = {spec.name: spec.local for spec in parameters}
        self.buffers: dict[str, torch.Tensor] = {}  # complete after `merge`
        self.own: set[str] = set()
        self._of_stage: dict[int, dict[str, torch.Tensor]] = {stage: {} for stage in stages}
        self._own_of_stage: dict[int, set[str]] = {stage: set() for stage in self._of_stage}
        self._turn = dict.fromkeys(self._of_stage, 0)
        self._early: dict[tuple[int, int], list[Pair]] = {}

    def add(self, stage: int, microbatch: int, pairs: Iterable[Pair]) -> None:
        """Add what W of one microbatch gives. ProgramError for a name or shape that cannot be right."""
        if microbatch != self._turn[stage]:
            self._early[stage, microbatch] = list(pairs)
            return
        for name, gradient in pairs:
            self._add(stage, name, gradient)
            del gradient  # before the next one is made: it may be a head's, the largest tensor of a step
        if self.scattered is not None:
            self.scattered.end(stage)
        self._turn[stage] += 1
        early = self._early.pop((stage, self._turn[stage]), None)
        if early is not None:
            self.add(stage, self._turn[stage], early)

    def _add(self, stage: int, name: str, gradient: torch.Tensor) -> None:
        spec = self.specs.get(name)
        if spec is None or not spec.trainable or stage not in spec.stages:
            what = "is frozen" if spec and not spec.trainable else f"is not on stage {stage}"
            raise ProgramError(f"there is a gradient for {name!r}, which {what}", "", "Mend the rank file")
        if gradient.shape != spec.shape:
            raise ProgramError(
                f"the gradient of {name!r} is {list(gradient.shape)}, the parameter is {list(spec.shape)}",
                "",
                "Mend the rank file",
            )
        if gradient.dtype != spec.dtype:
            gradient = gradient.to(spec.dtype)
        if self.scattered is not None and self.scattered.has(name):
            self.scattered.add(stage, name, gradient)
            return
        sums, own = self._of_stage[stage], self._own_of_stage[stage]
        if name not in sums:
            sums[name] = gradient
        elif name in own:
            sums[name] += gradient
        else:
            sums[name] = sums[name] + gradient
            own.add(name)

    @property
    def there(self) -> set[str]:
        """What has a gradient on this rank, whole or in shards."""
        return self.buffers.keys() | (self.scattered.touched if self.scattered is not None else set())

    @property
    def shards(self) -> dict[str, torch.Tensor]:
        """Of gradients that ranks divide, this rank's entries; complete after `reduce`."""
        return self.scattered.shards if self.scattered is not None else {}

    def merge(self) -> None:
        """Fill `buffers`: a parameter that several stages of this rank use gets their sum, highest stage first, as
        autograd adds them.
        """
        for stage in sorted(self._of_stage, reverse=True):
            for name, gradient in self._of_stage[stage].items():
                if name not in self.buffers:
                    self.buffers[name] = gradient
                    self.own |= {name} & self._own_of_stage[stage]
                else:
                    self.buffers[name] = self.buffers[name] + gradient
                    self.own.add(name)
            self._of_stage[stage] = {}


def reduce(sums: GradientSums, rank: Rank, reached: Collection[str] | None = None) -> Generator[str, None, None]:
    """Sum over the ranks of a pipeline that hold a tied parameter, then each gradient over the group on which it is
    parts. Every rank calls it once a step.

    reached: the parameters that have a gradient on some rank, if replicas may differ in that: those without it here
    count zeros, others have none anywhere; None: all ranks have the same, those that the program computes.
    """
    if reached is None:
        sums.merge()
    if sums.scattered is not None:
        yield from _reduce_shards(sums.scattered, rank, reached)
    for spec in sums.specs.values():
        if sums.scattered is not None and sums.scattered.has(spec.name):
            continue
        if reached is not None and spec.name in reached and spec.name not in sums.buffers:
            sums.buffers[spec.name] = torch.zeros(spec.shape, dtype=spec.dtype, device=rank.device)
            sums.own.add(spec.name)
        if spec.trainable and len(spec.ranks) > 1 and (spec.reached if reached is None else spec.name in reached):
            if spec.name not in sums.own:  # a holder that did not use it in backward adds zeros
                there = sums.buffers.get(spec.name)
                zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=rank.device)
                sums.buffers[spec.name] = zeros if there is None else there.clone(memory_format=torch.contiguous_format)
                sums.own.add(spec.name)
            holders = rank.group(Group.PIPELINE, sorted(spec.ranks))
            why = f"tied gradient of {spec.name}"
            yield from wait_sum(rank.endpoint, sums.buffers[spec.name], holders, why, ordered=True)
    tickets = []
    several = {parts for spec in sums.specs.values() if (parts := spec.gradient.parts) and len(rank.group(parts)) > 1}
    for number, (parts, specs) in enumerate(buckets(sums) if several else ()):
        if parts not in several:
            continue
        ranks = rank.group(parts)
        flat = torch.cat([sums.buffers[spec.name].reshape(-1) for spec in specs])
        for spec, part in zip(specs, flat.split([sums.buffers[s.name].numel() for s in specs]), strict=True):
            sums.buffers[spec.name] = part.view(spec.shape)  # frees the gradient itself
            sums.own.add(spec.name)
        why = f"gradients of pipeline rank {rank.position} over {' and '.join(parts.along)}, bucket {number}"
        tickets.append((why, rank.endpoint.start_sum(flat, ranks, why)))
    for why, ticket in tickets:
        while not rank.endpoint.finish_sum(ticket):
            yield why


def _reduce_shards(scattered: Scattered, rank: Rank, reached: Collection[str] | None) -> Generator[str, None, None]:
    """What is left to do for gradients that ranks divide: sums over the holders of tied parameters."""
    for spec in scattered.specs.values():
        if len(spec.ranks) > 1 and (spec.reached if reached is None else spec.name in reached):
            own = scattered.shards[spec.name].clone() if spec.name in scattered.shards else scattered.zeros(spec)
            holders = rank.group(Group.PIPELINE, sorted(spec.ranks))
            yield from wait_sum(rank.endpoint, own, holders, f"tied gradient of {spec.name}", ordered=True)
            scattered.shards[spec.name] = own
        elif spec.name not in (scattered.touched if reached is None else reached):
            scattered.shards.pop(spec.name, None)


def of_any(sums: GradientSums, names: Sequence[str], rank: Rank) -> Generator[str, None, frozenset[str]]:
    """Those of these parameters that any rank has a gradient of. Every rank calls it with the same names."""
    sums.merge()
    there = sums.there
    row = torch.tensor([float(name in there) for name in names], dtype=torch.float64, device=rank.device)
    yield from wait_sum(rank.endpoint, row, rank.group(Group.WORLD), "which parameters have a gradient")
    return frozenset(name for name, count in zip(names, row.tolist(), strict=True) if count)


def buckets(sums: GradientSums, limit: int | None = None) -> list[tuple[Group | None, list[ParameterSpec]]]:
    """Parameters with a gradient, in buckets of one dtype and up to `limit` bytes, each with the group that has parts.

    Parameters with the same holders share buckets, so that every holder of a tied one sums an equal bucket: a
    ring adds in an order that depends on the position, and the holders must end with the same bits.
    """
    found = filled(
        (spec for spec in sums.specs.values() if spec.name in sums.buffers),
        lambda spec: (spec.gradient.parts, spec.ranks, spec.dtype),
        lambda spec: sums.buffers[spec.name].numel() * spec.dtype.itemsize,
        limit,
    )
    return [(parts, specs) for (parts, _, _), specs in found]


def wait_sum(
    endpoint: Endpoint, tensor: torch.Tensor, ranks: tuple[int, ...], why: str, ordered: bool = False
) -> Generator[str, None, None]:
    """Sum `tensor` over `ranks`, in place; yields `why` while the others have not come. Nothing to do for one
    rank.
    """
    if len(ranks) > 1:
        ticket = endpoint.start_sum(tensor, ranks, why, ordered)
        while not endpoint.finish_sum(ticket):
            yield why
