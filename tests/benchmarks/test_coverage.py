"""Models of `python -m benchmarks.coverage --more`, which no other test compiles: they are there, and have a loss."""

from __future__ import annotations

import pytest
import torch

from benchmarks.coverage.more import MORE


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_a_model_takes_its_batch(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MORE[name]()
    assert torch.isfinite(model.train()(**batch).loss)
