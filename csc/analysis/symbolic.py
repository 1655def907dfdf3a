"""Graphs in plain sizes, and figures as exact expressions in sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import sympy
import torch
from sympy import QQ
from sympy.polys.matrices import DomainMatrix
from torch import fx

from csc.errors import CscError
from csc.ir import graph as g
from csc.ir.graph import Evaluation, add_call, values_of
from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import FakeTensorMode, without_messages

# --- A captured graph in plain sizes, its whole numbers kept as calls ------------------------------------------------
#
# What is computed with sizes can still be followed.
#
# Tensor calls have numbers where sizes stood, as after pass `shapes`; `meta["given"]` holds the arguments as they were
# (args, kwargs), with the calls that made those numbers. Names are those of the captured graph.


def sized(graph: fx.Graph, shapes: Mapping[str, Sequence[int]]) -> fx.Graph:
    """Raises whatever an operation raises that cannot run on these shapes."""
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    evaluate = Evaluation(FakeTensorMode(allow_non_fake_inputs=True))
    with without_messages():
        for node in graph.nodes:
            if node.op == "output":
                result.output(fx.map_arg(node.args[0], copies.__getitem__))
            elif node.op == "placeholder":
                val = given_value(node, shapes, evaluate)
                copies[node] = g.add_placeholder(result, node.name, val, node.meta["role"])
            else:
                copies[node] = _call(node, result, copies, evaluate)
    return result


def given_value(node: fx.Node, shapes: Mapping[str, Sequence[int]], evaluate: Evaluation) -> Any:
    """The value of a placeholder: a batch entry in the shape that it has here, anything else as it is."""
    kind, name = node.meta["role"]
    old = node.meta["val"]
    where = {"dtype": old.dtype, "device": old.device}
    if kind == "input":
        return evaluate(torch.empty, (tuple(shapes[name]),), where)
    return evaluate(torch.empty_strided, (tuple(old.shape), old.stride()), where)


def called_value(node: fx.Node, args: Any, kwargs: Any, evaluate: Evaluation) -> tuple[Any, Any]:
    """(operation, value) of a call on these operands. A view for the strides of another attention kernel (another
    device or length) is a reshape here, which copies where needed. Raises whatever the operation raises.
    """
    try:
        return node.target, evaluate(node.target, args, kwargs)
    except (RuntimeError, ValueError):
        if g.op_name(node) != "aten::view":
            raise
        return torch.ops.aten.reshape.default, evaluate(torch.ops.aten.reshape.default, args, kwargs)


def _call(node: fx.Node, result: fx.Graph, copies: Mapping[fx.Node, fx.Node], evaluate: Evaluation) -> fx.Node:
    given = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    args, kwargs = values_of(given)
    target, val = called_value(node, args, kwargs, evaluate)
    number = not isinstance(target, OpOverload) and isinstance(val, (int, float, bool))
    folded = given if number else fx.map_arg(given, lambda n: n if _has_tensor(n) else n.meta["val"])
    copied = add_call(result, target, *folded, val=val, like=node, name=node.name)
    copied.meta["given"] = given
    return copied


def _has_tensor(node: fx.Node) -> bool:
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) or (
        isinstance(val, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in val)
    )


def given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `sized` by schema name, whole numbers as the calls that made them."""
    return g.bind(node, node.meta["given"])


# --- Figures as exact expressions in sizes, from their values at a few points ----------------------------------------
#
# Terms
#   symbol     a size of a microbatch: `batch` (its rows), then lengths: `text`, `image`, `audio`, ...
#   point      one value for each symbol
#   figure     a number that was counted at every point, such as the FLOPs of a region's F
#
# A figure is a polynomial: of degree 1 in the batch, and of total degree 2 in the lengths (attention multiplies two of
# them). So its values on a lattice of as many points as there are monomials determine it (Chung and Yao 1977), and one
# further point tells whether it is such a polynomial at all.


Point = tuple[int, ...]
Values = Mapping[Any, int]  # by figure


def exponents(symbols: int) -> list[Point]:
    """The monomials: the power of each symbol. For (batch, text): 1, t, t^2, b, bt, bt^2."""
    lengths = [powers for powers in product(range(3), repeat=symbols - 1) if sum(powers) <= 2]
    return [(batch, *powers) for batch in (0, 1) for powers in lengths]


def lattice(start: Sequence[int], steps: Sequence[int]) -> list[Point]:
    """A point for each monomial: `start`, and so many steps along each symbol as the monomial has powers of it."""
    return [
        tuple(first + power * step for first, power, step in zip(start, powers, steps))
        for powers in exponents(len(start))
    ]


def held_out(start: Sequence[int], steps: Sequence[int]) -> Point:
    """A point outside the lattice in every symbol."""
    return (start[0] + 2 * steps[0], *(first + 3 * step for first, step in zip(start[1:], steps[1:])))


def fit(symbols: Sequence[sympy.Symbol], points: Sequence[Point], values: Sequence[Values]) -> dict[Any, sympy.Expr]:
    """The polynomial of each figure through its values at the points of `lattice`, exactly (rational arithmetic)."""
    powers = exponents(len(symbols))
    rows = [[QQ(math.prod(size**power for size, power in zip(point, p))) for p in powers] for point in points]
    inverse = DomainMatrix(rows, (len(rows), len(powers)), QQ).inv().to_list()
    monomials = [sympy.prod(symbol**power for symbol, power in zip(symbols, p)) for p in powers]
    known: dict[Point, sympy.Expr] = {}  # equal layers have equal figures
    found = {}
    for figure in values[0]:
        samples = tuple(at_point[figure] for at_point in values)
        if samples not in known:
            coefficients = [sum((a * b for a, b in zip(row, samples)), QQ(0)) for row in inverse]
            known[samples] = sympy.Add(*(QQ.to_sympy(c) * m for c, m in zip(coefficients, monomials)))
        found[figure] = known[samples]
    return found


def check(expressions: Mapping[Any, sympy.Expr], symbols: Sequence[sympy.Symbol], point: Point, values: Values) -> None:
    """Compare with a point that was not fitted. CscError names the first figure that is off."""
    sizes = dict(zip(symbols, point))
    for figure, expression in expressions.items():
        if expression.subs(sizes) != values[figure]:
            at = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            raise CscError(
                f"it is no polynomial of degree 1 in the batch and 2 in the lengths: at {at} it is {values[figure]}, "
                f"not {expression.subs(sizes)}",
                " ".join(map(str, figure)) if isinstance(figure, tuple) else str(figure),
                "read the numbers at the sizes of your own example instead (without --symbolic); an example batch of "
                "two samples or more, with lengths that patches and strides divide, often helps",
            )
