"""Equal layers are traced once, and the Program is the one of the model traced whole, text for text.

Real models: test_coverage.py.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.capture.capture import capture
from csc.capture.dedup.equality import Counterparts, attributes_read
from csc.ir.printer import program_text
from csc.reports.verification import verify
from tests.exactness import FLOAT32
from tests.tiers import long

WIDTH, DEPTH = 8, 5
RUN = array("b")  # a number for every traced forward of a layer
SEEN: list[torch.Tensor] = []


class Layer(nn.Module):
    """One of many. `number` is passed on and never looked at."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.scale, self.calls = number, 0.5, 0
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), float(number)))

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if type(hidden) is not torch.Tensor:  # in a trace
            RUN.append(1)
        return hidden + self.scale * F.gelu(self.linear(self.norm(hidden) + position)) + self.shift


class ByNumber(Layer):
    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, position) * (2.0 if self.number % 2 else 3.0)


class OtherScale(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = 0.5 if number < 2 else 0.25


class Writing(Layer):
    """Changes its argument."""

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        hidden += position
        return super().forward(hidden, position)


class Counting(Layer):
    """Remembers how often it was called."""

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden, position)


class Telling(Layer):
    """Gives away more than its result."""

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        SEEN.append(self.linear(hidden))
        return super().forward(hidden, position)


class Looking(Layer):
    """Reads what another layer gave away."""

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        before = SEEN[-1]
        SEEN.append(2.0 * hidden)
        return super().forward(hidden, position) + before


class Reaching(Layer):
    """Takes a batch entry from where its model has put one."""

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, position) + SEEN[0].mean()


class Viewing(Layer):
    """Returns a view of what it was given, and that itself."""

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> Any:
        return super().forward(hidden, position), position, {"kept": True}


class Dropping(Layer):
    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden, position), 0.1, self.training)


class Deciding(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if hidden.sum().item() > 0 else -hidden


class Opaque(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.deciding = csc.opaque(Deciding())

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.deciding(super().forward(hidden, position))


class Hooked(Layer):
    """A hook below it changes what it does, in every other layer."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number % 2:
            self.linear.register_forward_hook(lambda module, args, output: 3.0 * output)


class Model(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(layer(number) for number in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        SEEN[:] = [signal.mean() * torch.ones(WIDTH)]
        hidden = self.embed(signal)
        position = hidden.mean(1, keepdim=True)
        for layer in self.layers:
            layer.calls = 0
        for layer in self.layers:
            result = layer(hidden, position)
            hidden, position, *_ = result if isinstance(result, tuple) else (result, position)
        telling = sum(one.mean() for one in SEEN) if isinstance(self.layers[0], (Telling, Looking)) else 0.0
        return self.head(hidden).pow(2).mean() + telling


class Raw(Model):
    """Leaves one entry of the batch where its first layers find it, and another for the others."""

    def forward(self, signal: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(signal)
        position = hidden.mean(1, keepdim=True)
        for number, layer in enumerate(self.layers):
            SEEN[:] = [signal if number < 2 else other]
            hidden = layer(hidden, position)
        return self.head(hidden).pow(2).mean()


class Twice(Model):
    """Calls the first layers again, with something else."""

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(signal)
        position = hidden.mean(1, keepdim=True)
        for layer in self.layers:
            hidden = layer(hidden, position)
        for layer in self.layers[:2]:
            hidden = layer(hidden[:, :2], position)
        return self.head(hidden).pow(2).mean()


class InPlaceAfter(Model):
    """Adds to the result of the first layer where it stands, as DeepStack does."""

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(signal)
        position = hidden.mean(1, keepdim=True)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, position)
            if number < 2:
                hidden[:, 0] += 1.0
        return self.head(hidden).pow(2).mean()


class Decaying(Model):
    """Its loss looks at all parameters, at those of layers that would be repeated too."""

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return super().forward(signal) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


class Tied(Model):
    """The last layer has the weight of the first one."""

    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__(layer)
        self.layers[-1].linear.weight = self.layers[0].linear.weight


def batch() -> dict[str, torch.Tensor]:
    return {"signal": torch.arange(2 * 4 * 3).view(2, 4, 3) / 10.0}


def texts(model: nn.Module, example: dict[str, torch.Tensor]) -> tuple[str, str, int]:
    """The captured Program with equal layers traced once, and traced whole; how many layers' code the former ran."""
    whole = program_text(capture(model, example, whole=True))
    del RUN[:]
    return program_text(capture(model, example)), whole, len(RUN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer, traced",
    [
        (Layer, 1), (OtherScale, 2), long(ByNumber, DEPTH), long(Viewing, 1), (Dropping, 1), (Hooked, 2),
        (Writing, DEPTH), (Opaque, DEPTH),
        long(Telling, DEPTH), (Looking, DEPTH),
    ],
)  # fmt: skip
def test_layers_that_do_the_same_are_traced_once_and_no_others(layer: Callable[[int], nn.Module], traced: int) -> None:
    one, whole, ran = texts(Model(layer), batch())
    assert one == whole
    assert ran == traced


class Saying(Layer):
    """Logs, and somebody listens."""

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        logging.getLogger("tests.saying").warning("a layer runs")
        return super().forward(hidden, position)


def test_what_handlers_of_logs_keep_is_no_state_of_layers() -> None:
    class Keeping(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.kept.append(record.getMessage())

    handler = Keeping()
    logging.getLogger("tests.saying").addHandler(handler)
    try:
        one, whole, ran = texts(Model(Saying), batch())
    finally:
        logging.getLogger("tests.saying").removeHandler(handler)
    assert one == whole and ran == 1 and handler.kept


def test_layers_that_remember_something_of_their_own() -> None:
    model = Model(Counting)
    one, whole, _ = texts(model, batch())
    assert one == whole and model.layers[0].calls == Counting(0).calls


@pytest.mark.slow
def test_a_result_that_is_changed_afterwards_is_not_what_its_layer_gave() -> None:
    one, whole, ran = texts(InPlaceAfter(Layer), batch())
    assert one == whole and ran == 1


@pytest.mark.slow
def test_a_batch_entry_that_a_layer_was_not_given() -> None:
    one, whole, _ = texts(Raw(Reaching), {**batch(), "other": 2.0 * batch()["signal"]})
    assert one == whole


@pytest.mark.slow
def test_layers_that_are_called_in_several_ways() -> None:
    one, whole, _ = texts(Twice(Layer), batch())
    assert one == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Decaying, Tied])
@pytest.mark.long_cases("Decaying")
def test_parameters_of_repeated_layers_are_there_for_whoever_asks(kind: type[Model]) -> None:
    model = kind(Layer)
    one, whole, _ = texts(model, batch())
    assert one == whole
    compiled = csc.compile(model, mesh=csc.Mesh(pp=2), example=batch(), microbatches=1, schedule="1f1b")
    found = verify(compiled)
    assert found.grad_rel_max < FLOAT32 and not found.params_missing


def test_gradients_of_repeated_layers_are_those_of_eager() -> None:
    compiled = csc.compile(Model(Layer), mesh=csc.Mesh(pp=2), example=batch(), microbatches=1, schedule="1f1b")
    found = verify(compiled)
    assert found.loss_rel == 0 and found.grad_rel_max == 0 and not found.params_missing


def test_attributes_that_a_layer_looks_at() -> None:
    one, other = Layer(1), Layer(2)
    with attributes_read(one) as read:
        one(torch.ones(1, 2, WIDTH), torch.ones(1, 1, WIDTH))
    assert ("", "scale") in read and ("", "number") not in read and ("norm", "eps") in read
    assert Counterparts(one, other).same(read)
    other.norm.eps = 1e-3
    assert not Counterparts(one, other).same(read)
    assert "__getattribute__" not in vars(Layer)


def test_a_trace_leaves_the_layers_as_they_were() -> None:
    model = Model(Layer)
    before = [dict(vars(module)) for module in model.modules()]
    capture(model, batch())
    assert [dict(vars(module)) for module in model.modules()] == before


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) * cos + hidden * sin


class Turned(nn.Module):
    """Two tables whose last operation, shape and dtype are the same, as Llama's cosines and sines are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turn() for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x.square().mean()


def test_tables_of_one_type_are_two_tables() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 3, WIDTH), "angles": torch.randn(2, 3, WIDTH)}
    result = verify(csc.compile(Turned(), example=batch))
    assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ())
