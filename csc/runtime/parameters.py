"""The parameters of this process: what its ranks compute with, what an optimizer steps of them, and their gradients."""

from __future__ import annotations

import logging
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from csc.errors import InputError
from csc.ir.groups import Group, meeting
from csc.ir.mesh import Mesh
from csc.runtime import weights
from csc.runtime.consistency import Sample, Shared, checksum, read
from csc.runtime.gradients import GradientSums, Shard, filled, seen, shard_of
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import CLIP, NOTHING, Vote
from csc.runtime.mirrors import Mirror, Piece
from csc.runtime.rank import Rank
from csc.runtime.specs import Box, Manifest, ParameterSpec, cut, part_in_box, put, sizes, whole_box
from csc.runtime.transport import Endpoint, InProcess, Membership, Met, Transport

# --- The parameters of a process whose ranks hold parts of them ------------------------------------------------------
#
# These are tensor-parallel ranks, and with zero=3 data-parallel ones.
#
# Terms: a *box* is what one of these ranks holds (csc.runtime.specs); with zero=3 the shard (csc.runtime.gradients)
# of what tensor-parallel ranks would hold. A process that runs all of them keeps parameters whole and gives each rank
# its box in every step; one of several keeps its own rank's box alone.


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


MIRRORED = "of another rank: "  # before the names of what is kept for that


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
    asked += [make_group(size) for size in mesh.divisions for make_group in (Group.copies, Group.division)]
    asked += [Group.CONTEXT if size == 1 else Group.sequences(size) for size in sorted({*mesh.own("cp").values()})]
    groups = {meeting(group): mesh.group(group, rank) for group in asked}
    return {
        name: Met(Membership(endpoint, ranks.index(rank), ranks), copies=fused) for name, ranks in groups.items()
        if len(ranks) > 1
    }  # fmt: skip


class Shards:
    """What this process keeps of the parameters that ranks divide. zero: the ZeRO stage; with 3 data-parallel ranks
    hold shards.
    """

    def __init__(self, mesh: Mesh, transport: Transport, device: torch.device, zero: int = 0) -> None:
        self._device, self._transport, self._zero = device, transport, zero
        self._alone = len(transport.ranks) == mesh.size
        self._sources: dict[str, Source] = {}
        self.regroup(mesh)

    def regroup(self, mesh: Mesh) -> None:
        """The ranks' places from now on."""
        self._mesh, first = mesh, self._transport.ranks[0]
        self._shard = mesh.shard(first)
        self._index = mesh.group(Group.DATA, first).index(first)

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
        return self._mesh.extent(spec.owner).replicas * self._mesh.cp if self._zero >= 3 else 1

    def _boxes(self, spec: ParameterSpec, box: Box) -> list[Box]:
        """What the data-parallel ranks hold of a box, in their order."""
        if not self.in_shards(spec):
            return [box]
        ranks = self._ranks(spec)
        return [part_in_box(box, *shard_of(spec.local.shape, ranks, place)) for place in range(ranks)]

    def pieces(self, specs: Sequence[ParameterSpec], rank: int) -> list[Piece]:
        """What a rank holds, where others have shards of it or, in a pipeline, none of it (csc.runtime.mirrors)."""
        position = self._mesh.coordinates(rank).pp
        held = [self.all_pieces(spec) for spec in specs if position in spec.ranks]
        return [pieces[rank] if len(pieces) > 1 else pieces[0] for pieces in held]

    def all_pieces(self, spec: ParameterSpec) -> list[Piece]:
        """Of all ranks: each has a shard, or those that have it have all of it."""
        boxes = self._boxes(spec, whole_box(spec.shape))
        return [Piece(spec, box, place if len(boxes) > 1 else spec.owner) for place, box in enumerate(boxes)]

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
        parameters, empty = {}, set()
        for spec in specs:
            tensor, box = tensors[spec.name], self.box(spec)
            before = kept.get(spec.name)
            if before is not None and box == before.box:
                parameters[spec.name] = before.parameter
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
            parameters[spec.name] = tensor
        return parameters, empty

    def kept(self, spec: ParameterSpec, parameter: nn.Parameter) -> Kept | None:
        """Of a parameter that this process has a box of."""
        box = self.box(spec)
        return None if box is None else Kept(box, parameter, self._sources[spec.name])

    def check_sources(self, where: str) -> None:
        """Others would train the weights that were written; the boxes are copies, which do not have them."""
        sources = self._sources.values()
        same = read(source.sample for source in sources) == b"".join(source.entries for source in sources)
        for name, source in self._sources.items():
            if source.tensor._version != source.version or not (same or read([source.sample]) == source.entries):
                raise InputError(
                    f"the model's {name!r} was written to after this process had taken its shard of it", where,
                    "bring weights in with compiled.load(directory), or write to the model before its first step",
                )  # fmt: skip

    @property
    def sources(self) -> dict[str, torch.Tensor]:
        """The whole tensors that boxes of this process were cut from, of those that have values."""
        return {name: source.tensor for name, source in self._sources.items() if not source.tensor.is_meta}

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
        full = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        for group in holders:
            whole_of_group = spec.boxes[self._mesh.shard(group[0])] if spec.boxes else whole_box(spec.shape)
            sources = self._mesh.group(Group.DATA, group[0])
            for source, box in zip(sources, self._boxes(spec, whole_of_group)):
                if 0 in sizes(box):
                    continue
                mine = own if own is not None and box == self.box(spec) else None
                put(full, box, self._from(source, mine, sizes(box), spec.dtype))
        return full

    def _from(
        self, source: int, part: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:  # fmt: skip
        """A tensor of one rank, on all of them."""
        if part is None:
            value = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        else:
            value = part.detach().to(self._device).contiguous()
        dist.broadcast(value.view(-1).view(torch.uint8), src=source)  # gloo does not take every dtype
        return value


# --- Parameters of which each data-parallel rank steps a shard -------------------------------------------------------
#
# The state of its optimizer is that of shards (ZeRO).
#
# Terms
#   shard      what this process steps of a parameter that it trains (csc.runtime.gradients): an nn.Parameter of its own
#              that lies in the memory of the whole one, with the gradient of its entries alone. *Apart* (zero=3) it has
#              memory of its own, and the process keeps no whole one
#   stale      the whole parameters lack what other ranks have stepped, from the optimizer's step to the next `gather`
#   proven     an optimizer that works entry by entry, which `optimizer` has made
#
# A number without dimensions stays whole: all ranks step it alike. A process that runs all ranks has no use for it: it
# holds every parameter once, and any optimizer steps all of it. See Rajbhandari et al., ZeRO: Memory Optimizations
# Toward Training Trillion Parameter Models (2020).


@dataclass
class Stepped:
    """A parameter of this process: its spec as one rank has it, the whole one (or again what is stepped, apart), its
    shard, and the version of that as csc left it.
    """

    spec: ParameterSpec
    whole: nn.Parameter
    shard: Shard
    parameter: nn.Parameter
    version: int


class DataShards:
    """Of one process with one rank. failures: each shard is that of so many ranks more, in other replicas, which step
    it alike: if so many replicas are lost, it is still there.
    """

    def __init__(self, mesh: Mesh, rank: int, apart: bool = False, failures: int = 0) -> None:
        self.apart = apart
        self._shards = mesh.dp // (failures + 1) * mesh.cp if failures else len(mesh.group(Group.DATA, rank))
        self.regroup(mesh, rank, mesh.replicas if failures else None)
        self._held: dict[str, Stepped] = {}
        self.stale = False
        self.replaced = False  # programs that train the same parameters have no use for these shards

    def regroup(self, mesh: Mesh, rank: int, replicas: Sequence[int] | None) -> None:
        """The rank that it is from now on. replicas: those that are left, as they were at the start; None: all. Each
        steps what it has stepped.
        """
        self.ranks = mesh.group(Group.DATA, rank)
        self._index = self.ranks.index(rank)
        places = list(range(len(self.ranks)))
        if replicas is not None:
            places_each = len(places) // len(replicas)
            places = [replicas[place // places_each] * places_each + place % places_each for place in places]
        self._shard_of = [place % self._shards for place in places]

    def add(self, specs: Iterable[ParameterSpec], weights: Mapping[str, nn.Parameter]) -> None:
        """Divide what trains. A parameter whose memory is that of a shard keeps it: an optimizer knows it."""
        for spec in specs:
            weight, before = weights[spec.name], self._held.get(spec.name)
            if not spec.trainable or not spec.shape or (before is not None and before.whole is weight):
                continue
            shard = self._entries(spec.local, self._index)
            parameter = weight if self.apart else nn.Parameter(seen(weight.data, shard))
            self._held[spec.name] = Stepped(spec.local, weight, shard, parameter, parameter._version)

    def of(self, name: str) -> nn.Parameter | None:
        """What this process steps of a parameter; None if it is none of these."""
        shard = self._held.get(name)
        return None if shard is None else shard.parameter

    def shard(self, name: str) -> Shard:
        """What this rank holds of a parameter."""
        return self._held[name].shard

    @property
    def shard_of(self) -> Sequence[int]:
        """The shards that the ranks of the group step, in its order."""
        return self._shard_of

    @property
    def counts(self) -> bool:
        """Whether this rank is the first that steps its shards."""
        return self._shard_of.index(self._shard_of[self._index]) == self._index

    def _entries(self, spec: ParameterSpec, place: int) -> Shard:
        """What the rank at a place of the group steps."""
        return shard_of(spec.shape, self._shards, self._shard_of[place])

    @torch.no_grad()
    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Add this rank's entries of a whole gradient to the `.grad` of its shard. Whoever steps it, other ranks' steps
        are gathered before the next forward.
        """
        held = self._held[name]
        self.take_shard(name, seen(gradient, held.shard).clone(memory_format=torch.contiguous_format))

    @torch.no_grad()
    def take_shard(self, name: str, gradient: torch.Tensor) -> None:
        """The same of a gradient of this rank's entries alone, which nobody else holds."""
        parameter = self._held[name].parameter
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.stale = not self.apart

    def check_current(self) -> None:
        """Before a step of a proven optimizer. InputError if other shards train now, or something else has written to
        these: `stepped` would take it for this optimizer's.
        """
        if self.replaced:
            raise InputError(
                "the optimizer steps shards of parameters that the programs of now divide in another way",
                "optimizer",
                "make a new one with compiled.optimizer(...) after with_options",
            )
        self.check_steps("optimizer")

    def stepped(self) -> None:
        """A proven optimizer has made a step."""
        self.stale = not self.apart
        self.known()

    def known(self) -> None:
        """What was written to shards until now was right."""
        for held in self._held.values():
            held.version = held.parameter._version

    def check_steps(self, where: str) -> None:
        """Nobody else writes to shards: other ranks' shards would be stepped in another way."""
        for name, held in self._held.items():
            if held.parameter._version != held.version:
                raise InputError(
                    f"this process' shard of {name!r} was written to by something that is not known to work entry by "
                    "entry",
                    where,
                    "make the optimizer with compiled.optimizer(torch.optim.AdamW, lr=...), and bring weights in with "
                    "compiled.load(directory)",
                )

    @torch.no_grad()
    def gather(self, transport: Transport) -> None:
        """Bring every rank's shards into the whole parameters. All ranks of the group call it."""
        firsts = {shard: place for place, shard in reversed([*enumerate(self._shard_of)])}
        del firsts[self._shard_of[self._index]]
        for number, held in enumerate(self._buckets()):
            why = f"parameters over {' and '.join(Group.DATA.along)}, bucket {number}"
            sizes = [sum(self._seen(spec, place).numel() for spec in held) for place in range(len(self.ranks))]
            flat = held[0].whole.new_zeros(max(sizes))
            flats = [spec.parameter.reshape(-1) for spec in held]
            torch.cat(flats, out=flat[: sizes[self._index]])
            parts = transport.gathered(flat, self.ranks, why) if firsts else []
            for place in firsts.values():
                self._put(held, place, parts[place])
        self.stale = False

    def _put(self, held: list[Stepped], place: int, flat: torch.Tensor) -> None:
        offset = 0
        for spec in held:
            target = self._seen(spec, place)
            target.copy_(flat[offset : offset + target.numel()].view(target.shape))
            offset += target.numel()

    def _seen(self, held: Stepped, place: int) -> torch.Tensor:
        """What the rank at a place of the group steps, in the memory of the whole parameter."""
        return seen(held.whole.data, self._entries(held.spec, place))

    def _buckets(self) -> list[list[Stepped]]:
        """Parameters of one dtype whose shards go together."""
        return [bucket for _, bucket in filled(self._held.values(), lambda held: held.spec.dtype, self._bytes)]

    def _bytes(self, held: Stepped) -> int:
        """Of a shard."""
        return held.whole.numel() * held.whole.element_size() // self._shards


# --- The parameters of this process ----------------------------------------------------------------------------------
#
# Here is what its ranks compute with, what an optimizer steps of it, and the values on disk.
#
# Terms: *held* are the parameters of this process' ranks, each once. Of several processes each holds its part of those
# that ranks divide.


log = logging.getLogger("csc")


class OwnParameters:
    """The parameters of the ranks of this process. given, kept, data: as for csc.runtime.trainer.Trainer."""

    def __init__(
        self,
        program: LoadedProgram,
        transport: Transport,
        device: torch.device,
        given: Given,
        kept: Mapping[str, Kept],
        data: DataShards | None,
    ) -> None:
        self._manifest, self._transport, self._device = program.manifest, transport, device
        mesh = self._manifest.mesh
        positions = {mesh.coordinates(rank).pp for rank in transport.ranks}
        self.specs = [p for p in self._manifest.parameters if positions & set(p.ranks)]
        self.parts = Shards(mesh, transport, device, self._manifest.zero)
        self.values, self._empty = self.parts.parameters(program, self.specs, given, kept)
        refuse_elsewhere(self.values, device)
        self.data = self._data_shards(data)
        self._compare(self.parts.sources)
        self.mirror = self._mirrored(given, kept)
        self._filled = False  # then frozen parameters, too, are known to the ranks that hold them alone

    def regroup(self, manifest: Manifest, replicas: Sequence[int]) -> None:
        """Of these replicas from now on, as they were at the start: its ranks hold what they held."""
        self._manifest = manifest
        self.parts.regroup(manifest.mesh)
        if self.data is not None:
            self.data.regroup(manifest.mesh, self._first, replicas)

    def rejoined(self, mesh: Mesh, rank: int) -> None:
        """All ranks of the start are there again, and this process is the one that it was: it steps what it has
        stepped.
        """
        if self.data is not None:
            self.data.regroup(mesh, rank, mesh.replicas)

    def _mirrored(self, given: Given, kept: Mapping[str, Kept]) -> Mirror | None:
        """What this process keeps of another rank's parameters, if it is to survive the loss of that."""
        survival = self._transport.meeting.survival
        if survival is None or not survival.mirror or not any(spec.trainable for spec in self._manifest.parameters):
            return None
        assert isinstance(given, Mapping)
        pieces, first = partial(self.parts.pieces, self._manifest.parameters), self._first
        known = {
            name.removeprefix(MIRRORED): (held.box, held.parameter) for name, held in kept.items()
            if name.startswith(MIRRORED)
        }  # fmt: skip
        mesh = self._manifest.mesh
        mirror = Mirror(
            pieces, self._transport.endpoint(first), first, mesh.size, mesh.dp, self._device, given, known
        )  # fmt: skip
        mirror.fill(self.values)
        return mirror

    def stand_in(self, lost: int) -> None:
        """This rank is lost: what it had counts where it is mirrored."""
        if self.mirror is not None:
            self.mirror.lost = lost

    @property
    def _first(self) -> int:
        """Of this process' ranks."""
        return self._transport.ranks[0]

    def _data_shards(self, before: DataShards | None) -> DataShards | None:
        """None where every rank steps whole parameters, or all ranks are in this process, which holds each once."""
        manifest, rank = self._manifest, self._first
        group = manifest.mesh.group(Group.DATA, rank)
        if not manifest.zero or len(group) == 1 or isinstance(self._transport, InProcess):
            return None
        apart = manifest.zero >= 3
        fits = before is not None and (before.ranks, before.apart) == (group, apart)
        survival = self._transport.meeting.survival
        failures = 0 if survival is None else survival.failures
        shards = before if before is not None and fits else DataShards(manifest.mesh, rank, apart, failures)
        shards.add(self.specs, self.values)
        return shards

    def _compare(self, wholes: Mapping[str, torch.Tensor]) -> None:
        """InputError unless all ranks that hold a parameter, frozen or not, hold the same values, or parts of the same.
        wholes: the tensors that parts were taken from, or checksums of them.
        """
        parameters = self._manifest.parameters
        alike = [spec for spec in parameters if not self.parts.in_shards(spec)]
        shared = [Shared("parameter", spec.name, spec.ranks, spec.equal) for spec in alike]
        self._transport.compare_values(shared, {n: p for n, p in self.values.items() if n not in self._empty})
        divided = [spec for spec in parameters if spec.boxes or self.parts.in_shards(spec)]
        if divided:  # ranks hold different boxes of it, which are to be of one tensor
            shared = [Shared("parameter", spec.name, spec.ranks) for spec in divided]
            self._transport.compare_values(shared, wholes)

    def know(self, other: OwnParameters) -> None:
        """Of the parameters of a program for other decisions of the model. InputError if ranks of several processes
        would have to train a parameter that they did not have before. All ranks call it.
        """
        known = {spec.name: spec for spec in self.specs}
        new = [spec for spec in other.specs if spec.name not in known]
        moved = [spec for spec in other.specs if spec.name in known and spec.ranks != known[spec.name].ranks]
        trained = [spec for spec in (*new, *moved) if spec.trainable]
        if not isinstance(self._transport, InProcess):
            everywhere = self._transport.meeting.total("other decisions", lambda: float(len(trained)))
            if everywhere:
                raise InputError(
                    "with what this batch decides, ranks would train parameters that they did not have before"
                    + (f", such as {trained[0].name!r}" if trained else ""),
                    "train_step",
                    "compile with an example that uses all parts of the model (text, pictures and sound), and with "
                    "stages that each have something to do without the optional ones",
                )
        if new and any(spec.trainable for spec in new):
            log.warning(
                "a batch trains parameters that none did before, such as %s: give them to the optimizer too, or "
                "compile with an example that uses all parts of the model",
                next(spec.name for spec in new if spec.trainable),
            )
        self.specs = [*self.specs, *new]
        self.values = {**self.values, **{spec.name: other.values[spec.name] for spec in new}}
        self._empty = self._empty | (other._empty - known.keys())
        if self.data is not None:
            self.data.add(new, self.values)

    @property
    def trained(self) -> list[ParameterSpec]:
        """Returns the specs of the trainable parameters of this process."""
        return [spec for spec in self.specs if spec.trainable]

    def box(self, spec: ParameterSpec) -> Box | None:
        """What this process computes with of a parameter; None: all of it."""
        return self.parts.box(spec)

    def stepped(self, name: str) -> nn.Parameter:
        """What this process steps of a parameter that trains."""
        shard = self.data.of(name) if self.data is not None else None
        return self.values[name] if shard is None else shard

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this process steps, under the model's names, each once, in the program's order; behind it what it keeps
        for another rank.
        """
        yield from self._named_own()
        if self.mirror is not None:
            yield from ((piece.spec.name, parameter) for piece, parameter in self.mirror.trained)

    def _named_own(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((spec.name, self.stepped(spec.name)) for spec in self.trained)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module.zero_grad."""
        for _, parameter in self.named():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their common 2-norm is at most `max_norm`; returns the norm before, on
        the CPU.

        The norm is over all ranks, each parameter once: tied ones count at their owner, replicas not at all.
        All ranks call it. InputError: max_norm is below 0, which would turn gradients round.
        """
        if not max_norm >= 0:
            raise InputError(f"max_norm is {max_norm}", "clip_grad_norm_", "pass a number from 0 on; inf only measures")
        square = self._transport.meeting.total(CLIP, self._square)
        norm = torch.tensor(square, dtype=torch.float64).sqrt().float()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(self._device)
        for _, parameter in self.named():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm

    def _square(self) -> float:
        """The square of the norm of the gradients that count here."""
        square = torch.zeros(1, dtype=torch.float64, device=self._device)
        counted = [self.stepped(spec.name) for spec in self.trained if self.counts(spec)]
        if self.mirror is not None:
            counted += [parameter for piece, parameter in self.mirror.trained if self.mirror.stands_in(piece)]
        for parameter in counted:
            if parameter.grad is not None:
                wide = torch.promote_types(parameter.grad.dtype, torch.float32)
                square += torch.linalg.vector_norm(parameter.grad, dtype=wide).double() ** 2
        return float(square)

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether this process' gradient of a parameter has entries that no process before it counts."""
        first, mesh = self._first, self._manifest.mesh
        if self.mirror is not None:
            return self.mirror.counts(spec)
        if self.data is not None and self.data.of(spec.name) is not None:
            position, part = mesh.coordinates(first).pp, mesh.shard(first)
            shard = mesh.shard(mesh.group(spec.equal, first)[0])  # of those that hold the same
            return (position, part) == (spec.owner, shard) and self.data.counts
        return mesh.group(spec.equal, first, spec.ranks)[0] in self._transport.ranks

    @property
    def wholes(self) -> Mapping[str, nn.Parameter]:
        """The whole parameters of this process, frozen ones too: what trains, not copies."""
        return {spec.name: self.values[spec.name] for spec in self.specs if self.parts.box(spec) is None}

    @property
    def shards(self) -> Mapping[str, Kept]:
        """Those of which it keeps a part for itself, with what that is; without those that have no values. Under other
        names what it keeps for another rank.
        """
        specs = [spec for spec in self.specs if spec.name not in self._empty]
        kept_shards = {spec.name: self.parts.kept(spec, self.values[spec.name]) for spec in specs}
        if self.mirror is not None:
            for piece in self.mirror.pieces:
                value = self.mirror.values[piece.spec.name]
                kept_shards[f"{MIRRORED}{piece.spec.name}"] = Kept(piece.box, value, Source.of(value))
        return {name: kept for name, kept in kept_shards.items() if kept is not None}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This process' parameters, frozen ones too, detached, under the model's names; of those that data-parallel
        ranks step in shards its own shard.
        """
        return self._held_now | {name: parameter.detach() for name, parameter in self._named_own()}

    @property
    def _held_now(self) -> dict[str, torch.Tensor]:
        """This process' parameters as it computes with them, detached. `refresh` comes before."""
        return {spec.name: self.values[spec.name].detach() for spec in self.specs}

    def refresh(self) -> None:
        """Bring what ranks have stepped in shards into the parameters that they compute with, if any has. All ranks
        call it.
        """
        if self._manifest.zero == 0 or isinstance(self._transport, InProcess):
            return

        def stale() -> float:
            if self.data is not None:
                self.data.check_steps("parameters")
            return float(self.stale)

        anywhere = self._transport.meeting.total("parameters that ranks have stepped in shards", stale)
        if anywhere:
            self._transport.meeting.surviving(self.gather, "parameters that ranks have stepped in shards")

    def check_step(self, where: str) -> None:
        """InputError if a step would not train what the model has."""
        self._check_values(where)
        self.parts.check_sources(where)
        if self.data is not None:
            self.data.check_steps(where)

    @property
    def stale(self) -> bool:
        """Whether whole parameters lack what this rank has stepped, as far as it knows."""
        return self.data is not None and self.data.stale

    def gather(self) -> None:
        """Bring what ranks have stepped in shards into the parameters that they compute with. All ranks call it."""
        if self.data is not None:
            self.data.gather(self._transport)

    def _check_values(self, where: str) -> None:
        """InputError if there are parameters that were made without values, and `load` has not been called since."""
        if self._empty:
            count, first = len(self._empty), min(self._empty)
            raise InputError(
                f"{count} parameters of {self._manifest.name} have no values yet, {first!r} for one: they were "
                "given on the meta device, or a load failed halfway",
                where,
                "Load weights with compiled.load(...) first",
            )

    @torch.no_grad()
    def load(self, path: str | Path, format: weights.WeightLayout = weights.OWN) -> None:
        """Read this process' parameters from a safetensors file or a directory of them. All ranks call it.

        InputError if one is missing or of another shape or dtype, then nothing was changed; or if ranks that hold the
        same parameter have read other values.
        """

        wholes: dict[str, torch.Tensor] = {}

        def read() -> tuple[Vote, None]:
            boxes = {spec.name: self.parts.box(spec) for spec in self.specs}
            into = {name: tensor for name, tensor in self.values.items() if boxes.get(name) is None}
            for name, tensor in weights.each(path, self.specs, self._device, format, into=into):
                self._empty = set(self.values)  # until all have come
                box = boxes[name]
                if tensor is not self.values[name]:
                    self.values[name].copy_(tensor if box is None else cut(tensor, box))
                if box is not None:
                    wholes[name] = checksum(tensor)
            return NOTHING, None

        self._transport.meeting.hold("load", read)
        self._have_come()
        self._compare(wholes)

    @torch.no_grad()
    def fill(self, fill: Callable[[str, Box, torch.Tensor], None]) -> None:
        """Have everything that this process holds written by `fill`, which takes a parameter's name, a box of it and
        the tensor of that. All ranks call it. If it fails on one of them, none goes on without values.
        """

        def filled() -> tuple[Vote, None]:
            for spec in self.specs:
                self._empty = set(self.values)  # until all have come
                fill(spec.name, self.parts.box(spec) or whole_box(spec.shape), self.values[spec.name].detach())
            return NOTHING, None

        self._transport.meeting.hold("load", filled)
        self._have_come()

    def _have_come(self) -> None:
        """All values were read."""
        self._filled = True
        self._empty = set()
        if self.data is not None and self.data.apart:
            self.data.known()
        if self.mirror is not None:
            self._transport.meeting.surviving(partial(self.mirror.fill, self.values), "load")

    @property
    def written(self) -> list[ParameterSpec]:
        """Of all ranks, what has other values than the model had at first: what trains, or after `load` all."""
        return [spec for spec in self._manifest.parameters if spec.trainable or self._filled]

    def given(self, spec: ParameterSpec) -> Iterator[tuple[Box, int, nn.Parameter | None]]:
        """The pieces of a parameter, each with the rank that gives it to others, and what that is on this one."""
        assert self.mirror is not None
        for piece in self.parts.all_pieces(spec):
            giver, held = self.mirror.giver(piece), None
            if giver == self._first:
                held = self.stepped(spec.name) if self.mirror.is_own(piece) else self.mirror.values[spec.name]
            yield piece.box, giver, held

    @torch.no_grad()
    def collect(self, into: Mapping[str, torch.Tensor]) -> None:
        """Copy what was trained (after `load`: all that was read) into these tensors, from the ranks that own it.

        All ranks call it; `into` has every parameter of the program by name, on any device.
        """
        wanted = self.written

        def check() -> tuple[Vote, None]:
            self._check_values("collect")
            for spec in wanted:
                if into[spec.name].is_meta:
                    raise InputError(
                        f"parameter {spec.name!r} of the model is on the meta device, which holds no values", "collect",
                        "save with compiled.save(directory), or give the model memory first: "
                        "model.to_empty(device='cpu')",
                    )  # fmt: skip
            return NOTHING, None

        self._transport.meeting.hold("collect", check)
        self.refresh()
        for spec in wanted:
            into[spec.name].copy_(self._whole(spec, self.values.get(spec.name), "collect"))
            self.parts.put_back(spec)

    def _whole(self, spec: ParameterSpec, part: torch.Tensor | None, operation: str) -> torch.Tensor:
        """See Shards.whole."""
        meeting = self._transport.meeting
        if meeting.survival is None:
            return self.parts.whole(spec, part)
        call = partial(self.parts.whole, spec, part)
        return cast(torch.Tensor, meeting.surviving(partial(meeting.guarded, call, operation), operation))

    def save(self, directory: str | Path, format: weights.WeightLayout = weights.OWN) -> None:
        """Write the weights as HF does: a shard per pipeline rank, or one file from one process. All ranks call. If one
        of them cannot write, all raise, and what was saved there before is what is read there.
        """
        manifest, meeting, ranks = self._manifest, self._transport.meeting, self._transport.ranks
        mesh = manifest.mesh
        if set(ranks) == set(mesh.group(Group.WORLD, self._first)):
            self._check_values("save")
            weights.write(directory, manifest, None, self._held_now, format)
            return

        self.refresh()

        def name() -> float:
            self._check_values("save")
            return float(secrets.randbits(32)) if self._first == 0 else 0.0

        def shards() -> tuple[Vote, None]:
            for position in positions:
                weights.write(directory, manifest, position, state, format, save)
            return NOTHING, None

        def index() -> tuple[Vote, None]:
            if self._first == 0:
                weights.write_index(directory, manifest, format, save)
            return NOTHING, None

        positions = [mesh.coordinates(rank).pp for rank in ranks if rank == mesh.group(Group.POSITION, rank)[0]]
        state = self._held_now
        for spec in manifest.parameters:  # all ranks have their part in each that is divided
            if self.parts.in_parts(spec):
                tensor = self._whole(spec, state.get(spec.name), "save")
                state |= {spec.name: tensor.cpu()} if spec.owner in positions else {}
        save = f"{int(meeting.total('save', name)):08x}"
        try:
            meeting.hold("the shards of what is saved", shards)
        except BaseException:
            for position in positions:
                weights.discard(directory, manifest, position, save)
            raise
        meeting.hold("the index of what is saved", index)


def refuse_elsewhere(values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """InputError if a parameter lies on another device of this machine than the one that this process works on."""
    for name, value in values.items():
        if value.device.type == device.type and value.device.index != device.index:
            raise InputError(
                f"parameter {name!r} is on {value.device}, and this process works on {device}", "compile",
                f"make each process' model on its own device, which LOCAL_RANK tells: model.to('{device}')",
            )  # fmt: skip


# --- What a step's sums become: the `.grad` of the parameters of this process ----------------------------------------


ALONE = 2  # what sys.getrefcount gives for an object of one variable: the variable and the argument

Sums = Sequence[tuple[Rank, GradientSums]]


class Taken(NamedTuple):
    """A gradient that every rank of a group has whole. box: what of a parameter it is, where ranks of this process have
    shards of it. is_own: nothing else has its memory, so that it can be handed over as it is.
    """

    name: str
    gradient: torch.Tensor
    box: Box
    is_own: bool


def taken(sums: Sums, weights: Mapping[str, nn.Parameter], shards: Shards, kept: Iterable[torch.Tensor]) -> list[Taken]:
    """Of each rank of this process, after REDUCE. All holders have the same bits: the first one's will do. weights: of
    the parameters that the process holds. kept: other tensors that outlive the step; a model's own backward may give
    such a tensor as a gradient.
    """
    gradients: list[Taken] = []
    done: set[tuple[str, Box]] = set()
    buffers = [gradient for _, stage_sums in sums for gradient in stage_sums.buffers.values()]
    memory = Counter([tensor.untyped_storage().data_ptr() for tensor in (*buffers, *weights.values(), *kept)])
    del buffers
    for rank, stage_sums in sums:
        for name in list(stage_sums.buffers):
            gradient = stage_sums.buffers.pop(name)
            held = sys.getrefcount(gradient)  # here, not in a function: calls hold arguments once or twice
            boxes = stage_sums.specs[name].boxes
            box = boxes[rank.tp_rank] if shards.divides(boxes) else ()
            if (name, box) not in done:
                done.add((name, box))
                is_own = name in stage_sums.own or (held <= ALONE and _is_free(gradient, memory))
                gradients.append(Taken(name, gradient, box, is_own))
    return gradients


def receive(
    given: Iterable[Taken], sums: Sums, specs: Iterable[ParameterSpec], weights: Mapping[str, nn.Parameter],
    shards: Shards, data: DataShards | None,
) -> None:  # fmt: skip
    """given: of `taken`. specs: of the parameters that the process holds."""
    wholes: dict[str, torch.Tensor] = {}  # of shards that ranks of this process have
    for item in given:
        _receive(item, weights, data, wholes)
    if any(stage_sums.shards for _, stage_sums in sums):
        _receive_shards(sums, specs, weights, data, wholes)
    for name, gradient in wholes.items():
        before = weights[name].grad
        weights[name].grad = gradient if before is None else before.add_(gradient)


def _receive(
    item: Taken, weights: Mapping[str, nn.Parameter], data: DataShards | None, wholes: dict[str, torch.Tensor]
) -> None:  # fmt: skip
    parameter = weights[item.name]
    if item.box:
        put(wholes.setdefault(item.name, torch.empty_like(parameter)), item.box, item.gradient)
    elif data is not None and data.of(item.name) is not None:
        data.take(item.name, item.gradient)
    elif parameter.grad is not None:
        parameter.grad.add_(item.gradient)
    elif item.is_own:
        parameter.grad = item.gradient
    else:  # shares memory with another gradient, or with what is read again
        parameter.grad = item.gradient.clone(memory_format=torch.contiguous_format)


def _receive_shards(
    sums: Sums, specs: Iterable[ParameterSpec], weights: Mapping[str, nn.Parameter], data: DataShards | None,
    wholes: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    of_name = {spec.name: spec for spec in specs}
    for rank, stage_sums in sums:
        for name, gradient in stage_sums.shards.items():
            if data is not None:
                data.take_shard(name, gradient)
            else:
                buffer = wholes.setdefault(name, torch.empty_like(weights[name]))
                put(buffer, _entries(rank, of_name[name]), gradient)


def _entries(rank: Rank, spec: ParameterSpec) -> Box:
    """What of a parameter that this process holds whole is a rank's shard."""
    box = spec.boxes[rank.tp_rank] if spec.boxes else whole_box(spec.shape)
    group = rank.group(Group.DATA)
    return part_in_box(box, *shard_of(spec.local.shape, len(group), group.index(rank.rank)))


def _is_free(gradient: torch.Tensor, memory: Counter[int]) -> bool:
    """Whether a gradient that is held nowhere else can be handed over as it is: dense, with no more memory behind
    it than it needs, which nothing else shares. memory: how many gradients, parameters, constants and entries of the
    batch have each.
    """
    storage = gradient.untyped_storage()
    return (
        gradient.is_contiguous() and storage.nbytes() == gradient.nbytes and memory[storage.data_ptr()] <= 1
    )  # fmt: skip
