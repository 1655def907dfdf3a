"""What each process writes of a checkpoint: every entry of every tensor is written once, by one of those that hold it.

Terms: a *piece* is what a process writes of a tensor: a box of its entries, at most PART bytes. Of ranks that hold the
same box the one with the least to write so far writes it; all ranks reckon alike, without a message. The state of an
optimizer is written where its parameter is. The *rest* is what no program reads (csc.runtime.weights.WeightLayout).

    boxes_written(trainer) -> [(spec, box)]                  by this process
    weights(trainer, written, rest) -> [Piece]               parameters and buffers
    optimizer(trainer, written, made) -> ([Piece], told)            told: as csc.runtime.optimizer lists it
    divided(piece) -> Piece...                               of at most PART bytes
    copies(pieces) -> [Piece]                                of the values of now, on the CPU
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.runtime import optimizer as optimizer_state
from csc.runtime.gradients import shard_of
from csc.runtime.specs import Box, ParameterSpec, part_in_box, whole_box
from csc.runtime.trainer import Trainer

PART = 64 * 2**20  # bytes: what is read for some entries is read and checked as a whole
STATES = 3  # tensors of a parameter that trains with its state, as writing is shared out


@dataclass(frozen=True)
class Piece:
    """name: of the parameter or buffer; key: of the optimizer's state, "": of the model itself."""

    name: str
    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    trained: bool


Written = Sequence[tuple[ParameterSpec, Box]]


def boxes_written(trainer: Trainer) -> Written:
    """By this process; all of it, if it runs all ranks."""
    manifest, ranks = trainer.program.manifest, trainer.transport.ranks
    if len(ranks) == manifest.mesh.size:
        return [(spec, whole_box(spec.shape)) for spec in manifest.parameters]
    position = manifest.mesh.coordinates(ranks[0]).pp
    holders = Holders(manifest.mesh, position)
    load: Counter[int] = Counter()
    found = []
    for spec in manifest.parameters:
        if spec.owner != position:
            continue
        divided = manifest.zero >= 3 or (manifest.zero > 0 and spec.trainable)
        sizes = holders.sizes(spec)
        for place, held_by in holders.of(spec, divided).items():
            entries = sizes[place.shard]
            if not entries and 0 not in spec.shape:
                continue
            writer = held_by[0] if len(held_by) == 1 else min(held_by, key=lambda rank: (load[rank], rank))
            load[writer] += entries * spec.dtype.itemsize * (STATES if spec.trainable else 1)
            if writer == ranks[0]:
                found.append((spec, holders.box(spec, place)))
    return found


class HeldPiece(NamedTuple):
    """What of a parameter a rank holds: which of the tensor-parallel boxes, which shard of that; None: all of it."""

    box: int | None
    shard: int | None


class Holders:
    """The ranks of a position, by what they step of a parameter, or hold."""

    def __init__(self, mesh: Mesh, position: int) -> None:
        groups = [group for group in mesh.groups(Group.DATA) if mesh.coordinates(group[0]).pp == position]
        self._mesh, self._data = mesh, len(groups[0])
        self._ranks = sorted((rank, HeldPiece(mesh.shard(rank), i)) for group in groups for i, rank in enumerate(group))
        self._known: dict[tuple[bool, bool, Group], dict[HeldPiece, list[int]]] = {}

    def of(self, spec: ParameterSpec, divided: bool) -> Mapping[HeldPiece, list[int]]:
        """divided: by data-parallel ranks."""
        boxes, shards = bool(spec.boxes), divided and bool(spec.shape) and self._data > 1
        if (boxes, shards, spec.equal) not in self._known:
            found: dict[HeldPiece, list[int]] = {}
            for rank, place in self._ranks:
                box = self._mesh.shard(self._mesh.group(spec.equal, rank)[0]) if boxes else None
                found.setdefault(HeldPiece(box, place.shard if shards else None), []).append(rank)
            self._known[boxes, shards, spec.equal] = found
        return self._known[boxes, shards, spec.equal]

    def sizes(self, spec: ParameterSpec) -> dict[int | None, int]:
        """Entries of each shard, and of all of them together."""
        shape = spec.local.shape
        found: dict[int | None, int] = {None: math.prod(shape)}
        for place in range(self._data):
            dimension, start, stop = shard_of(shape, self._data, place)
            rest = math.prod(shape[:dimension]) * math.prod(shape[dimension + 1 :])
            found[place] = rest * (stop - start)
        return found

    def box(self, spec: ParameterSpec, place: HeldPiece) -> Box:
        """Which they are."""
        box = whole_box(spec.shape) if place.box is None else spec.boxes[place.box]
        return box if place.shard is None else part_in_box(box, *shard_of(spec.local.shape, self._data, place.shard))


def weights(trainer: Trainer, written: Written, rest: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The rest is written by the first process."""
    found: list[Piece] = []
    for spec, box in written:
        held = trainer.own.stepped(spec.name) if spec.trainable else trainer.own.values[spec.name]
        found += divided(Piece(spec.name, "", spec.shape, box, held.detach(), spec.trainable))
    if 0 in trainer.transport.ranks:
        for name, tensor in rest.items():
            shape = tuple(tensor.shape)
            found += divided(Piece(name, "", shape, whole_box(shape), tensor.detach(), False))
    return found


def optimizer(
    trainer: Trainer, written: Written, made: torch.optim.Optimizer
) -> tuple[list[Piece], dict[str, Any]]:  # fmt: skip
    """InputError for state that is neither numbers nor tensors."""
    names = {spec.name for spec, _ in written}
    own = [replace(one, writes=one.name in names) for one in optimizer_state.owned(trainer)]
    told = optimizer_state.listed(made, own)
    of_name = {one.name: one for one in own}
    pieces: list[Piece] = []
    for name, found in told["parameters"].items():
        one = of_name[name]
        for key, tensor in found["tensors"].items():
            shape = one.spec.shape if tensor.shape == one.parameter.shape else tuple(tensor.shape)
            pieces += divided(Piece(name, key, shape, one.box_of(tensor), tensor, True))
        found["tensors"] = {}
    return pieces, told


def divided(piece: Piece) -> Iterator[Piece]:
    """In stretches of the first dimension."""
    tensor = piece.tensor
    rows = tensor.shape[0] if tensor.dim() else 1
    each = max(1, PART // max(1, tensor.nbytes // max(1, rows)))
    if each >= rows:
        yield piece
        return
    for start in range(0, rows, each):
        stop = min(start + each, rows)
        yield replace(piece, box=part_in_box(piece.box, 0, start, stop), tensor=tensor[start:stop])


def copies(pieces: Sequence[Piece]) -> list[Piece]:
    """Whatever is written to the tensors afterwards is not in the copies."""
    return [
        replace(one, tensor=one.tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)) for one in pieces
    ]
