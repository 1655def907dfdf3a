"""Calls written as users write them are the operators that they stand for, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from csc.codegen.python import call
from csc.codegen.torch_calls import FUNCTIONS, METHODS
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
ARGUMENTS: dict[str, tuple[Any, ...]] = {  # a string: a tensor of that name
    "aten::add.Tensor": ("a", 1e-6), "aten::addmm": ("b", "a", "b"), "aten::bmm": ("c", "c"),
    "aten::cat": (["a", "b"], -1), "aten::cos": ("a",), "aten::div.Scalar": ("a", 3), "aten::div.Tensor": ("a", "b"),
    "aten::exp": ("a",), "aten::expand": ("a", [2, -1, 3]), "aten::mean.dim": ("a", [-1], True), "aten::mm": ("a", "b"),
    "aten::mul.Scalar": ("a", 0.5), "aten::mul.Tensor": ("a", "b"), "aten::ne.Scalar": ("a", -100),
    "aten::neg": ("a",), "aten::permute": ("c", [2, 0, 1]), "aten::pow.Tensor_Scalar": ("a", 3),
    "aten::rsqrt": ("a",), "aten::sigmoid": ("a",), "aten::sin": ("a",), "aten::sub.Tensor": ("a", "b"),
    "aten::sum.dim_IntList": ("a", [0, 1], True), "aten::t": ("a",), "aten::tanh": ("a",),
    "aten::transpose.int": ("c", 1, 2), "aten::unsqueeze": ("a", 1), "aten::view": ("a", [-1, 9]),
}  # fmt: skip
SCALARS = {"aten::mul.Scalar": "aten::mul.Tensor", "aten::div.Scalar": "aten::div.Tensor"}  # which are made of these


class Seen(TorchDispatchMode):
    """Which operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _filled(argument: Any, values: dict[str, torch.Tensor]) -> Any:
    if isinstance(argument, list):
        return [_filled(one, values) for one in argument]
    return values[argument] if isinstance(argument, str) else argument


@pytest.mark.parametrize("name", sorted(FUNCTIONS | METHODS))
def test_a_written_call_is_its_operator(name: str) -> None:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    graph = fx.Graph()
    nodes = {letter: graph.placeholder(letter) for letter in "abc"}
    node = graph.call_function(operator, fx.node.map_aggregate(ARGUMENTS[name], lambda one: nodes.get(one, one)))
    opening, operands, closing = call(node, {one: letter for letter, one in nodes.items()})
    text = opening + ", ".join(operands) + closing
    assert "aten" not in text
    tried = 0
    for dtype in DTYPES:
        values = {"a": torch.tensor([[1, -2, 3], [4, 5, -6], [7, 8, 9]], dtype=dtype)}
        values |= {"b": values["a"] + 1, "c": torch.stack([values["a"], values["a"] - 4])}
        given = [_filled(one, values) for one in ARGUMENTS[name]]
        try:
            expected = operator(*given)
        except RuntimeError:
            assert not dtype.is_floating_point  # of whole numbers there is no mean
            continue
        with Seen() as seen:
            found = eval(text, {"torch": torch, **values})
        assert seen.names == [SCALARS.get(name, name)]
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        tried += 1
    assert tried >= 3
