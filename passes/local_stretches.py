"""Calls that give a stretch of a dimension, or all of its stretches: their bounds on a rank's shard are local ones.

stretch(values, node, given, pieces) -> (target, *arguments) or None, along a dimension that is not divided
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from csc.passes.local_values import LocalValues, Undivided
from torch import fx

from csc.ir import graph as g


def stretch(
    values: LocalValues, node: fx.Node, given: Callable[[fx.Node], Any], pieces: bool
) -> tuple[Any, ...] | None:
    """given: an operand as calls on shards read it. pieces: of key heads that several ranks have. Undivided where a
    stretch ends within a shard.
    """
    bound, operand = g.bind(node), node.args[0]
    assert isinstance(operand, fx.Node)
    dims = values.dims(operand)[0]
    dim = bound["dim"] % len(dims)
    if dim not in values.cut_dims(operand):
        return None
    if g.op_name(node) != "aten::slice":
        sizes = [values.sizes(node, result)[dim] for result in range(len(values.dims(node)))]
        return (torch.ops.aten.split_with_sizes.default, given(operand), sizes, dim)
    start, stop, step = slice(bound["start"], bound["end"], bound["step"]).indices(dims[dim].size)
    division = values.division(dims[dim])
    assert division is not None
    try:
        start, stop = (division.index(dims[dim], one, pieces) for one in (start, stop))
    except ValueError as error:
        raise Undivided(node, f"cuts where no shard ends ({error})") from error
    return (node.target, given(operand), dim, start, stop, step)
