"""A captured graph in plain sizes, its whole numbers kept as calls: what is computed with sizes can still be followed.

    sized(graph, {input: shape}) -> fx.Graph

Tensor calls have numbers where sizes stood, as after pass `shapes`; `meta["given"]` holds the arguments as they were
(args, kwargs), with the calls that made those numbers. Names are those of the captured graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import Evaluation, add_call, values_of
from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import FakeTensorMode, without_messages


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
        isinstance(val, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in val)
    )


def given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `sized` by schema name, whole numbers as the calls that made them."""
    return g.bind(node, node.meta["given"])
