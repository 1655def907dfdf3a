"""FLOPs and matmuls of a graph, from the shapes of its nodes and PyTorch's own formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx
from torch.utils.flop_counter import flop_registry

from csc.torch_private import OpOverload

MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


class Work(NamedTuple):
    """flops: floating-point operations (2 for a multiply-add); matmuls: calls of mm, addmm, bmm or baddbmm."""

    flops: int
    matmuls: int


def count(graph: fx.Graph | None) -> Work:
    """The work of one run of the graph; zero for None. Ops without a formula (element-wise ones) count as zero."""
    if graph is None:
        return Work(0, 0)
    flops = matmuls = 0
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        formula = flop_registry.get(node.target.overloadpacket)
        if formula is not None:
            arguments = fx.map_arg(node.args, _value)
            keywords = fx.map_arg(node.kwargs, _value)
            flops += int(formula(*arguments, **keywords, out_val=node.meta["val"]))
        elif node.target._schema.name == FLASH_CPU:
            flops += _flash(*fx.map_arg(node.args[:3], _value))
        elif node.target._schema.name == f"{FLASH_CPU}_backward":
            flops += 5 * _flash(*fx.map_arg(node.args[1:4], _value)) // 2
        matmuls += node.target._schema.name in MATMULS
    return Work(flops, matmuls)


FLASH_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _flash(query: Any, key: Any, value: Any) -> int:
    """Two products of attention, QK^T and PV; its backward computes five (QK^T again, dV, dP, dQ, dK)."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])
