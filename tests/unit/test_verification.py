"""What `csc verify` takes for a difference, and what for rounding."""

from __future__ import annotations

import pytest
import torch

from csc.verification import compared

LAYER = "model.layers.3."
WEIGHT, QUERY, KEY = LAYER + "mlp.weight", LAYER + "attention.query.weight", LAYER + "attention.key.bias"


def relative(sizes: dict[str, float], differences: dict[str, float]) -> dict[str, float]:
    """grad_rel of gradients of these norms that differ by so much."""
    eager = {name: torch.tensor([size, 0.0], dtype=torch.float64) for name, size in sizes.items()}
    found = {name: one + torch.tensor([0.0, differences.get(name, 0.0)]) for name, one in eager.items()}
    return dict(compared(1.0, 1.0, eager, found, 0).grad_rel)


def test_each_gradient_is_measured_by_its_own_size() -> None:
    assert relative({WEIGHT: 1.0, QUERY: 1e-4}, {QUERY: 5e-5})[QUERY] == pytest.approx(0.5)
    assert relative({WEIGHT: 1.0}, {WEIGHT: 1e-3})[WEIGHT] == pytest.approx(1e-3)


def test_noise_within_a_module_is_measured_by_the_module() -> None:
    sizes = {LAYER + "attention.key.weight": 1e-3, KEY: 1e-10}
    assert relative(sizes, {KEY: 1e-10})[KEY] == pytest.approx(1e-7)


def test_noise_of_a_whole_module_is_measured_by_the_layer() -> None:
    """Queries that are all alike: the gradients of query and key are zero in exact arithmetic."""
    sizes = {WEIGHT: 1e-2, QUERY: 1e-17, KEY: 1e-19}
    found = relative(sizes, {QUERY: 1e-17, KEY: 1e-19})
    assert found[QUERY] < 1e-14 and found[KEY] < 1e-14
    other = {"model.layers.4.mlp.weight": 1.0, QUERY: 1e-17}  # another layer's size says nothing
    assert relative(other, {QUERY: 1e-17})[QUERY] == pytest.approx(1.0)


def test_a_missing_gradient_is_no_rounding() -> None:
    one = {WEIGHT: torch.ones(2), KEY: torch.zeros(2)}
    result = compared(1.0, 1.0, one, {WEIGHT: torch.ones(2)}, 0)
    assert result.params_missing == (KEY,) and result.grad_rel_max == float("inf")
