"""The models of the coverage table: compiled in stages, over context-parallel ranks, and with the projector alone."""

from __future__ import annotations

import pytest

from benchmarks.coverage.check import check, fine
from benchmarks.coverage.models import CASES
from benchmarks.coverage.report import markdown, summary

pytestmark = pytest.mark.slow
LARGEST = 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_eager(name: str) -> None:
    row = check(name, CASES[name])
    for way, result in row.ways.items():
        assert fine(result), f"{way}: {result}"
        assert result in ("-", "bit-equal") or float(result) <= LARGEST, f"{way}: {result}"
    assert summary([row]) == {"models": 1, "pp=3": 1, "cp=2": 1, "projector": 1}
    assert name in markdown([row])
