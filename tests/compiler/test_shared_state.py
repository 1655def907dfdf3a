"""Layers of equal structure that read a counter, a global or another object's state: each is what eager makes of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiler.eager import CLASSES, WIDTH, assert_as_eager, batch

COUNT = 0
COUNTS = [0]
ORDER = itertools.count()
SCALES = iter(())
DEPTH: ContextVar[float] = ContextVar("DEPTH", default=0.0)


class State:
    """Of a model, shared by its layers."""

    classwide = 0

    def __init__(self) -> None:
        self.number, self.table, self.inner = 0, {"n": 0}, self
        self.module: Any = None


class Layer(nn.Module):
    def __init__(self, state: State, scale: Callable[[Layer], float]) -> None:
        super().__init__()
        self.state, self.scale, self.step = state, scale, 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * (1.0 + self.scale(self))


class Model(nn.Module):
    """around(model, number): called before each layer."""

    def __init__(self, scale: Callable[[Layer], float], around: Callable[[Model, int], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.state, self.around = State(), around
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Layer(self.state, scale) for _ in range(4)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        global COUNT, ORDER, SCALES
        COUNT, ORDER, SCALES = 0, itertools.count(), iter([1.0, 2.0, 3.0, 4.0])
        COUNTS[0], self.state.number, self.state.table["n"], State.classwide = 0, 0, 0, 0
        random.seed(1)
        hidden = self.embed(x)
        for number, layer in enumerate(self.layers):
            self.around(self, number)
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def counted(layer: Layer) -> float:
    layer.state.number += 1
    return layer.state.number


def in_a_table(layer: Layer) -> float:
    layer.state.inner.table["n"] += 1
    return layer.state.inner.table["n"]


def classwide(layer: Layer) -> float:
    type(layer.state).classwide += 1
    return layer.state.classwide


def by_name(layer: Layer) -> float:
    return getattr(layer.state, "number") * 1.0  # noqa: B009


def in_a_global(layer: Layer) -> float:
    global COUNT
    COUNT += 1
    return COUNT


def in_a_list(layer: Layer) -> float:
    COUNTS[0] += 1
    return COUNTS[0]


def nothing(model: Model, number: int) -> None:
    pass


def set_global(model: Model, number: int) -> None:
    global COUNT
    COUNT = number


def set_state(model: Model, number: int) -> None:
    model.state.number = number


def set_each(model: Model, number: int) -> None:
    for layer in model.layers:
        layer.step = number


def _closing() -> tuple[Callable[[Layer], float], Callable[[Model, int], None]]:
    held = 0.0

    def read(layer: Layer) -> float:
        return held

    def write(model: Model, number: int) -> None:
        nonlocal held
        held = float(number)

    return read, write


CASES: dict[str, tuple[Callable[[Layer], float], Callable[[Model, int], None]]] = {
    "a counter of an object": (counted, nothing),
    "a counter in a table": (in_a_table, nothing),
    "a counter of a class": (classwide, nothing),
    "a global counter": (in_a_global, nothing),
    "a counter in a list": (in_a_list, nothing),
    "an endless iterator": (lambda layer: next(ORDER), nothing),
    "an iterator": (lambda layer: next(SCALES), nothing),
    "random numbers": (lambda layer: random.random(), nothing),
    "a global that is set outside": (lambda layer: COUNT, set_global),
    "state that is set outside": (lambda layer: layer.state.number, set_state),
    "state by its name": (by_name, set_state),
    "attributes that are set outside": (lambda layer: layer.step, set_each),
    "a context variable": (lambda layer: DEPTH.get(), lambda model, number: DEPTH.set(number) and None),
    "a closure": _closing(),
}


@pytest.mark.parametrize("name", CASES)
def test_each_layer_is_what_eager_makes_of_it(name: str) -> None:
    assert_as_eager(Model(*CASES[name]), batch(), meshes=["pp=2"], copied=False)
