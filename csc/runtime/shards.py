"""The parameters of a process whose ranks hold parts of them: tensor-parallel ones, and with zero=3 data-parallel ones.

Terms: a *box* is what one of these ranks holds (csc.runtime.boxes); with zero=3 the shard (csc.runtime.zero_shards) of
what tensor-parallel ranks would hold. A process that runs all of them keeps parameters whole and gives each rank its
box in every step; one of several keeps its own rank's box alone.

    shards = Shards(mesh, transport, device, zero)
    .parameters(program, specs, given, kept)    nn.Parameters by name, and which of them have no values
    .box(spec)                                  what this process keeps; None: all of it
    .in_parts(spec)                             whether any does not keep all of it
    .of_rank(spec, tensor, rank)                as a rank holds it
    .divides(boxes), .in_shards(spec)           whether tensor-parallel, data-parallel ranks hold different parts of it
    .whole(spec, own)                           from all processes
    .kept(spec, parameter)                      for the next trainer of this process
    .sources                                    the whole tensors that boxes were cut from
    .check_sources(where)                       InputError if boxes are of tensors that were written to since
    .put_back(spec)                             what they were taken from holds what they do
    met_of(mesh, rank, endpoint, fused) -> {name: Met}     where a rank's collectives meet: see csc.ir.groups
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from csc.errors import InputError
from csc.ir.groups import Group, meeting
from csc.ir.mesh import Mesh
from csc.runtime import weights
from csc.runtime.boxes import cut, part, put, sizes, whole_box
from csc.runtime.consistency import Sample, read
from csc.runtime.exchange import Membership
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.rank import Rank
from csc.runtime.specs import Box, ParameterSpec
from csc.runtime.tensor_group import Met
from csc.runtime.transport import Endpoint, Transport
from csc.runtime.zero_shards import seen, shard_of


@dataclass
class Source:
    """The whole tensor that a box was cut from, with its version and some entries then: one object for all trainers of
    a process.
    """

    tensor: torch.Tensor
    version: int
    sample: Sample
    entries: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Source:
        """As it is now."""
        sample = Sample(tensor)
        return cls(tensor, tensor._version, sample, read([sample]))


class Kept(NamedTuple):
    """A box of this process."""

    box: Box
    parameter: nn.Parameter
    source: Source


Given = Mapping[str, torch.Tensor] | str | Path | None


def met_of(mesh: Mesh, rank: int, endpoint: Endpoint, fused: bool = False) -> dict[str, Met]:
    """A rank's place among those that divide its layers, and within these; and among those that share out samples of
    its sequences. fused: its functions are compiled by Inductor.
    """
    asked = [Group.TENSOR]
    asked += [one(size) for size in mesh.divisions for one in (Group.copies, Group.division)]
    asked += [Group.CONTEXT if size == 1 else Group.sequences(size) for size in sorted({cp for _, cp in mesh.own_cp})]
    groups = {meeting(group): mesh.group(group, rank) for group in asked}
    return {
        name: Met(Membership(endpoint, ranks.index(rank), ranks), copies=fused) for name, ranks in groups.items()
        if len(ranks) > 1
    }  # fmt: skip


class Shards:
    """See the module."""

    def __init__(self, mesh: Mesh, transport: Transport, device: torch.device, zero: int = 0) -> None:
        self._mesh, self._device, self._transport = mesh, device, transport
        self._alone = len(transport.ranks) == mesh.size
        self._shard = mesh.shard(transport.ranks[0])
        self._index = mesh.group(Group.DATA, transport.ranks[0]).index(transport.ranks[0])
        self._zero = zero
        self._sources: dict[str, Source] = {}

    def box(self, spec: ParameterSpec) -> Box | None:
        """What this process keeps of a parameter of its own; None: all of it."""
        if not self.in_parts(spec):
            return None
        box = spec.boxes[self._shard] if spec.boxes else whole_box(spec.shape)
        return self._boxes(spec, box)[self._index if self.in_shards(spec) else 0]

    def in_parts(self, spec: ParameterSpec) -> bool:
        """Whether processes hold parts of a parameter, which may be one of other positions: all say the same."""
        return not self._alone and bool(spec.boxes or self.in_shards(spec))

    def in_shards(self, spec: ParameterSpec) -> bool:
        """With zero=3, but for numbers without dimensions."""
        return self._ranks(spec) > 1 and bool(spec.shape)

    def _ranks(self, spec: ParameterSpec) -> int:
        """How many data-parallel ranks have a shard of it."""
        return self._mesh.extent(spec.owner)[0] * self._mesh.cp if self._zero >= 3 else 1

    def _boxes(self, spec: ParameterSpec, box: Box) -> list[Box]:
        """What the data-parallel ranks hold of a box, in their order."""
        if not self.in_shards(spec):
            return [box]
        ranks = self._ranks(spec)
        return [part(box, *shard_of(spec.local.shape, ranks, place)) for place in range(ranks)]

    def divides(self, boxes: Sequence[Box]) -> bool:
        """Whether ranks of this process hold different parts of a parameter that it keeps whole."""
        return self._alone and bool(boxes)

    def of_rank(self, spec: ParameterSpec, tensor: torch.Tensor, rank: Rank) -> torch.Tensor:
        """A parameter of this process as one of its ranks has it."""
        if self.divides(spec.boxes):
            tensor = cut(tensor, spec.boxes[rank.tp_rank])
        if not self._alone or not self.in_shards(spec):
            return tensor
        place = rank.group(Group.DATA).index(rank.rank)
        return seen(tensor, shard_of(spec.local.shape, self._ranks(spec), place))

    def parameters(
        self, program: LoadedProgram, specs: Sequence[ParameterSpec], given: Given, kept: Mapping[str, Kept]
    ) -> tuple[dict[str, nn.Parameter], set[str]]:
        """The parameters of `specs`, and which of them have no values. given: whole tensors by name; where they are
        read from; None: from the program's directory. kept: boxes that this process has already, of which those of
        this program stay what they are: an optimizer knows them.
        """
        if given is None:
            given = program.directory / "weights.safetensors"
        tensors = given if isinstance(given, Mapping) else weights.read(given, specs, self._device)
        weights.check(specs, tensors)
        found, empty = {}, set()
        for spec in specs:
            tensor, box = tensors[spec.name], self.box(spec)
            before = kept.get(spec.name)
            if before is not None and box == before.box:
                found[spec.name] = before.parameter
                self._sources[spec.name] = before.source
                continue
            if box is not None:
                self._sources[spec.name] = Source.of(tensor)
            if tensor.is_meta and self._device.type != "meta":
                shape = spec.shape if box is None else sizes(box)
                tensor = torch.empty(shape, dtype=spec.dtype, device=self._device)
                empty.add(spec.name)
            elif box is not None:
                tensor = cut(tensor.detach(), box)
            if not isinstance(tensor, nn.Parameter) or tensor.device != self._device:
                tensor = nn.Parameter(tensor.detach().to(self._device), requires_grad=spec.trainable)
            found[spec.name] = tensor
        return found, empty

    def kept(self, spec: ParameterSpec, parameter: nn.Parameter) -> Kept | None:
        """Of a parameter that this process has a box of."""
        box = self.box(spec)
        return None if box is None else Kept(box, parameter, self._sources[spec.name])

    def check_sources(self, where: str) -> None:
        """Others would train the weights that were written; the boxes are copies, which do not have them."""
        sources = self._sources.values()
        same = read(one.sample for one in sources) == b"".join(one.entries for one in sources)
        for name, source in self._sources.items():
            if source.tensor._version != source.version or not (same or read([source.sample]) == source.entries):
                raise InputError(
                    f"the model's {name!r} was written to after this process had taken its shard of it", where,
                    "bring weights in with compiled.load(directory), or write to the model before its first step",
                )  # fmt: skip

    @property
    def sources(self) -> dict[str, torch.Tensor]:
        """The whole tensors that boxes of this process were cut from, of those that have values."""
        return {name: one.tensor for name, one in self._sources.items() if not one.tensor.is_meta}

    def put_back(self, spec: ParameterSpec) -> None:
        """To call where the source of a box was given what all ranks have trained."""
        if spec.name in self._sources:
            source = self._sources[spec.name]
            source.version, source.entries = source.tensor._version, read([source.sample])

    def whole(self, spec: ParameterSpec, own: torch.Tensor | None) -> torch.Tensor:
        """A parameter with all its entries. own: as this process keeps it; None: it does not. All ranks call it."""
        if self._alone:
            assert own is not None
            return own.detach()
        holders = self._mesh.groups(spec.equal, spec.ranks)
        if not spec.boxes and not self.in_shards(spec):
            return self._from(holders[0][0], own, spec.shape, spec.dtype)
        found = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        for group in holders:
            whole = spec.boxes[self._mesh.shard(group[0])] if spec.boxes else whole_box(spec.shape)
            sources = self._mesh.group(Group.DATA, group[0])
            for source, box in zip(sources, self._boxes(spec, whole)):
                if 0 in sizes(box):
                    continue
                mine = own if own is not None and box == self.box(spec) else None
                put(found, box, self._from(source, mine, sizes(box), spec.dtype))
        return found

    def _from(
        self, source: int, own: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:  # fmt: skip
        """A tensor of one rank, on all of them."""
        if own is None:
            value = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        else:
            value = own.detach().to(self._device).contiguous()
        dist.broadcast(value.view(-1).view(torch.uint8), src=source)  # gloo does not take every dtype
        return value
