"""The benchmark of products: the parts of a layer's step, with both libraries right."""

from __future__ import annotations

import pytest

from benchmarks import products


def test_rows_of_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ENOUGH", 0.0)
    rows = products.measure(64, 32)
    assert [row["part"] for row in rows] == ["forward", "activations", "weight"]
    for row in rows:
        assert 0 < row["torch_error"] < 1e-6 and 0 < row["onednn_error"] < 1e-6  # type: ignore[operator]
        assert row["torch_gflops"] > 0 and row["onednn_over_torch"] > 0  # type: ignore[operator]
        assert row["worth_it"] is False
