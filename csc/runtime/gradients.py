"""Gradients of one step on one rank, added up over microbatches and ranks; shards of them, and of parameters, by
ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from csc.errors import ProgramError
from csc.ir.groups import Group
from csc.ir.schedule import Action
from csc.runtime.rank import Rank
from csc.runtime.specs import ParameterSpec
from csc.runtime.transport import Endpoint, Work, until

# --- Buckets: tensors that travel together, so that few, large messages go -------------------------------------------


BYTES = 25 * 2**20

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=Hashable)


def filled(
    items: Iterable[Item], kind: Callable[[Item], Kind], size: Callable[[Item], int], limit: int | None = None
) -> list[tuple[Kind, list[Item]]]:
    """Items of one kind together, in their order, up to `limit` bytes (None: BYTES). Kinds come in the order of their
    first items.

    size: bytes of an item. One that is larger than the limit has a bucket of its own.
    """
    limit = BYTES if limit is None else limit
    kinds: dict[Kind, list[list[Item]]] = {}
    room: dict[Kind, int] = {}
    for item in items:
        item_kind, bytes_ = kind(item), size(item)
        if item_kind not in kinds or room[item_kind] < bytes_:
            kinds.setdefault(item_kind, []).append([])
            room[item_kind] = limit
        kinds[item_kind][-1].append(item)
        room[item_kind] -= bytes_
    return [(item_kind, bucket) for item_kind, buckets in kinds.items() for bucket in buckets]


# --- How data-parallel ranks divide a tensor that they would all hold alike ------------------------------------------
#
# Terms: a *shard* is what one of them holds: a stretch of one dimension, so that it has as many dimensions as the
# whole. That is the first dimension that has an entry for each rank, else the longest; then some ranks hold a shard
# without entries. Shards of different ranks have no entry in common, and together all; their sizes differ by one entry
# at most.


class Shard(NamedTuple):
    """Entries from start to stop of a dimension."""

    dimension: int
    start: int
    stop: int


def shard_of(shape: Sequence[int], ranks: int, index: int) -> Shard:
    """What the index-th of so many ranks holds."""
    sizes = list(shape) or [1]
    dimension = next(
        (d for d, size in enumerate(sizes) if size >= ranks), max(range(len(sizes)), key=sizes.__getitem__)
    )
    size = sizes[dimension]
    return Shard(dimension, size * index // ranks, size * (index + 1) // ranks)


def seen(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A view of the tensor."""
    return tensor.narrow(shard.dimension, shard.start, shard.stop - shard.start)


# --- Gradients that data-parallel ranks divide (zero=2) --------------------------------------------------------------
#
# The gradients of each W are summed over the ranks, and a rank keeps its shard.
#
# Terms: see csc.runtime.gradients. A stage's parameters are in *buckets* of about 25 MB, last ones first, as B and W
# go through them; a bucket is on its way as soon as it is full. Buckets and their order are the same on every rank,
# whatever a microbatch has: what it gives no gradient to counts as zeros, and `touched` says what it gave one to.
# Parameters that several regions of a stage give one to come last, and leave at W's end.
#
# Sums over ranks come before those over microbatches, so no rank ever holds more of a gradient than two buckets and
# its shards. Parameters of which ranks of a tensor-parallel group have parts of sums too are left to REDUCE.


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
            (stage, name): bucket for stage, all_ in self._buckets.items() for bucket in all_ for name in bucket.specs
        }
        self._next = dict.fromkeys(self._buckets, 0)  # the bucket of a stage that goes next
        self._tickets: list[tuple[Bucket, Any]] = []
        self.shards: dict[str, torch.Tensor] = {}
        self.touched: set[str] = set()

    def _of_stage(self, stage: int) -> list[Bucket]:
        of_stage = [spec for spec in reversed(self.specs.values()) if stage in spec.stages]
        kinds = filled(
            sorted(of_stage, key=lambda spec: spec.repeated),
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
        meta = torch.empty(self.specs[spec.name].shape, dtype=spec.dtype, device="meta")
        return torch.zeros(seen(meta, self.shard(spec)).shape, dtype=spec.dtype, device=self._rank.device)

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
        self._tickets.append((bucket, self._rank.endpoint.start_scatter(flat, self._ranks, bucket.why)))
        while len(self._tickets) > UNDER_WAY and self._rank.endpoint.ready(self._tickets[0][1]):
            self._take()

    def _row(self, bucket: Bucket, place: int) -> torch.Tensor:
        """What of a bucket goes to the rank at a place of the group."""
        parts = []
        for spec in bucket.specs.values():
            shard, gradient = self.shard(spec, place), bucket.come.get(spec.name)
            zero = torch.zeros((), dtype=spec.dtype, device=self._rank.device).expand(spec.shape)
            parts.append(seen(zero if gradient is None else gradient, shard).reshape(-1))
        return torch.cat(parts)

    def _take(self) -> None:
        """Add what has come of the first bucket that is under way."""
        bucket, ticket = self._tickets.pop(0)
        total = self._rank.endpoint.finish_scatter(ticket)
        offset = 0
        for spec in bucket.specs.values():
            shape = self.zeros(spec).shape
            part = total[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
            if spec.name in self.shards:
                self.shards[spec.name] += part
            else:
                self.shards[spec.name] = part

    def finish(self) -> Work[None]:
        """Wait for all that is under way."""
        while self._tickets:
            bucket, ticket = self._tickets[0]
            yield from until(partial(self._rank.endpoint.ready, ticket), bucket.why)
            self._take()


# --- Gradients of one step on one rank: added up over microbatches, then over ranks ----------------------------------
#
# Terms: a parameter is *tied* if several stages use it; each of them then has a part of its gradient. A
# *bucket* is a flat buffer of about 25 MB that holds the gradients of several parameters, so that few, large
# sums run.


Pair = tuple[str, torch.Tensor]
Added = Callable[[int, int, Mapping[str, torch.Tensor]], None]  # a stage, its microbatches so far, and their sums


class GradientSums:
    """Buffers by parameter name, in the parameter's dtype.

    Each stage's microbatches are added in ascending order, whatever the order of their W's: the sum has the same
    bits under every schedule. What comes early waits. The first contribution is kept as it is, without a copy: it
    may share memory with another gradient or with an activation. The second one makes a buffer of our own, and
    later ones are added to that in place. `own` names the parameters that have one.
    """

    def __init__(
        self, parameters: Iterable[ParameterSpec], stages: Iterable[int], scattered: Scattered | None = None,
        added: Added | None = None, skips: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """scattered: where gradients go that ranks divide. added: called after each microbatch of a stage. skips:
        stages and microbatches whose gradients are not added.
        """
        self.scattered = scattered
        self._added, self._skips = added, skips
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
            if (stage, microbatch) not in self._skips:
                self._add(stage, name, gradient)
            del gradient  # before the next one is made: it may be a head's, the largest tensor of a step
        if self.scattered is not None:
            self.scattered.end(stage)
        self._turn[stage] += 1
        if self._added is not None:
            self._added(stage, self._turn[stage], self._of_stage[stage])
        early = self._early.pop((stage, self._turn[stage]), None)
        if early is not None:
            self.add(stage, self._turn[stage], early)

    def _add(self, stage: int, name: str, gradient: torch.Tensor) -> None:
        spec = self.specs.get(name)
        if spec is None or not spec.trainable or stage not in spec.stages:
            fault = "is frozen" if spec and not spec.trainable else f"is not on stage {stage}"
            raise ProgramError(f"there is a gradient for {name!r}, which {fault}", "", "Mend the rank file")
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
        sums, owned = self._of_stage[stage], self._own_of_stage[stage]
        if name not in sums:
            sums[name] = gradient
        elif name in owned:
            sums[name] += gradient
        else:
            sums[name] = sums[name] + gradient
            owned.add(name)

    @property
    def of_stages(self) -> Mapping[int, Mapping[str, torch.Tensor]]:
        """The sums of each stage, before `merge`."""
        return self._of_stage

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


def reduce(sums: GradientSums, rank: Rank, reached: Collection[str] | None = None) -> Work[None]:
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
                buffer = sums.buffers.get(spec.name)
                zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=rank.device)
                sums.buffers[spec.name] = (
                    zeros if buffer is None else buffer.clone(memory_format=torch.contiguous_format)
                )
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
        yield from until(partial(rank.endpoint.ready, ticket), why)
        rank.endpoint.finish_sum(ticket)


def _reduce_shards(scattered: Scattered, rank: Rank, reached: Collection[str] | None) -> Work[None]:
    """What is left to do for gradients that ranks divide: sums over the holders of tied parameters."""
    for spec in scattered.specs.values():
        if len(spec.ranks) > 1 and (spec.reached if reached is None else spec.name in reached):
            shard = scattered.shards[spec.name].clone() if spec.name in scattered.shards else scattered.zeros(spec)
            holders = rank.group(Group.PIPELINE, sorted(spec.ranks))
            yield from wait_sum(rank.endpoint, shard, holders, f"tied gradient of {spec.name}", ordered=True)
            scattered.shards[spec.name] = shard
        elif spec.name not in (scattered.touched if reached is None else reached):
            scattered.shards.pop(spec.name, None)


def of_any(sums: GradientSums, names: Sequence[str], rank: Rank) -> Work[frozenset[str]]:
    """Those of these parameters that any rank has a gradient of. Every rank calls it with the same names."""
    sums.merge()
    present = sums.there
    row = torch.tensor([float(name in present) for name in names], dtype=torch.float64, device=rank.device)
    yield from wait_sum(rank.endpoint, row, rank.group(Group.WORLD), "which parameters have a gradient")
    return frozenset(name for name, count in zip(names, row.tolist(), strict=True) if count)


def buckets(sums: GradientSums, limit: int | None = None) -> list[tuple[Group | None, list[ParameterSpec]]]:
    """Parameters with a gradient, in buckets of one dtype and up to `limit` bytes, each with the group that has parts.

    Parameters with the same holders share buckets, so that every holder of a tied one sums an equal bucket: a
    ring adds in an order that depends on the position, and the holders must end with the same bits.
    """
    filled_buckets = filled(
        (spec for spec in sums.specs.values() if spec.name in sums.buffers),
        lambda spec: (spec.gradient.parts, spec.ranks, spec.dtype),
        lambda spec: sums.buffers[spec.name].numel() * spec.dtype.itemsize,
        limit,
    )
    return [(parts, specs) for (parts, _, _), specs in filled_buckets]


def wait_sum(
    endpoint: Endpoint, tensor: torch.Tensor, ranks: tuple[int, ...], why: str, ordered: bool = False
) -> Work[None]:
    """Sum `tensor` over `ranks`, in place. Nothing to do for one rank."""
    if len(ranks) > 1:
        ticket = endpoint.start_sum(tensor, ranks, why, ordered)
        yield from until(partial(endpoint.ready, ticket), why)
        endpoint.finish_sum(ticket)


# --- Parameters of which data-parallel ranks hold shards (zero=3), made whole where a stage computes with them -------
#
# Terms: see csc.runtime.gradients, and GATHER and FREE in csc.ir.schedule. A stage's parameters go in *buckets* of
# about 25 MB, the same on every rank. A frozen parameter is gathered as one that trains. What is gathered is in the
# dtype that the stage computes in.
#
# A number without dimensions is whole on every rank. Only data moves: no bit changes.


class Coming(NamedTuple):
    """A bucket that is under way."""

    specs: list[ParameterSpec]
    ticket: Any
    why: str


class Gathered:
    """Of one rank, in one step. parameters: those that it holds; shards: what it has of each."""

    def __init__(self, rank: Rank, parameters: Iterable[ParameterSpec], shards: Mapping[str, torch.Tensor]) -> None:
        self._rank, self._ranks, self._given = rank, rank.group(Group.DATA), shards
        divided = rank.program.manifest.divided
        sharded = [spec.local for spec in parameters if spec.shape]
        self._specs = {
            stage.stage: [spec for spec in sharded if stage.stage in spec.stages]
            for stage in rank.stages
            if divided[stage.stage]
        }
        self._rest = {name: tensor for name, tensor in shards.items() if not tensor.dim()}
        self._coming: dict[int, list[Coming]] = {}
        self._whole: dict[int, dict[str, torch.Tensor]] = {}

    def of(self, stage: int) -> Mapping[str, torch.Tensor]:
        """By name; of a stage that nobody divides, what the rank holds."""
        return self._whole[stage] if stage in self._specs else self._given

    def act(self, action: Action) -> None:
        """All ranks of the group call it, in one order."""
        stage = action.stage
        if action.kind == "FREE":
            del self._whole[stage]
            return
        self._whole[stage] = dict(self._rest)
        self._coming[stage] = [self._started(stage, specs) for specs in self._buckets(stage)]

    def _buckets(self, stage: int) -> list[list[ParameterSpec]]:
        dtype = {spec.name: self._given[spec.name].dtype for spec in self._specs[stage]}
        filled_buckets = filled(
            self._specs[stage],
            lambda spec: dtype[spec.name],
            lambda spec: dtype[spec.name].itemsize * math.prod(spec.shape),
        )
        return [bucket for _, bucket in filled_buckets]

    def _started(self, stage: int, specs: list[ParameterSpec]) -> Coming:
        why = f"parameters of stage {stage}"
        flat_own = torch.cat([self._given[spec.name].reshape(-1) for spec in specs])
        sizes = [sum(self._shard(spec, place) for spec in specs) for place in range(len(self._ranks))]
        flat = (
            flat_own
            if flat_own.numel() == max(sizes)
            else torch.cat([flat_own, flat_own.new_zeros(max(sizes) - flat_own.numel())])
        )
        return Coming(specs, self._rank.endpoint.start_gather(flat, self._ranks, why), why)

    def _shard(self, spec: ParameterSpec, place: int) -> int:
        """The entries of the shard of a rank."""
        _, start, stop = shard = shard_of(spec.shape, len(self._ranks), place)
        return math.prod(spec.shape) // max(1, spec.shape[shard.dimension]) * (stop - start)

    def ready(self, stage: int) -> Work[None]:
        """Wait for what is under way for a stage."""
        for specs, ticket, why in self._coming.pop(stage, ()):
            yield from until(partial(self._rank.endpoint.ready, ticket), why)
            rows = self._rank.endpoint.finish_gather(ticket)
            self._whole[stage] |= self._joined(specs, rows)
            del rows, ticket

    def _joined(self, specs: list[ParameterSpec], rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """rows: what each rank of the group has given, one behind the other."""
        if len(specs) == 1 and rows.numel() == math.prod(specs[0].shape) and self._is_in_order(specs[0]):
            return {specs[0].name: rows.view(specs[0].shape)}
        tensors = {spec.name: rows.new_empty(spec.shape) for spec in specs}
        for place, row in enumerate(rows):
            offset = 0
            for spec in specs:
                target = seen(tensors[spec.name], shard_of(spec.shape, len(self._ranks), place))
                target.copy_(row[offset : offset + target.numel()].view(target.shape))
                offset += target.numel()
        return tensors

    def _is_in_order(self, spec: ParameterSpec) -> bool:
        """Whether shards that lie one behind the other are the parameter."""
        return math.prod(spec.shape[: shard_of(spec.shape, len(self._ranks), 0).dimension]) == 1
