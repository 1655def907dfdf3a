"""Samples are divided with what belongs to them: batches as loaders make them, against eager PyTorch on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import csc
from tests.models import mixed

EXACT = 1e-6


def eager(model: nn.Module, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(**batch)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss), gradients


def same(model: nn.Module, batch: dict[str, Any], given: Any = None, limit: float = EXACT, **options: Any) -> Any:
    """A step of csc on the batch, or on what is given for it, has eager's loss and gradients on the whole batch."""
    loss, expected = eager(model, batch)
    compiled = csc.compile(model, example=batch if given is None else given, **options)
    found = compiled.train_step(batch if given is None else given)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert float(found) == pytest.approx(loss, rel=limit)
    for name, gradient in expected.items():
        module = [value for other, value in expected.items() if other.split(".")[0] == name.split(".")[0]]
        scale = max(float(gradient.norm()), 1e-2 * max(float(value.norm()) for value in module))
        assert float((gradients[name] - gradient).norm()) <= limit * scale, name
    return compiled


@pytest.mark.parametrize("name", mixed.CASES)
def test_images_of_different_size_and_number(name: str) -> None:
    same(*mixed.built(name, [2, 0, 1, 1]), mesh="pp=2", microbatches=2)
