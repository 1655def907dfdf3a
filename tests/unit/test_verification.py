"""What `csc verify` takes for a difference, and what for rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from csc.check.judge import LOSS
from csc.reports.verification import compared

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


def test_a_small_module_is_not_taken_for_noise() -> None:
    """Behind a gate that is nearly shut all of a module's gradient is small, and as exact as any other."""
    assert relative({WEIGHT: 1.0, QUERY: 1e-9}, {QUERY: 1e-9})[QUERY] == pytest.approx(1.0)


def test_what_rounding_moves_in_eager_too_passes() -> None:
    right = {WEIGHT: torch.ones(2), QUERY: torch.ones(2)}
    result = compared(1.0, 1.0, right, {WEIGHT: torch.ones(2) * (1 + 1e-5), QUERY: torch.ones(2) * (1 + 1e-5)}, 0)
    assert sorted(result.differing(1e-6)) == [QUERY, WEIGHT]
    known = replace(result, rounding={LOSS: 0.0, WEIGHT: 1e-6, QUERY: 1e-7})
    assert sorted(known.differing(1e-6)) == [QUERY] and not known.good(1e-6)
    assert replace(result, loss_rel=1e-5, rounding={LOSS: 1e-6, WEIGHT: 1e-6, QUERY: 1e-6}).good(1e-6)
    assert not replace(result, loss_rel=1e-5, rounding={LOSS: 1e-7, WEIGHT: 1e-6, QUERY: 1e-6}).good(1e-6)


def test_a_missing_gradient_is_no_rounding() -> None:
    one = {WEIGHT: torch.ones(2), KEY: torch.zeros(2)}
    result = compared(1.0, 1.0, one, {WEIGHT: torch.ones(2)}, 0)
    assert result.params_missing == (KEY,) and result.grad_rel_max == float("inf")


def differing(eager: float, compiled: float) -> dict[str, float]:
    """Of two gradients with this error beside one in float64."""
    exact = {WEIGHT: torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)}
    of_eager = {WEIGHT: torch.tensor([1.0, eager, 0.0], dtype=torch.float64)}
    found = {WEIGHT: torch.tensor([1.0, 0.0, compiled], dtype=torch.float64)}
    result = compared(1.0, 1.0, of_eager, found, 0, exact)
    assert result.from_float64[WEIGHT] == pytest.approx((eager, compiled))
    return result.differing(1e-6)


def test_a_gradient_as_near_to_float64_as_eagers_does_not_differ() -> None:
    assert differing(1e-3, 1.9e-3) == {}
    assert differing(1e-3, 1e-7) == {}
    assert differing(1e-3, 2.1e-3) == {WEIGHT: pytest.approx(2.3e-3, rel=0.02)}
    assert differing(0.0, 1e-5) == {WEIGHT: pytest.approx(1e-5)}


def test_without_float64_what_differs_differs() -> None:
    eager, found = {WEIGHT: torch.tensor([1.0, 0.0])}, {WEIGHT: torch.tensor([1.0, 1e-3])}
    result = compared(1.0, 1.0, eager, found, 0)
    assert list(result.differing(1e-6)) == [WEIGHT] and result.differing(1e-2) == {}
    broken = compared(1.0, 1.0, eager, {WEIGHT: torch.tensor([float("nan"), 0.0])}, 0, eager)
    assert list(broken.differing(1.0)) == [WEIGHT]
