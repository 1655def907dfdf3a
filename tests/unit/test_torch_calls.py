"""Calls written as users write them are the operators that they stand for, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from csc.codegen.python import FUNCTIONS, OF_SIZES, call
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
    "aten::clone": ("a",), "aten::slice.Tensor": ("c", -1, -2, 2**63 - 1),
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


def _values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    values = {"a": torch.tensor([[1, -2, 3], [4, 5, -6], [7, 8, 9]], dtype=dtype)}
    return values | {"b": values["a"] + 1, "c": torch.stack([values["a"], values["a"] - 4])}


def _text(node: fx.Node, nodes: dict[str, fx.Node]) -> str:
    opening, operands, closing = call(node, {one: letter for letter, one in nodes.items()})
    return opening + ", ".join(operands) + closing


def _filled(argument: Any, values: dict[str, torch.Tensor]) -> Any:
    if isinstance(argument, list):
        return [_filled(one, values) for one in argument]
    return values[argument] if isinstance(argument, str) else argument


def test_every_one_is_tried() -> None:
    assert ARGUMENTS.keys() == FUNCTIONS | OF_SIZES | {"aten::clone", "aten::slice.Tensor"}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_written_call_is_its_operator(name: str) -> None:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    graph = fx.Graph()
    nodes = {letter: graph.placeholder(letter) for letter in "abc"}
    node = graph.call_function(operator, fx.node.map_aggregate(ARGUMENTS[name], lambda one: nodes.get(one, one)))
    values = _values(torch.float32)
    for letter, one in nodes.items():
        one.meta["val"] = values[letter]
    node.meta["val"] = operator(*(_filled(argument, values) for argument in ARGUMENTS[name]))
    text = _text(node, nodes)
    assert "aten" not in text
    tried = 0
    for dtype in DTYPES:
        values = _values(dtype)
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


SLICES = [
    (0,),
    (0, 1),
    (-1, 0, 2),
    (1, -2),
    (1, -2, -1),
    (2, 1, 100),
    (0, 2, 2),
    (1, -100, 1),
    (0, None, 1),
    (2, 0, 3, 2),
]


@pytest.mark.parametrize("rest", SLICES, ids=str)
def test_slices(rest: tuple[Any, ...]) -> None:
    graph, values = fx.Graph(), _values(torch.float32)
    c = graph.placeholder("c")
    node = graph.call_function(torch.ops.aten.slice.Tensor, (c, *rest))
    c.meta["val"], node.meta["val"] = values["c"], torch.ops.aten.slice.Tensor(values["c"], *rest)
    text = _text(node, {"c": c})
    assert ("narrow" in text) is (len(rest) < 4), "with steps it is no narrower tensor"
    found = eval(text, {"torch": torch, "aten": torch.ops.aten, **values})
    assert torch.equal(found, node.meta["val"]) and found.stride() == node.meta["val"].stride()
    assert found.storage_offset() == node.meta["val"].storage_offset()


def test_a_copy_in_a_format() -> None:
    graph, values = fx.Graph(), _values(torch.float32)
    c = graph.placeholder("c")
    node = graph.call_function(torch.ops.aten.clone.default, (c,), {"memory_format": torch.contiguous_format})
    text = _text(node, {"c": c})
    assert text == "c.clone(memory_format=torch.contiguous_format)"
    found = eval(text, {"torch": torch, "c": values["c"].transpose(1, 2)})
    assert found.is_contiguous() and torch.equal(found, values["c"].transpose(1, 2))
