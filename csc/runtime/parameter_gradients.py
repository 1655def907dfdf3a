"""What a step's sums become: the `.grad` of the parameters of this process.

receive(sums, weights, shards, data, kept)      adds to what is there; takes the sums out of `sums`
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from csc.ir.groups import Group
from csc.runtime.boxes import part, put, whole_box
from csc.runtime.data_shards import DataShards
from csc.runtime.gradients import GradientSums
from csc.runtime.rank import Rank
from csc.runtime.shards import Shards
from csc.runtime.specs import Box, ParameterSpec
from csc.runtime.zero_shards import shard_of

ALONE = 2  # what sys.getrefcount gives for an object of one variable: the variable and the argument

Sums = Sequence[tuple[Rank, GradientSums]]


def receive(
    sums: Sums, specs: Iterable[ParameterSpec], weights: Mapping[str, nn.Parameter], shards: Shards,
    data: DataShards | None, kept: Iterable[torch.Tensor],
) -> None:  # fmt: skip
    """Of each rank of this process, after REDUCE. specs, weights: of the parameters that the process holds. kept: other
    tensors that outlive the step; a model's own backward may give such a tensor as a gradient.
    """
    wholes: dict[str, torch.Tensor] = {}  # of shards that ranks of this process have
    _take_sums(sums, weights, shards, data, kept, wholes)
    of_name = {spec.name: spec for spec in specs}
    for rank, own in sums:
        for name, gradient in own.shards.items():
            if data is not None:
                data.take_shard(name, gradient)
            else:
                whole = wholes.setdefault(name, torch.empty_like(weights[name]))
                put(whole, _entries(rank, of_name[name]), gradient)
    for name, gradient in wholes.items():
        before = weights[name].grad
        weights[name].grad = gradient if before is None else before.add_(gradient)


def _take_sums(
    sums: Sums, weights: Mapping[str, nn.Parameter], shards: Shards, data: DataShards | None,
    kept: Iterable[torch.Tensor], wholes: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    """Those that every rank of a group has whole. All holders have the same bits: the first one's will do."""
    done: set[tuple[str, Box]] = set()
    buffers = (tensor for _, own in sums for tensor in own.buffers.values())
    memory = Counter(t.untyped_storage().data_ptr() for one in (buffers, weights.values(), kept) for t in one)
    for rank, own in sums:
        for name in list(own.buffers):
            gradient = own.buffers.pop(name)
            held = sys.getrefcount(gradient)  # here, not in a function: calls hold arguments once or twice
            boxes = own.specs[name].boxes
            divided = shards.divides(boxes)
            what = name, boxes[rank.tp_rank] if divided else ()
            if what in done:
                continue
            done.add(what)
            if divided:
                put(wholes.setdefault(name, torch.empty_like(weights[name])), boxes[rank.tp_rank], gradient)
                continue
            if data is not None and data.of(name) is not None:
                data.take(name, gradient)
                continue
            parameter = weights[name]
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif name in own.own or (held <= ALONE and _is_free(gradient, memory)):
                parameter.grad = gradient
            else:  # shares memory with another gradient, or with what is read again
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)


def _entries(rank: Rank, spec: ParameterSpec) -> Box:
    """What of a parameter that this process holds whole is a rank's shard."""
    box = spec.boxes[rank.tp_rank] if spec.boxes else whole_box(spec.shape)
    group = rank.group(Group.DATA)
    return part(box, *shard_of(spec.local.shape, len(group), group.index(rank.rank)))


def _is_free(gradient: torch.Tensor, memory: Counter[int]) -> bool:
    """Whether a gradient that is held nowhere else can be handed over as it is: dense, with no more memory behind
    it than it needs, which nothing else shares. memory: how many gradients, parameters, constants and entries of the
    batch have each.
    """
    storage = gradient.untyped_storage()
    return (
        gradient.is_contiguous() and storage.nbytes() == gradient.nbytes and memory[storage.data_ptr()] <= 1
    )  # fmt: skip
