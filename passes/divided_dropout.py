"""Dropout of what tensor-parallel ranks divide: each takes its entries of the mask that the whole would have.

divided_dropout(values, writer, node, given, group) -> arguments of csc.dropout for a rank's shard
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from csc.kernels.collectives import OWN_PART
from csc.passes.local_values import LocalValues, Undivided
from torch import fx

from csc.analysis.tensor_axes import Dim, Division
from csc.ir import graph as g
from csc.ir.graph import Writer

aten = torch.ops.aten


def divided_dropout(
    values: LocalValues, writer: Writer, node: fx.Node, given: Callable[[fx.Node], Any], group: fx.Node
) -> list[Any]:
    """given: an operand as calls on shards read it. Undivided for another draw, and for key heads of several ranks."""
    places, bound = values.cut_dims(node), g.bind(node)
    if g.op_name(node) != "csc::dropout" or len(places) != 1 or node in values.in_pieces or values.is_loose(node):
        raise Undivided(node, "draws random numbers for what is divided")
    dim = values.dims(node)[0][places[0]]
    division = values.division(dim)
    assert division is not None
    own = [_entries(writer, node, division, dim, group), places[0], dim.size]
    x, seed, tokens = (fx.map_arg(bound[name], given) for name in ("x", "seed", "tokens"))
    of_tokens = [] if tokens is None else [tokens, bound["dim"], bound["whole"]]
    return [x, bound["p"], seed, bound["index"], *of_tokens, *own]


def _entries(writer: Writer, node: fx.Node, division: Division, dim: Dim, group: fx.Node) -> fx.Node:
    """Which of a dimension a rank has: its part of the numbers of all, in the order of the ranks. Undivided where these
    do not have every so many in turn.
    """
    ranks, whole = division.ranks, dim.size
    stretches = division.ranges(dim, 0)
    turns, each = len(stretches), stretches[0][1] - stretches[0][0]
    in_turn = [
        [((turn * ranks + rank) * each, (turn * ranks + rank + 1) * each) for turn in range(turns)]
        for rank in range(ranks)
    ]
    if division.misfit(dim) or [division.ranges(dim, rank) for rank in range(ranks)] != in_turn:
        raise Undivided(node, "draws random numbers for what ranks divide in stretches of their own")
    numbers = writer.named(f"{node.name}_all", node, aten.arange.default, whole, device=node.meta["val"].device)
    if turns > 1:
        numbers = writer.named(f"{node.name}_turns", node, aten.view.default, numbers, [turns, ranks, each])
        numbers = writer.named(f"{node.name}_ranks", node, aten.transpose.int, numbers, 0, 1)
        numbers = writer.named(f"{node.name}_order", node, aten.reshape.default, numbers, [whole])
    return writer.named(f"{node.name}_own", node, OWN_PART, numbers, 0, whole, ranks, True, group)
