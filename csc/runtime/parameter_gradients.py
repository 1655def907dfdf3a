"""What a step's sums become: the `.grad` of the parameters of this process.

taken(sums, weights, shards, kept) -> [Taken]          takes the sums out of `sums`; sets nothing, and waits for nothing
receive(taken, sums, specs, weights, shards, data)     adds to what is there
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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
    found: list[Taken] = []
    done: set[tuple[str, Box]] = set()
    there = [gradient for _, own in sums for gradient in own.buffers.values()]
    memory = Counter([one.untyped_storage().data_ptr() for one in (*there, *weights.values(), *kept)])
    del there
    for rank, own in sums:
        for name in list(own.buffers):
            gradient = own.buffers.pop(name)
            held = sys.getrefcount(gradient)  # here, not in a function: calls hold arguments once or twice
            boxes = own.specs[name].boxes
            box = boxes[rank.tp_rank] if shards.divides(boxes) else ()
            if (name, box) not in done:
                done.add((name, box))
                is_own = name in own.own or (held <= ALONE and _is_free(gradient, memory))
                found.append(Taken(name, gradient, box, is_own))
    return found


def receive(
    given: Iterable[Taken], sums: Sums, specs: Iterable[ParameterSpec], weights: Mapping[str, nn.Parameter],
    shards: Shards, data: DataShards | None,
) -> None:  # fmt: skip
    """given: of `taken`. specs: of the parameters that the process holds."""
    wholes: dict[str, torch.Tensor] = {}  # of shards that ranks of this process have
    for one in given:
        _receive(one, weights, data, wholes)
    if any(own.shards for _, own in sums):
        _receive_shards(sums, specs, weights, data, wholes)
    for name, gradient in wholes.items():
        before = weights[name].grad
        weights[name].grad = gradient if before is None else before.add_(gradient)


def _receive(
    one: Taken, weights: Mapping[str, nn.Parameter], data: DataShards | None, wholes: dict[str, torch.Tensor]
) -> None:  # fmt: skip
    parameter = weights[one.name]
    if one.box:
        put(wholes.setdefault(one.name, torch.empty_like(parameter)), one.box, one.gradient)
    elif data is not None and data.of(one.name) is not None:
        data.take(one.name, one.gradient)
    elif parameter.grad is not None:
        parameter.grad.add_(one.gradient)
    elif one.is_own:
        parameter.grad = one.gradient
    else:  # shares memory with another gradient, or with what is read again
        parameter.grad = one.gradient.clone(memory_format=torch.contiguous_format)


def _receive_shards(
    sums: Sums, specs: Iterable[ParameterSpec], weights: Mapping[str, nn.Parameter], data: DataShards | None,
    wholes: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    of_name = {spec.name: spec for spec in specs}
    for rank, own in sums:
        for name, gradient in own.shards.items():
            if data is not None:
                data.take_shard(name, gradient)
            else:
                whole = wholes.setdefault(name, torch.empty_like(weights[name]))
                put(whole, _entries(rank, of_name[name]), gradient)


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
