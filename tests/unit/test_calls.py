"""Recorded calls: which ones the loss needs, when two runs did the same, and calls as text."""

from __future__ import annotations

import json

import pytest
import sympy
import torch

from csc.capture.values.batch_alone import Recording, writes
from csc.ir.capture_guards import UNKNOWN, alike
from csc.ir.stored import record_from_tree, record_to_tree

LENGTH = sympy.Symbol("s0", integer=True, positive=True)


def test_sizes_are_compared_by_their_values() -> None:
    traced = [("view", ("of", "x"), 2 * LENGTH, 3)]
    assert alike(traced, [("view", ("of", "x"), 10, 3)], {"s0": 5})
    assert not alike(traced, [("view", ("of", "x"), 10, 3)], {"s0": 6})
    assert not alike(traced, [("view", ("of", "y"), 10, 3)], {"s0": 5})
    assert not alike(traced, [], {"s0": 5})


def test_a_number_is_no_size_that_happens_to_be_equal() -> None:
    """In the trace it was a plain number: it stays what it is."""
    assert not alike([("div", ("of", "x"), 5)], [("div", ("of", "x"), 6)], {"s0": 6})


def test_what_came_from_nowhere_is_never_the_same() -> None:
    call = ("add", (UNKNOWN, 1), 2)
    assert not alike([call], [call], {})


def test_calls_as_text() -> None:
    calls = (("view", ("of", "x"), 2 * LENGTH, "None"), ("cat", 2, ("call", 0, 0), ("constant", "a", "b")))
    assert record_from_tree(json.loads(json.dumps(record_to_tree(calls, ()))), ()) == calls


@pytest.mark.parametrize(
    ("name", "expected"),
    [("__setitem__", True), ("__ior__", True), ("torch.Tensor.__ipow__", True), ("add_", True), ("zero_", True),
     ("add", False), ("__add__", False), ("__invert__", False), ("__index__", False), ("__init__", False)],
)  # fmt: skip
def test_what_writes(name: str, expected: bool) -> None:
    assert writes(name) == expected


def test_the_loss_needs_what_it_depends_on_and_what_is_written() -> None:
    x, w = torch.ones(2), torch.ones(2)
    recording = Recording({"x": x, "w": w})

    def call(func: object, *args: object) -> torch.Tensor:
        result = func(*args)  # type: ignore[operator]
        recording.add(func, args, {}, result)
        return result

    hidden = call(torch.mul, x, w)
    call(torch.mul, x, 7)  # nobody's
    other = call(torch.clone, x)
    call(torch.Tensor.add_, other, 3)
    loss = call(torch.sum, hidden)
    names = [name.rpartition(".")[2] for name, *_ in recording.needed(loss)]
    assert names == ["mul", "clone", "add_", "sum", "loss"]
    assert recording.needed(loss)[-2][2] == ("call", 0, 0)
    assert recording.needed(loss)[-1] == ("loss", ("call", 3, 0))


def test_a_loss_of_unknown_origin_is_never_the_same() -> None:
    calls = Recording({}).needed(torch.ones(()))
    assert not alike(calls, calls, {})
