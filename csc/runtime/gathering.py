"""Parameters of which data-parallel ranks hold shards (zero=3), made whole where a stage computes with them.

Terms: see csc.runtime.zero_shards, and GATHER and FREE in csc.ir.schedule. A stage's parameters go in *buckets* of
about 25 MB, the same on every rank. A frozen parameter is gathered as one that trains. What is gathered is in the dtype
that the stage computes in.

    Gathered(rank, parameters, shards)      of one rank, in one step
    .act(action)                            GATHER: the all-gathers begin, without waiting; FREE: what came is dropped
    .ready(stage)                           a generator: waits until the parameters are whole
    .of(stage) -> {name: tensor}            what the stage computes with

A number without dimensions is whole on every rank. Only data moves: no bit changes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from csc.ir.groups import Group
from csc.ir.schedule import Action
from csc.runtime.buckets import filled
from csc.runtime.rank import Rank
from csc.runtime.specs import ParameterSpec
from csc.runtime.zero_shards import seen, shard_of


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
        own = [spec.local for spec in parameters if spec.shape]
        self._specs = {
            stage.stage: [spec for spec in own if stage.stage in spec.stages]
            for stage in rank.stages
            if divided[stage.stage]
        }
        self._rest = {name: tensor for name, tensor in shards.items() if not tensor.dim()}
        self._coming: dict[int, list[Coming]] = {}
        self._whole: dict[int, dict[str, torch.Tensor]] = {}
        self._count = 0

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
        found = filled(
            self._specs[stage],
            lambda spec: dtype[spec.name],
            lambda spec: dtype[spec.name].itemsize * math.prod(spec.shape),
        )
        return [bucket for _, bucket in found]

    def _started(self, stage: int, specs: list[ParameterSpec]) -> Coming:
        self._count += 1  # a rank that waits twice with the same words would count as one that cannot go on
        why = f"parameters of stage {stage}, bucket {self._count} of the step"
        own = torch.cat([self._given[spec.name].reshape(-1) for spec in specs])
        sizes = [sum(self._shard(spec, place) for spec in specs) for place in range(len(self._ranks))]
        flat = own if own.numel() == max(sizes) else torch.cat([own, own.new_zeros(max(sizes) - own.numel())])
        return Coming(specs, self._rank.endpoint.start_gather(flat, self._ranks, why), why)

    def _shard(self, spec: ParameterSpec, place: int) -> int:
        """The entries of the shard of a rank."""
        _, start, stop = shard = shard_of(spec.shape, len(self._ranks), place)
        return math.prod(spec.shape) // max(1, spec.shape[shard.dimension]) * (stop - start)

    def ready(self, stage: int) -> Generator[str, None, None]:
        """Yields what it waits for while other ranks have not come."""
        for specs, ticket, why in self._coming.pop(stage, ()):
            while (rows := self._rank.endpoint.finish_gather(ticket)) is None:
                yield why
            self._whole[stage] |= self._joined(specs, rows)
            del rows, ticket

    def _joined(self, specs: list[ParameterSpec], rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """rows: what each rank of the group has given, one behind the other."""
        if len(specs) == 1 and rows.numel() == math.prod(specs[0].shape) and self._is_in_order(specs[0]):
            return {specs[0].name: rows.view(specs[0].shape)}
        found = {spec.name: rows.new_empty(spec.shape) for spec in specs}
        for place, row in enumerate(rows):
            at = 0
            for spec in specs:
                target = seen(found[spec.name], shard_of(spec.shape, len(self._ranks), place))
                target.copy_(row[at : at + target.numel()].view(target.shape))
                at += target.numel()
        return found

    def _is_in_order(self, spec: ParameterSpec) -> bool:
        """Whether shards that lie one behind the other are the parameter."""
        return math.prod(spec.shape[: shard_of(spec.shape, len(self._ranks), 0).dimension]) == 1
