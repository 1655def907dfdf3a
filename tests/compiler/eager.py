"""What eager PyTorch computes, written apart from csc's own verification, and the comparison with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.driver.compiled import CompiledModel

WIDTH, CLASSES = 8, 5
MESHES = ("pp=1", "pp=2")

Batch = Mapping[str, torch.Tensor]


class Stack(nn.Module):
    """A projection, layers that are applied one after the other, a head with a mean cross entropy per position."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Applying(nn.Module):
    """A layer: x + function(linear(x), the layer)."""

    def __init__(self, function: Callable[[torch.Tensor, Applying], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.linear(x), self)


def stack(*functions: Callable[[torch.Tensor, Applying], torch.Tensor], layers: int = 2) -> Stack:
    """So many equal layers of each function."""
    torch.manual_seed(0)
    return Stack([Applying(function) for function in functions for _ in range(layers)])


def together(cases: Iterable[str], number: int = 5) -> list[Any]:
    """Cases for one test each so many: a model of several is compiled in little more time than of one, and names the
    layers whose gradients are wrong.
    """
    names = list(cases)
    groups = [names[start : start + number] for start in range(0, len(names), number)]
    return [pytest.param(group, id=" + ".join(group)) for group in groups]


def batch(samples: int = 2, length: int = 6) -> dict[str, torch.Tensor]:
    x = torch.sin(torch.arange(samples * length * 3.0)).view(samples, length, 3)
    return {"x": x, "labels": torch.arange(samples * length).view(samples, length) % CLASSES}


def step(
    model: nn.Module, given: Batch, frozen: Sequence[str] = (), copied: bool = True
) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of eager PyTorch. frozen: beginnings of parameters' names. copied: on a copy of the
    model, which a model that reads state from elsewhere does not have.
    """
    model = (copy.deepcopy(model) if copied else model).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(tuple(frozen)))
    loss = model(**given)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_as_eager(
    model: nn.Module,
    given: Batch,
    frozen: Sequence[str] = (),
    meshes: Sequence[str] = MESHES,
    tolerance: float = 1e-5,
    copied: bool = True,
    **options: Any,
) -> CompiledModel:
    """Compile for each mesh, take a step, and compare the loss and every gradient; none is missing, none too many."""
    loss, gradients = step(model, given, frozen, copied)
    compiled = None
    for mesh in meshes:
        chosen = {"mesh": mesh, "freeze": [f"{name}*" for name in frozen] or None, **options}
        if compiled is None:
            compiled = csc.compile(model, example=given, cache=False, **chosen)
        else:
            compiled = compiled.with_options(**chosen)
        model.zero_grad()
        assert float(compiled.train_step(given)) == pytest.approx(loss, rel=tolerance)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert set(found) == set(gradients), mesh
        for name, gradient in gradients.items():
            right = gradient.to_dense()
            difference = float((found[name] - right).abs().max())
            assert difference <= tolerance * max(float(right.abs().max()), 1e-3), (mesh, name, difference)
    assert compiled is not None
    return compiled
