"""Layers of one class that differ, and layers that hand each other lists and dicts, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc

WIDTH = 8


class Layer(nn.Module):
    shared = 1.0  # of the class, which one layer may have in its place

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.run = nn.Linear(WIDTH, WIDTH), run

    def forward(self, x: torch.Tensor, more: Any) -> torch.Tensor:
        return self.run(self, x, more)


class Model(nn.Module):
    def __init__(self, run: Callable[..., torch.Tensor], more: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.head, self.more = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1), more
        self.layers = nn.ModuleList(Layer(run) for _ in range(4))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        x, more = self.first(signal), self.more()
        for layer in self.layers:
            x = layer(x, more)
        collected = more["seen"] if isinstance(more, dict) and "seen" in more else more
        if isinstance(collected, list) and collected:
            x = x + sum(collected)
        return self.head(x).pow(2).mean()


def compare(model: Model) -> None:
    """Loss and every gradient."""
    signal = torch.arange(2 * 3).view(2, 3) / 10.0
    loss = model(signal)
    loss.backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = csc.compile(model, mesh="pp=2", example={"signal": signal}, cache=False)
    torch.testing.assert_close(compiled.train_step({"signal": signal}), loss.detach())
    assert {name for name, p in model.named_parameters() if p.grad is not None} == eager.keys()
    for name, gradient in eager.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, msg=name)


def plain(layer: Layer, x: torch.Tensor, more: Any) -> torch.Tensor:
    return x + layer.inner(x)


def appends(layer: Layer, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    y = layer.inner(x)
    more.append(torch.tanh(y))
    return x + y


def reads(layer: Layer, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    more.append(layer.inner(x))
    return x + more[0] + more[-1]


def first_value(layer: Layer, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
    y = layer.inner(x)
    return x + y + more.setdefault("y", y)


def last_value(layer: Layer, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
    y = layer.inner(x) + 0.5 * more.get("y", x)
    more["y"] = y
    return x + y


def nested(layer: Layer, x: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
    more["seen"].append(layer.inner(x))
    more["deep"]["last"] = more["seen"][-1]
    return x + more["deep"]["last"]


def taken(layer: Layer, x: torch.Tensor, more: list[float]) -> torch.Tensor:
    return x + layer.inner(x) * more.pop()


@pytest.mark.parametrize(
    ("run", "more"),
    [
        (appends, list),
        (reads, list),
        (first_value, dict),
        (last_value, dict),
        (nested, lambda: {"seen": [], "deep": {}}),
        (taken, lambda: [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_lists_and_dicts_that_layers_write_to(run: Callable[..., torch.Tensor], more: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    compare(Model(run, more))


def own_forward(layer: Layer) -> None:
    layer.forward = MethodType(lambda self, x, more: x + 2 * self.inner(x), layer)  # type: ignore[method-assign]


def own_forward_below(layer: Layer) -> None:
    inner = layer.inner
    inner.forward = MethodType(lambda self, x: F.linear(x, self.weight), inner)  # type: ignore[method-assign]


def shadows(layer: Layer) -> None:
    layer.shared = 3.0


def flagged(layer: Layer) -> None:
    layer.flag = True  # type: ignore[assignment]


def asks(layer: Layer, x: torch.Tensor, more: Any) -> torch.Tensor:
    return x + layer.inner(x) * layer.shared * (2 if getattr(layer, "flag", False) else 1)


@pytest.mark.parametrize("change", [own_forward, own_forward_below, shadows, flagged])
@pytest.mark.parametrize("place", [0, 2])
def test_one_layer_that_has_what_the_others_have_not(change: Callable[[Layer], None], place: int) -> None:
    torch.manual_seed(0)
    model = Model(plain if "forward" in change.__name__ else asks, lambda: None)
    change(model.layers[place])  # type: ignore[arg-type]
    compare(model)
