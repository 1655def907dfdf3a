"""The models of the coverage table: compiled in stages, over context-parallel ranks, and with the projector alone; and
their capture, in which equal layers are traced once, beside that of the model traced whole.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.coverage.check import WAYS, compare, fine
from benchmarks.coverage.models import CASES
from benchmarks.coverage.report import markdown, summary
from csc.capture import capture
from csc.ir.printer import program_text

pytestmark = pytest.mark.slow
LARGEST = 1e-5
REFUSED = {("Mllama", "cp=2"): "its mask holds a bias"}  # what the sentence says


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    row, compiled = compare(name, model, batch)
    for way, result in row.ways.items():
        if (name, way) in REFUSED:
            assert REFUSED[name, way] in result and "modeling_" in result
            continue
        assert fine(result), f"{way}: {result}"
        assert result in ("-", "bit-equal") or float(result) <= LARGEST, f"{way}: {result}"
    works = {way: int((name, way) not in REFUSED) for way in WAYS}
    assert summary([row]) == {"models": 1, **works}
    assert name in markdown([row])
    if compiled is not None:
        whole = capture(model, batch, compiled.compiler.learned, whole=True)
        assert program_text(compiled.history()[0]) == program_text(whole)
