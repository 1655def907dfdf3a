"""The seeds of a step's random numbers: one for the step, one for each microbatch, one for each region in it.

Terms: the *step's seed* is drawn from torch's default generator by rank 0, once a step, and is the same on every rank.
It is NO_CHANCE for a step that is compared with another program's (csc.kernels.dropout says what is drawn then).

    draw() -> int                                              this process' draw
    attach(rank, microbatches, drawn) -> generator -> microbatches with the seed of each
    of_microbatch(drawn, index) -> "random" of the microbatch with this index in the global batch
    seed_of(random, "model.layers.3.") -> seed of that region in a microbatch

A microbatch is known by its place in the global batch (replica after replica), a region by its name: neither depends on
stages, ranks, replicas or the order of work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from csc.ir.groups import RANDOM, Group
from csc.kernels.dropout import mixed
from csc.runtime.gradients import wait_sum
from csc.runtime.rank import Rank

Batch = Mapping[str, Any]
NO_CHANCE = -1


def draw() -> int:
    """A number from torch's default generator: `torch.manual_seed` before a step repeats the step."""
    return int(torch.randint(2**62, (), dtype=torch.int64))


def attach(rank: Rank, microbatches: Sequence[Batch], drawn: int) -> Generator[str, None, list[Batch]]:
    """The microbatches of a rank's step, each with its seed; as they are if the program draws nothing."""
    manifest = rank.program.manifest
    if not manifest.random:
        return list(microbatches)
    step = torch.tensor([drawn if rank.rank == 0 else 0], dtype=torch.int64, device=rank.device)
    yield from wait_sum(rank.endpoint, step, rank.group(Group.WORLD), "seed of the step's random numbers")
    places = [replica * manifest.microbatches + mb for replica, mb in map(rank.served, range(len(microbatches)))]
    return [{**batch, RANDOM: of_microbatch(int(step), place)} for place, batch in zip(places, microbatches)]


def of_microbatch(drawn: int, index: int) -> torch.Tensor:
    """The seed of a microbatch, by its index in the global batch, where the step's seed is `drawn`."""
    return torch.tensor(_of(drawn, index), dtype=torch.int64)


def seed_of(random: torch.Tensor, region: str) -> torch.Tensor:
    """The seed of a region, named as in the model with a dot at its end, in the microbatch whose seed is `random`."""
    return torch.tensor(_of(int(random), _word(region)), dtype=torch.int64)


def _of(seed: int, place: int) -> int:
    return mixed(seed, place) if seed >= 0 else NO_CHANCE


@cache
def _word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
