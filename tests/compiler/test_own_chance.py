"""Random numbers that a forward fixes, or draws by other means than torch's operations: csc says no."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import manual_seed

import csc
from tests.compiler.eager import WIDTH, Applying, batch, stack


def forked() -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand(WIDTH)


def seeded_by_another_name() -> torch.Tensor:
    manual_seed(0)
    return torch.rand(WIDTH)


def from_a_generator() -> torch.Tensor:
    return torch.rand(WIDTH, generator=torch.Generator().manual_seed(1))


def left_to_chance_in_a_fork() -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(WIDTH)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (forked, r"test_own_chance\.py:\d+: return torch\.rand.*seeds torch's random numbers in its forward"),
    (seeded_by_another_name, r"test_own_chance\.py:\d+: return torch\.rand.*seeds torch's random numbers"),
    (from_a_generator, r"test_own_chance\.py:\d+: .*from a generator of its own"),
    (random.random, r"before .*test_own_chance\.py:\d+: .*from Python's random module"),
    (lambda: float(numpy.random.rand()), r"before .*test_own_chance\.py:\d+: .*from NumPy.*eval mode"),
]


def compiled(draw: Callable[[], Any]) -> csc.CompiledModel:
    torch.manual_seed(0)  # as a script does, and a forward may do again
    return csc.compile(stack(lambda x, layer: layer.scale * x * draw(), 1), example=batch(), cache=False)


@pytest.mark.parametrize(("draw", "said"), REFUSED)
def test_numbers_that_csc_would_not_draw_are_refused(draw: Callable[[], Any], said: str) -> None:
    with pytest.raises(csc.InputError, match=said):
        compiled(draw)


@pytest.mark.parametrize("draw", [lambda: torch.rand(WIDTH), left_to_chance_in_a_fork, random.Random(1).random])
def test_numbers_that_csc_draws_are_not(draw: Callable[[], Any]) -> None:
    compiled(draw)
    assert torch.initial_seed() == 0, "the user's generator is as he seeded it"


def test_dropout_in_a_layer_is_no_such_thing() -> None:
    def dropped(x: torch.Tensor, layer: Applying) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.1) * layer.scale

    csc.compile(stack(dropped), example=batch(), cache=False)
