"""What each process writes of a checkpoint: every entry of every tensor is written once, by one of those that hold it.

Terms: a *piece* is what a process writes of a tensor: a box of its entries, at most PART bytes. Of ranks that hold the
same box the one with the least to write so far writes it; all ranks reckon alike, without a message. The state of an
optimizer is written where its parameter is. The *rest* is what no program reads (csc.runtime.weights.Format).

    boxes_written(trainer) -> [(spec, box)]                  by this process
    weights(trainer, rest) -> [Piece]                        parameters and buffers
    optimizer(trainer, optimizer) -> ([Piece], told)         told: as csc.runtime.optimizer_state lists it
    divided(piece) -> Piece...                               of at most PART bytes
    copies(pieces) -> [Piece]                                of the values of now, on the CPU
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from csc.ir.groups import Group
from csc.runtime import optimizer_state
from csc.runtime.boxes import part, sizes, whole_box
from csc.runtime.specs import Box, Manifest, ParameterSpec
from csc.runtime.trainer import Trainer
from csc.runtime.zero_shards import shard_of

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


def boxes_written(trainer: Trainer) -> list[tuple[ParameterSpec, Box]]:
    """By this process; all of it, if it runs all ranks."""
    manifest, ranks = trainer.program.manifest, trainer.transport.ranks
    if len(ranks) == manifest.mesh.size:
        return [(spec, whole_box(spec.shape)) for spec in manifest.parameters]
    load: Counter[int] = Counter()
    found = []
    for spec in manifest.parameters:
        for box, holders in _holders(manifest, spec).items():
            writer = min(holders, key=lambda rank: (load[rank], rank))
            load[writer] += math.prod(sizes(box)) * spec.dtype.itemsize * (STATES if spec.trainable else 1)
            if writer == ranks[0]:
                found.append((spec, box))
    return found


def _holders(manifest: Manifest, spec: ParameterSpec) -> dict[Box, list[int]]:
    """The ranks of a parameter's owner, by what they step of it, or hold; without those that have no entry."""
    mesh = manifest.mesh
    found: dict[Box, list[int]] = {}
    for rank in mesh.group(Group.POSITION, 0, [spec.owner]):
        box = spec.boxes[mesh.shard(rank)] if spec.boxes else whole_box(spec.shape)
        data = mesh.group(Group.DATA, rank)
        divided = manifest.zero >= 3 or (manifest.zero > 0 and spec.trainable)
        if divided and spec.shape and len(data) > 1:
            box = part(box, *shard_of(spec.local.shape, len(data), data.index(rank)))
        found.setdefault(box, []).append(rank)
    return {box: ranks for box, ranks in found.items() if 0 not in sizes(box) or 0 in spec.shape}


def weights(trainer: Trainer, rest: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The rest is written by the first process."""
    found: list[Piece] = []
    for spec, box in boxes_written(trainer):
        held = trainer.own.stepped(spec.name) if spec.trainable else trainer.own.values[spec.name]
        found += divided(Piece(spec.name, "", spec.shape, box, held.detach(), spec.trainable))
    if 0 in trainer.transport.ranks:
        for name, tensor in rest.items():
            shape = tuple(tensor.shape)
            found += divided(Piece(name, "", shape, whole_box(shape), tensor.detach(), False))
    return found


def optimizer(trainer: Trainer, made: torch.optim.Optimizer) -> tuple[list[Piece], dict[str, Any]]:
    """InputError for state that is neither numbers nor tensors of a parameter's entries."""
    written = {spec.name for spec, _ in boxes_written(trainer)}
    own = [replace(one, writes=one.name in written) for one in optimizer_state.owned(trainer)]
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
        yield replace(piece, box=part(piece.box, 0, start, stop), tensor=tensor[start:stop])


def copies(pieces: Sequence[Piece]) -> list[Piece]:
    """Whatever is written to the tensors afterwards is not in the copies."""
    return [
        replace(one, tensor=one.tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)) for one in pieces
    ]
