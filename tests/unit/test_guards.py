"""Guards: what a capture assumed, one thing of each kind broken on purpose, and the sentence that says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sympy
import torch
from torch import nn

from csc.capture.guards import Guards
from csc.ir.capture_guards import CaptureGuards, Decision, Expression, Miss, QueryStep, SizeGuards, capture_guards
from csc.ir.stored import OF_GUARDS, record_from_tree, record_to_tree

length, rows = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("s1", integer=True, positive=True)
INTEGERS = "torch.int64"
ASKED = Decision(
    Expression(
        (
            QueryStep("torch.Tensor.eq", ("tuple", ("entry", "ids"), 9), ("dict",)),
            QueryStep("torch.any", ("tuple", ("step", 0, 0)), ("dict",)),
            QueryStep("torch.Tensor.item", ("tuple", ("step", 1, 0)), ("dict",)),
        )
    ),
    True,
)


def made(calls: Any = None) -> CaptureGuards:
    entries = {"ids": (INTEGERS, (rows, length)), "labels": (INTEGERS, (rows, length)), "grid": (INTEGERS, (rows, 2))}
    sizes = SizeGuards(entries, {"s0": (2, 100)}, (sympy.Ne(length, 5),))
    return capture_guards(sizes, {"grid": torch.tensor([[1, 2], [3, 4]])}, (ASKED,), {"flag": "True"}, calls)


def batch(tokens: int = 6, **changes: Any) -> dict[str, Any]:
    ids = torch.full((2, tokens), 9)
    return {"ids": ids, "labels": ids, "grid": torch.tensor([[1, 2], [3, 4]]), "flag": True, **changes}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (batch(flag=False), "flag is False, and was assumed to be True"),
        (batch(101), "ids.shape[1] is 101, and was assumed to be 2 to 100"),
        (batch(5), "Ne(ids.shape[1], 5) is false, and was assumed to be true"),
        (batch(labels=torch.zeros(2, 4, dtype=torch.int64)), "labels.shape[1] is 4, and was assumed to be 6"),
        (batch(labels=torch.zeros(2, 6)), "labels is torch.float32 of 2 dimensions, and was assumed to be torch.int64"),
        (batch(more=torch.zeros(2)), "the list of its entries is ids, labels, grid, more, and was assumed to be"),
        (
            batch(grid=torch.tensor([[1, 2], [3, 5]])),
            "grid is [[1, 2], [3, 5]], and was assumed to be [[1, 2], [3, 4]]",
        ),
        (batch(ids=torch.ones(2, 6, dtype=torch.int64)), "is False, and was assumed to be True"),
    ],
)
def test_what_is_missed_and_both_values(given: dict[str, Any], sentence: str) -> None:
    known = Guards(captures=(made(),))
    assert known.match(nn.Module(), batch()).capture is known.captures[0]
    assert known.match(nn.Module(), batch(7)).key != known.match(nn.Module(), batch()).key
    match = known.match(nn.Module(), given)
    assert match.capture is None and match.key is None and sentence in match.why


def test_calls_serve_other_values() -> None:
    own, other = (("take", "grid"),), (("take", "other"),)
    guards, given = (
        made(own),
        {name: one for name, one in batch(grid=torch.ones(2, 2).long()).items() if name != "flag"},
    )
    found = guards.match(given, {"flag": "True"}, own)
    assert not isinstance(found, Miss) and torch.equal(found["grid"], guards.values["grid"])
    for plain, calls in (("True", None), ("True", other), ("False", own)):
        assert isinstance(guards.match(given, {"flag": plain}, calls), Miss)


def test_as_text_and_back() -> None:
    guards = made((("take", length),))
    tree = record_to_tree(guards, OF_GUARDS)
    again = record_from_tree(json.loads(json.dumps(tree)), OF_GUARDS)
    assert record_to_tree(again, OF_GUARDS) == tree and again.name == made().name
    assert Guards(captures=(again,)).match(nn.Module(), batch()).capture is again


def test_what_was_matched_first_stays_first() -> None:
    first, second = made(), capture_guards(made().sizes, {}, (), {"flag": "True"}, None)
    one, other = Guards(captures=(first,)), Guards(captures=(second, first), deciding={"grid"})
    joined = one.joined(other)
    assert [guard.name for guard in joined.captures] == [first.name, second.name] and joined.deciding == {"grid"}
    assert one.joined(one).captures == one.captures
    third = capture_guards(made().sizes, {}, (ASKED,), {"flag": "True"}, None)
    joined.add(third, instead=first.name)
    assert [guard.name for guard in joined.captures] == [third.name, second.name]
    joined.add(second, instead=third.name)
    assert [guard.name for guard in joined.captures] == [second.name]
