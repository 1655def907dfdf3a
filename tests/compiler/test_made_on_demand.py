"""Values that forward makes when it needs them first, and the user then changes: the next step takes them up."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import csc

BATCH = {"x": torch.linspace(-1, 1, 12).view(3, 4)}
MADE: dict[str, float] = {}


@dataclass
class Held:
    gain: float = 2.0

    @functools.cached_property
    def twice(self) -> float:
        return 2 * self.gain


class Scaled(nn.Module):
    """Equal layers around a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.defaults: Any = defaultdict(lambda: 2.0)
        self.nested: Any = defaultdict(lambda: defaultdict(list))
        self.none, self.plain, self.held = None, {}, Held()  # type: ignore[var-annotated]

    def scale(self) -> Any:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.relu(self.first(x))) * self.scale()).square().mean()


class Property(Scaled):
    @functools.cached_property
    def factor(self) -> float:
        return 2.0

    def scale(self) -> Any:
        return self.factor


class Tensor(Scaled):
    @functools.cached_property
    def factor(self) -> torch.Tensor:
        return torch.full((4,), 2.0)

    def scale(self) -> Any:
        return self.factor


class Defaults(Scaled):
    def scale(self) -> Any:
        return self.defaults["a"] + len(self.nested["a"]["b"])


class Lazy(Scaled):
    def scale(self) -> Any:
        if not hasattr(self, "_scale"):
            self._scale = 2.0
        return self._scale


class Buffer(Scaled):
    table: torch.Tensor

    def scale(self) -> Any:
        if "table" not in self._buffers:
            self.register_buffer("table", torch.full((4,), 2.0), persistent=False)
        return self.table


class FromNone(Scaled):
    def scale(self) -> Any:
        if self.none is None:
            self.none = 2.0
        return self.none


class Mapping(Scaled):
    def scale(self) -> Any:
        return self.plain.setdefault("a", 2.0) * MADE.setdefault("a", 2.0) * self.held.twice


class OfClass(Scaled):
    factor = 0.0

    def scale(self) -> Any:
        if not type(self).factor:
            type(self).factor = 2.0
        return type(self).factor


def _put(name: str, value: Any) -> Callable[[Any], object]:
    return lambda model: setattr(model, name, value)


CASES: dict[str, tuple[type[Scaled], Callable[[Any], object]]] = {
    "cached property": (Property, _put("factor", 3.0)),
    "cached tensor": (Tensor, _put("factor", torch.full((4,), 3.0))),
    "cached tensor, in place": (Tensor, lambda model: model.factor.mul_(2)),
    "cached tensor, its memory": (Tensor, lambda model: model.factor.data.mul_(2)),
    "entry by default": (Defaults, lambda model: model.defaults.update(a=3.0)),
    "deeper entry by default": (Defaults, lambda model: model.nested["a"]["b"].append(1)),
    "attribute": (Lazy, _put("_scale", 3.0)),
    "buffer": (Buffer, lambda model: model.register_buffer("table", torch.full((4,), 3.0))),
    "None": (FromNone, _put("none", 3.0)),
    "entry of a dict": (Mapping, lambda model: model.plain.update(a=3.0)),
    "entry of a global dict": (Mapping, lambda model: MADE.update(a=3.0)),
    "cached property of an object": (Mapping, lambda model: setattr(model.held, "twice", 3.0)),
    "attribute of a class": (OfClass, lambda model: setattr(OfClass, "factor", 3.0)),
}


def is_eagers(compiled: csc.CompiledModel, model: nn.Module) -> bool:
    """Whether the next step has the loss and the gradients of eager PyTorch, which runs behind it."""
    compiled.zero_grad()
    loss = compiled.train_step(BATCH)
    found = [parameter.grad for parameter in model.parameters()]
    right = model(**BATCH)
    wanted = torch.autograd.grad(right, list(model.parameters()))
    return torch.allclose(loss, right.detach()) and all(
        mine is not None and torch.allclose(mine, its) for mine, its in zip(found, wanted)
    )


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_change_is_taken_up(case: str, check: bool, caplog: pytest.LogCaptureFixture) -> None:
    MADE.clear()
    OfClass.factor = 0.0
    make, change = CASES[case]
    model = make()
    compiled = csc.compile(model, example=BATCH, cache=False, check=check)
    with caplog.at_level(logging.INFO, "csc"):
        assert is_eagers(compiled, model) and is_eagers(compiled, model)
    assert "has changed" not in caplog.text, "the user's own runs change nothing"
    change(model)
    assert is_eagers(compiled, model) and is_eagers(compiled, model)


class Counting(Lazy):
    """Counts its runs beside."""

    runs = 0

    def scale(self) -> Any:
        self.runs += 1
        return super().scale()


def test_what_is_made_on_demand_beside_a_counter() -> None:
    model = Counting()
    compiled = csc.compile(model, example=BATCH, cache=False, check=False)
    assert is_eagers(compiled, model)
    del model._scale
    assert is_eagers(compiled, model)
    model._scale = 3.0
    assert is_eagers(compiled, model)
