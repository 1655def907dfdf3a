"""`python -m benchmarks.coverage --libraries`: what is pinned, and the table of what came of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.coverage import libraries
from benchmarks.coverage.library_models import MODELS, PINS, LibraryModel, numbers, plain


def row(name: str, kind: str = "right", reason: str = "") -> dict[str, Any]:
    return {"name": name, "eager": "", "ways": {libraries.WAY: [kind, reason, []]}}


def test_each_library_is_pinned_once() -> None:
    names = [pin.split("==")[0] for pin in PINS]
    assert len(set(names)) == len(names) and all(pin.count("==") == 1 for pin in PINS)
    assert {name.partition(": ")[0] for name in MODELS} <= set(names)
    assert len(MODELS) >= 40 and len({name.partition(": ")[0] for name in MODELS}) >= 20


def test_the_table_has_a_line_for_each_library() -> None:
    rows = [
        row("zuko: NSF"),
        row("zuko: MAF", "refused", "m.py:1: because"),
        row("entmax: sparsemax", "crash", "Error: no"),
    ]
    assert libraries.markdown(rows).splitlines() == [
        "| library | right | not right |",
        "| --- | --- | --- |",
        "| entmax 1.3 |  | sparsemax |",
        "| zuko 1.6.0 | NSF | MAF |",
        "",
        "- **zuko: MAF**, refused: m.py:1: because",
        "- **entmax: sparsemax**, crash: Error: no",
    ]
    assert libraries.summary(rows) == "3 models of 2 libraries: 1 right, 1 refused, 1 crash."


def test_a_model_is_judged_beside_eager_pytorch(monkeypatch: Any) -> None:
    model = LibraryModel(lambda: nn.Linear(4, 2), plain, numbers(4, 4), {"dp": 2})
    monkeypatch.setitem(MODELS, "own: linear", model)
    (found,) = libraries.row("own: linear")
    assert libraries.kind(found) == "right"
    broken = LibraryModel(lambda: nn.Linear(5, 2), plain, numbers(4, 4))
    monkeypatch.setitem(MODELS, "own: broken", broken)
    (found,) = libraries.row("own: broken")
    assert libraries.kind(found) == "eager" and "RuntimeError" in found["eager"]
    assert torch.equal(model.batch(0, 4, 4)["x"], model.batch(1, 8, 8)["x"])
