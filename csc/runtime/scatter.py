"""Gradients that data-parallel ranks divide (zero=2): each W's are summed over the ranks, and a rank keeps its shard.

Terms: see csc.runtime.zero_shards. A stage's parameters are in *buckets* of about 25 MB, last ones first, as B and W go
through them; a bucket is on its way as soon as it is full. Buckets and their order are the same on every rank, whatever
a microbatch has: what it gives no gradient to counts as zeros, and `touched` says what it gave one to. Parameters that
several regions of a stage give one to come last, and leave at W's end.

    Scattered(rank, parameters)        .has(name)    .add(stage, name, gradient)    .end(stage)    .finish()
    .shards                            sums over microbatches and ranks of this rank's entries, by name

Sums over ranks come before those over microbatches, so no rank ever holds more of a gradient than two buckets and its
shards. Parameters of which ranks of a tensor-parallel group have parts of sums too are left to REDUCE.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from csc.ir.groups import Group
from csc.runtime.buckets import filled
from csc.runtime.rank import Rank
from csc.runtime.specs import ParameterSpec
from csc.runtime.zero_shards import Shard, seen, shard_of

UNDER_WAY = 1  # buckets that are not waited for while another one fills


def divides(spec: ParameterSpec) -> bool:
    """Whether gradients of a parameter are divided."""
    return spec.trainable and bool(spec.shape) and spec.gradient.parts == Group.DATA


@dataclass
class Bucket:
    """Parameters of one dtype whose gradients go together. repeated: several regions of the stage give them one. come:
    what has come of this microbatch's.
    """

    why: str
    repeated: bool
    specs: dict[str, ParameterSpec]
    come: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether nothing more can come before W's end."""
        return not self.repeated and len(self.come) == len(self.specs)


class Scattered:
    """Of one rank, in one step. parameters: those that it holds."""

    def __init__(self, rank: Rank, parameters: Iterable[ParameterSpec]) -> None:
        self._rank, self._ranks = rank, rank.group(Group.DATA)
        self._index = self._ranks.index(rank.rank)
        self.specs = {spec.name: spec.local for spec in parameters if divides(spec)}
        self._buckets = {stage.stage: self._of_stage(stage.stage) for stage in rank.stages if stage.backward_weight}
        self._bucket_of = {
            (stage, name): one for stage, all_ in self._buckets.items() for one in all_ for name in one.specs
        }
        self._next = dict.fromkeys(self._buckets, 0)  # the bucket of a stage that goes next
        self._tickets: list[tuple[Bucket, str, Any]] = []
        self._count = 0
        self.shards: dict[str, torch.Tensor] = {}
        self.touched: set[str] = set()

    def _of_stage(self, stage: int) -> list[Bucket]:
        own = [spec for spec in reversed(self.specs.values()) if stage in spec.stages]
        kinds = filled(
            sorted(own, key=lambda spec: spec.repeated),
            lambda spec: (spec.repeated, spec.dtype),
            lambda spec: spec.dtype.itemsize * math.prod(spec.shape),
        )
        return [
            Bucket(f"gradients of stage {stage}, bucket {number}", repeated, {spec.name: spec for spec in specs})
            for number, ((repeated, _), specs) in enumerate(kinds)
        ]

    def has(self, name: str) -> bool:
        """Whether a parameter's gradient goes this way."""
        return name in self.specs

    def shard(self, spec: ParameterSpec, place: int | None = None) -> Shard:
        """What a rank has of a parameter, by its place in the group; None: this one."""
        return shard_of(self.specs[spec.name].shape, len(self._ranks), self._index if place is None else place)

    def zeros(self, spec: ParameterSpec) -> torch.Tensor:
        """A shard to which nothing has come."""
        whole = torch.empty(self.specs[spec.name].shape, dtype=spec.dtype, device="meta")
        return torch.zeros(seen(whole, self.shard(spec)).shape, dtype=spec.dtype, device=self._rank.device)

    def add(self, stage: int, name: str, gradient: torch.Tensor) -> None:
        """A microbatch's gradient; buckets that are full leave."""
        buckets, bucket = self._buckets[stage], self._bucket_of[stage, name]
        bucket.come[name] = bucket.come[name] + gradient if name in bucket.come else gradient
        self.touched.add(name)
        while self._next[stage] < len(buckets) and buckets[self._next[stage]].full:
            self._start(stage)

    def end(self, stage: int) -> None:
        """A microbatch has no more: what is left leaves."""
        while self._next.get(stage, 0) < len(self._buckets.get(stage, ())):
            self._start(stage)
        if stage in self._next:
            self._next[stage] = 0

    def _start(self, stage: int) -> None:
        bucket = self._buckets[stage][self._next[stage]]
        self._next[stage] += 1
        rows = [self._row(bucket, place) for place in range(len(self._ranks))]
        flat = rows[0].new_zeros(len(rows), max(row.numel() for row in rows))
        for place, row in enumerate(rows):
            flat[place, : row.numel()] = row
        bucket.come.clear()
        self._count += 1  # a rank that waits twice with the same words would count as one that cannot go on
        why = f"{bucket.why}, number {self._count} of the step"
        self._tickets.append((bucket, why, self._rank.endpoint.start_scatter(flat, self._ranks, why)))
        while len(self._tickets) > UNDER_WAY and self._took():
            pass

    def _row(self, bucket: Bucket, place: int) -> torch.Tensor:
        """What of a bucket goes to the rank at a place of the group."""
        parts = []
        for spec in bucket.specs.values():
            shard, gradient = self.shard(spec, place), bucket.come.get(spec.name)
            whole = torch.zeros((), dtype=spec.dtype, device=self._rank.device).expand(spec.shape)
            parts.append(seen(whole if gradient is None else gradient, shard).reshape(-1))
        return torch.cat(parts)

    def _took(self) -> bool:
        """Add what has come of the first bucket that is under way. False: it has not."""
        bucket, _, ticket = self._tickets[0]
        total = self._rank.endpoint.finish_scatter(ticket)
        if total is None:
            return False
        self._tickets.pop(0)
        at = 0
        for spec in bucket.specs.values():
            shape = self.zeros(spec).shape
            part = total[at : at + shape.numel()].view(shape)
            at += shape.numel()
            if spec.name in self.shards:
                self.shards[spec.name] += part
            else:
                self.shards[spec.name] = part
        return True

    def finish(self) -> Generator[str, None, None]:
        """Wait for all that is under way."""
        while self._tickets:
            if not self._took():
                yield self._tickets[0][1]
