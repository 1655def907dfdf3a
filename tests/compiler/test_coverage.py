"""The models of the coverage table: compiled in stages, over context-parallel ranks, and with the projector alone."""

from __future__ import annotations

import pytest

from benchmarks.coverage.check import WAYS, check, fine
from benchmarks.coverage.models import CASES
from benchmarks.coverage.report import markdown, summary

pytestmark = pytest.mark.slow
LARGEST = 1e-5
REFUSED = {  # what the sentence says
    ("Mllama", "cp=2"): "its mask holds a bias",
    **{("SmolVLM", way): "depends on the values of a tensor" for way in WAYS},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_eager(name: str) -> None:
    row = check(name, CASES[name])
    for way, result in row.ways.items():
        if (name, way) in REFUSED:
            assert REFUSED[name, way] in result and "modeling_" in result
            continue
        assert fine(result), f"{way}: {result}"
        assert result in ("-", "bit-equal") or float(result) <= LARGEST, f"{way}: {result}"
    works = {way: int((name, way) not in REFUSED) for way in WAYS}
    assert summary([row]) == {"models": 1, **works}
    assert name in markdown([row])
