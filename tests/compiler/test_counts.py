"""Sizes that a model computes with torch's functions, as tensors (Longformer, LED)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import csc
from tests.compiler.eager import WIDTH, Applying, assert_as_eager, batch, stack

WINDOW = 2


def chunked(x: torch.Tensor) -> torch.Tensor:
    """Longformer's: windows that do not overlap."""
    windows = torch.div(x.size(1), WINDOW, rounding_mode="trunc")
    return x.reshape(x.size(0), windows, WINDOW, WIDTH).cumsum(2).reshape(x.shape)


def overlapping(x: torch.Tensor) -> torch.Tensor:
    """As many as fit between the windows, and room for one more."""
    chunks = torch.div(x.size(1), WINDOW, rounding_mode="trunc") - 1
    room = x.new_zeros((x.size(0), chunks + 1, WIDTH))
    middle = x[:, 1:-1].reshape(x.size(0), 1 * chunks, WINDOW, WIDTH).sum(2)
    return torch.cat([middle, room[:, :1]], 1).repeat_interleave(WINDOW, 1)


@pytest.mark.parametrize("function", [chunked, overlapping])
def test_gradients_are_those_of_eager_in_other_sizes_too(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def layer(x: torch.Tensor, layer: Applying) -> torch.Tensor:
        return function(x) * layer.scale

    compiled = assert_as_eager(stack(layer), batch(length=6), meshes=("pp=2",))
    model, longer = stack(layer), batch(length=10)
    loss = model(**longer)
    assert compiled.train_step(longer).item() == pytest.approx(loss.item(), rel=1e-6)


def test_a_number_that_was_written_to_is_no_size() -> None:
    def written(x: torch.Tensor, layer: Applying) -> torch.Tensor:
        windows = torch.div(x.size(1), WINDOW, rounding_mode="trunc")
        windows.view(1)[0].sub_(1)
        return x.reshape(x.size(0), windows, -1, WIDTH).sum(1, keepdim=True).expand(-1, 2, -1, -1).reshape(x.shape)

    model, given = stack(written), batch(length=6)
    loss = model(**given)
    right = loss if isinstance(loss, torch.Tensor) else loss["loss"]
    try:
        own = csc.compile(model, example=given, cache=False).train_step(given)
    except csc.CscError:  # it may be refused, never be another size
        return
    assert own.item() == pytest.approx(right.item(), rel=1e-6)
