"""What a captured graph assumes of sizes: asked for batches, and kept as text."""

from __future__ import annotations

import json

import pytest
import sympy
import torch

from csc.ir.capture_guards import SizeGuards, Unstorable
from csc.ir.stored import OF_GUARDS, record_from_tree, record_to_tree
from csc.torch_private.symbolic_sizes import SIZE_FUNCTIONS

ROWS, IMAGES = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
SIZES = SizeGuards(
    {"ids": ("torch.int64", (2, ROWS)), "patches": ("torch.float32", (4 * IMAGES, 3))},
    {"s0": (2, 100), "s1": (2, None)},
    (sympy.Le(IMAGES, ROWS), sympy.Eq(SIZE_FUNCTIONS["Mod"](ROWS, sympy.Integer(2)), 0)),
)


def batch(length: int, patches: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.zeros(2, length, dtype=torch.int64), "patches": torch.zeros(patches, 3)}


@pytest.mark.parametrize(
    "sizes", [SIZES, record_from_tree(json.loads(json.dumps(record_to_tree(SIZES, OF_GUARDS))), OF_GUARDS)]
)
def test_every_size_is_asked_for(sizes: SizeGuards) -> None:
    for length in range(1, 8):
        for patches in range(1, 20):
            expected = length >= 2 and length % 2 == 0 and patches % 4 == 0 and 2 <= patches // 4 <= length
            assert sizes.allow(batch(length, patches)) == expected, (length, patches)
    assert not sizes.allow(batch(102, 8))
    assert not sizes.allow({**batch(6, 8), "labels": torch.zeros(2)})
    assert not sizes.allow({**batch(6, 8), "patches": torch.zeros(8, 3, dtype=torch.float64)})
    assert not sizes.allow({**batch(6, 8), "ids": torch.zeros(3, 6, dtype=torch.int64)})


def test_one_symbol_is_one_number() -> None:
    twice = SizeGuards({"a": ("torch.float32", (ROWS,)), "b": ("torch.float32", (ROWS, 2 * ROWS))}, {}, ())
    assert twice.allow({"a": torch.zeros(3), "b": torch.zeros(3, 6)})
    assert not twice.allow({"a": torch.zeros(3), "b": torch.zeros(4, 6)})
    assert not twice.allow({"a": torch.zeros(3), "b": torch.zeros(3, 8)})


def test_other_functions_have_no_text() -> None:
    with pytest.raises(Unstorable, match="a size made by strange"):
        record_to_tree(SizeGuards({}, {}, (sympy.Eq(sympy.Function("strange")(ROWS), 1),)), OF_GUARDS)
    with pytest.raises(KeyError):
        record_from_tree({"value": ["size of", ["Lambda", "s0"]], "graphs": []}, OF_GUARDS)
