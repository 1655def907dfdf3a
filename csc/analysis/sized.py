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
from csc.ir.evaluation import Evaluation
from csc.torch_private import FakeTensorMode, OpOverload, without_messages


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
                copies[node] = _placeholder(node, result, shapes, evaluate)
            else:
                copies[node] = _call(node, result, copies, evaluate)
    return result


def _placeholder(node: fx.Node, result: fx.Graph, shapes: Mapping[str, Sequence[int]], evaluate: Evaluation) -> fx.Node:
    kind, name = node.meta["role"]
    old = node.meta["val"]
    where = {"dtype": old.dtype, "device": old.device}
    if kind == "input":
        val = evaluate(torch.empty, (tuple(shapes[name]),), where)
    else:
        val = evaluate(torch.empty_strided, (tuple(old.shape), old.stride()), where)
    return g.add_placeholder(result, node.name, val, node.meta["role"])


def _call(node: fx.Node, result: fx.Graph, copies: Mapping[fx.Node, fx.Node], evaluate: Evaluation) -> fx.Node:
    given = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    args, kwargs = fx.map_arg(given, lambda n: n.meta["val"])
    target: Any = node.target
    try:
        val = evaluate(target, args, kwargs)
    except (RuntimeError, ValueError):
        if g.op_name(node) != "aten::view":
            raise
        target = torch.ops.aten.reshape.default  # as pass `shapes` does
        val = evaluate(target, args, kwargs)
    number = not isinstance(target, OpOverload) and isinstance(val, (int, float, bool))
    folded = given if number else fx.map_arg(given, lambda n: n if _has_tensor(n) else n.meta["val"])
    copied = result.create_node("call_function", target, *folded, name=node.name)
    copied.meta.update(val=val, given=given, source=node.meta.get("source", ""), module=node.meta.get("module", ""))
    return copied


def _has_tensor(node: fx.Node) -> bool:
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) or (
        isinstance(val, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in val)
    )


def given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `sized` by schema name, whole numbers as the calls that made them."""
    return g.bind(node, node.meta["given"])
