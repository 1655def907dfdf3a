"""FLOPs and matmuls of a graph, from the shapes of its nodes and PyTorch's own formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx
from torch.utils.flop_counter import flop_registry

from csc.analysis import head_costs
from csc.analysis.operators.execution import ATTENTIONS, MATMULS
from csc.analysis.operators.table import CONTEXT_ATTENTION
from csc.ir import graph as g
from csc.torch_private.exported import OpOverload


class FlopCount(NamedTuple):
    """flops: floating-point operations (2 for a multiply-add); matmuls: calls of mm, addmm, bmm or baddbmm, and those
    inside of csc::linear_cross_entropy.
    """

    flops: int
    matmuls: int


def count(graph: fx.Graph | None) -> FlopCount:
    """The work of one run of the graph; zero for None. Ops without a formula (element-wise ones) count as zero."""
    if graph is None:
        return FlopCount(0, 0)
    flops = matmuls = 0
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            flops += call_flops(node)
            matmuls += _matmuls(node)
    return FlopCount(flops, matmuls)


def _matmuls(node: fx.Node) -> int:
    name = g.op_name(node)
    return head_costs.products(node) if name in g.HEADS else int(name in MATMULS)


def call_flops(node: fx.Node) -> int:
    """The work of one call, by PyTorch's formula where it has one, else by those of csc's own operators."""
    assert isinstance(node.target, OpOverload)
    formula = flop_registry.get(node.target.overloadpacket)
    name = node.target._schema.name
    if formula is not None:
        arguments = fx.map_arg(node.args, _value)
        keywords = fx.map_arg(node.kwargs, _value)
        return int(formula(*arguments, **keywords, out_val=node.meta["val"]))
    if name.removesuffix("_backward") == CONTEXT_ATTENTION:
        return _context_attention(node, backward=name != CONTEXT_ATTENTION)
    if name in g.HEADS:
        return head_costs.flops(node)
    if name in ATTENTIONS:  # what the mask hides too, as PyTorch's formulas do: how much depends on the batch
        return _attention(*fx.map_arg(node.args[:3], _value))
    if name.removesuffix("_backward") in ATTENTIONS:
        return 5 * _attention(*fx.map_arg(node.args[1:4], _value)) // 2
    return 0


def _context_attention(node: fx.Node, backward: bool) -> int:
    """A rank's queries over the keys of all ranks: the dispatch gives every rank an equal part of what is seen."""
    first = 1 if backward else 0
    query, key, value = (_value(argument) for argument in node.args[first : first + 3])  # type: ignore[arg-type]
    keys = node.args[8 if backward else 5]
    assert isinstance(keys, int)
    work = _attention(query, key, value) * keys // key.shape[-2]
    return 5 * work // 2 if backward else work


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _attention(query: Any, key: Any, value: Any) -> int:
    """Two products of attention, QK^T and PV; its backward computes five (QK^T again, dV, dP, dQ, dK)."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])
