"""Code that runs while a layer does and is none of the model's: equal layers are still traced once.

State that the layers themselves look at: test_shared_state.py.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from csc.capture.capture import capture

pytestmark = pytest.mark.filterwarnings("ignore:a layer")

WIDTH, DEPTH = 8, 4
TOLD = [0]
MODEL_LOG = logging.getLogger("of.the.model")


class Telling(nn.Module):
    """Makes garbage that is found by collecting only, logs and warns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        cycles: list[Any] = [[] for _ in range(1000)]
        for one in cycles:
            one.append(one)
        MODEL_LOG.warning("a layer of %d", WIDTH)
        warnings.warn("a layer", stacklevel=1)
        return hidden + self.linear(hidden).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Telling() for _ in range(DEPTH))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(signal)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def count(*_: Any, **__: Any) -> None:
    TOLD[0] += 1


class Counting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        count()


@pytest.fixture
def collected() -> Iterator[None]:
    """The collector runs in every layer, and tells of it."""
    before = gc.get_threshold()
    gc.callbacks.append(count)
    gc.set_threshold(100, 1000, 1000)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(count)


@pytest.fixture
def logged() -> Iterator[None]:
    handler = Counting()
    MODEL_LOG.addHandler(handler)
    yield
    MODEL_LOG.removeHandler(handler)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings.simplefilter("always")  # pytest puts back filters after each test
    monkeypatch.setattr(warnings, "showwarning", count)


@pytest.mark.parametrize("bystander", ["collected", "logged", "warned"])
def test_what_runs_beside_a_layer_is_not_its_own(
    bystander: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    request.getfixturevalue(bystander)
    before = TOLD[0]
    capture(model, {"signal": torch.arange(24.0).view(2, 4, 3)})
    assert [record.name for record in caplog.records].count(MODEL_LOG.name) == 1  # of the layers one ran
    assert TOLD[0] > before


def test_the_collector_is_left_as_it_was() -> None:
    for setting in (gc.disable, gc.enable):
        setting()
        capture(Model(), {"signal": torch.ones(2, 4, 3)})
        assert gc.isenabled() == (setting is gc.enable)
