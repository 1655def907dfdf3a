"""Random numbers that a forward fixes, or draws by other means than torch's operations: csc says no."""

from __future__ import annotations

import operator
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
    return csc.compile(stack(lambda x, layer: layer.scale * x * draw(), layers=1), example=batch(), cache=False)


@pytest.mark.parametrize(("draw", "said"), REFUSED)
def test_numbers_that_csc_would_not_draw_are_refused(draw: Callable[[], Any], said: str) -> None:
    with pytest.raises(csc.InputError, match=said):
        compiled(draw)


def dropping(rate: float, draw: Callable[[], Any]) -> Callable[[torch.Tensor, Applying], torch.Tensor]:
    """Layer drop, as models of speech and music have it."""
    return lambda x, layer: x * 0.0 if draw() < rate else layer.scale * x


def uniform() -> float:
    return random.uniform(0, 1)


DRAWS = [uniform, lambda: random.random(), lambda: numpy.random.rand(), lambda: numpy.random.uniform(0.0, 1.0)]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_number_that_decides_nothing_may_be_drawn(draw: Callable[[], Any]) -> None:
    """And the user's generators stay as they were."""
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    model = stack(dropping(0.0, draw))
    compiled = csc.compile(model, example=batch(), cache=False, check=False)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before
    loss = compiled.train_step(batch()).item()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    eager = model(**batch())
    eager.backward()
    assert loss == eager.item()
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())
    assert compiled.train_step(batch()).item() == loss, "nothing of the model was changed"


@pytest.mark.parametrize(
    "use",
    [
        lambda p: 1.0 if p < 0.5 else 2.0,
        lambda p: 1.0 if operator.gt(0.5, p) else 2.0,
        lambda p: 1.0 if p >= 0.25 else 2.0,
        lambda p: 1.0 + p,
        lambda p: 2**p,
        lambda p: 1.0 if p else 2.0,
        lambda p: {p: 1.0}[p],
        lambda p: 1.0 if p == 0.5 else 2.0,
        lambda p: torch.tensor(float(p)),
        lambda p: torch.ones(1) * p,
        lambda p: torch.ones(1).add(p),
        lambda p: torch.full((1,), p),
        lambda p: 1.0 if p < torch.tensor(0.5) else 2.0,
        lambda p: 1.0 if numpy.float64(0.5) > p else 2.0,
        lambda p: numpy.asarray([p], dtype=float).sum().item(),
        lambda p: float(f"{p:.3f}"),
        lambda p: max(p, 0.5),
    ],
)
def test_one_that_is_used_may_not(use: Callable[[Any], Any]) -> None:
    with pytest.raises(csc.InputError, match="draws random numbers from Python's random module"):
        compiled(lambda: use(random.random()))


@pytest.mark.parametrize("draw", DRAWS[2:])
def test_nor_one_of_numpy(draw: Callable[[], Any]) -> None:
    with pytest.raises(csc.InputError, match="draws random numbers from NumPy"):
        compiled(lambda: 1.0 if draw() < 0.5 else 2.0)


def test_one_that_is_used_behind_others_may_not() -> None:
    def draw() -> float:
        random.random()
        return 1.0 if random.uniform(0, 1) < 0.0 else random.gauss(0.0, 1.0)

    with pytest.raises(csc.InputError, match="draws random numbers from Python's random module"):
        compiled(draw)


def test_numbers_of_a_generator_that_the_forward_seeds_are_those_of_eager() -> None:
    def draw() -> float:
        random.seed(5)
        first = random.random()
        return first - 2 * random.uniform(0, 2)

    random.seed(0)
    expected, model = draw(), stack(lambda x, layer: layer.scale * x * draw(), layers=1)
    found = csc.compile(model, example=batch(), cache=False, check=False).train_step(batch()).item()
    model.layers[0].function = lambda x, layer: layer.scale * x * expected
    assert found == model(**batch()).item()


@pytest.mark.parametrize("draw", [lambda: torch.rand(WIDTH), left_to_chance_in_a_fork, random.Random(1).random])
def test_numbers_that_csc_draws_are_not(draw: Callable[[], Any]) -> None:
    compiled(draw)
    assert torch.initial_seed() == 0, "the user's generator is as he seeded it"


def test_dropout_in_a_layer_is_no_such_thing() -> None:
    def dropped(x: torch.Tensor, layer: Applying) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.1) * layer.scale

    csc.compile(stack(dropped), example=batch(), cache=False)


NEVER: list[Callable[[], Any]] = [
    lambda: torch.rand([]) < 0.0, lambda: torch.lt(torch.rand([]), 0.0), lambda: torch.rand(1).lt(0.0),
    lambda: torch.rand([]) <= 0.0, lambda: torch.rand(1) > 1.0, lambda: torch.rand(1).ge(1),
    lambda: torch.gt(torch.rand(1), 1.0), lambda: torch.rand(1) >= 1,
]  # fmt: skip
ALWAYS: list[Callable[[], Any]] = [
    lambda: torch.rand(1) > 0.0, lambda: torch.rand([]) >= 0, lambda: torch.rand([]) < 1.0,
    lambda: torch.greater_equal(torch.rand(1), 0),
]  # fmt: skip


@pytest.mark.parametrize("skips", [*NEVER, *(lambda stays=stays: not stays() for stays in ALWAYS)])
def test_one_of_torch_that_decides_nothing_may_be_drawn(skips: Callable[[], Any]) -> None:
    """What a layer's chance of 0 to be skipped comes to: the loss of the layers as they are."""
    model = stack(lambda x, layer: x * 0.0 if skips() else layer.scale * x)
    found = csc.compile(model, example=batch(), cache=False).train_step(batch()).item()
    assert found == model(**batch()).item() != 0.0


def written() -> torch.Tensor:
    return torch.rand([]).sub_(1.0)


def rewritten(one: torch.Tensor) -> torch.Tensor:
    return (one < 0.0).logical_not_()


DECIDE: list[Callable[[], Any]] = [
    lambda: torch.rand([]) < 0.5, lambda: torch.rand([]) - 1 < 0.0, lambda: written() < 0.0,
    lambda: rewritten(torch.rand([])), lambda: torch.randn([]) < 0.0, lambda: torch.rand([]) <= 0.5,
    lambda: torch.rand([]) > 1e-9, lambda: written().view(1) < 0.0,
]  # fmt: skip


@pytest.mark.parametrize("decides", DECIDE)
def test_one_of_torch_that_decides_may_not(decides: Callable[[], Any]) -> None:
    model = stack(lambda x, layer: x * 0.0 if decides() else layer.scale * x, layers=1)
    with pytest.raises(csc.InputError, match="takes a Python decision that depends on the values of a tensor"):
        csc.compile(model, example=batch(), cache=False)


def test_several_numbers_are_no_decision() -> None:
    model = stack(lambda x, layer: x * 0.0 if torch.rand(2) < 0.0 else layer.scale * x, layers=1)
    with pytest.raises(csc.InputError):
        csc.compile(model, example=batch(), cache=False)


def test_a_chance_that_changes_is_asked_again() -> None:
    def dropped(x: torch.Tensor, layer: Any) -> torch.Tensor:
        return x * 0.0 if torch.rand([]) < layer.chance else layer.scale * x

    model = stack(dropped, layers=1)
    layer: Any = model.layers[0]
    layer.chance = 0.0
    compiled = csc.compile(model, example=batch(), cache=False)
    compiled.train_step(batch())
    layer.chance = 0.5
    with pytest.raises(csc.InputError, match="takes a Python decision"):
        compiled.train_step(batch())
