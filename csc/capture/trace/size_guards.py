"""What a captured graph assumes of the sizes of its inputs.

A model that is traced with several samples is traced for one too, unless its code asks whether there is one. That torch
takes a size for another one than 1 within an operation is no condition: it decides there what is a view and how results
lie in memory, and the operations of the graph give for one sample what they give for several. `squeeze` alone does not.

    sizes_of(graph, asked) -> Sizes         asked: conditions that the model's code made; None: all may be its own
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from csc.ir import graph as g
from csc.ir.capture_guards import SizeGuards
from csc.torch_private.symbolic_sizes import assumed_of_sizes


def sizes_of(graph: fx.Graph, asked: Collection[Any] | None) -> SizeGuards:
    """The sizes of a flat graph's inputs, and the conditions under which it is the model."""
    given = {n.meta["role"][1]: n.meta["val"] for n in g.placeholders(graph) if n.meta["role"][0] == "input"}
    entries = {
        name: (str(val.dtype), tuple(size if isinstance(size, int) else size.node.expr for size in val.shape))
        for name, val in given.items()
    }
    ranges, relations = assumed_of_sizes(g.outputs(graph)[0].meta["val"].fake_mode)
    if asked is None:
        return SizeGuards(entries, ranges, tuple(relations))
    kept = [one for one in relations if one in asked or not _is_not_one(one)]
    several = {str(one.lhs) for one in asked if isinstance(one, sympy.Ge) and one.rhs == 2}
    ranges = {name: (1 if low == 2 and name not in several else low, high) for name, (low, high) in ranges.items()}
    return SizeGuards(entries, ranges, (*kept, *_squeezed(graph)))


def _is_not_one(relation: Any) -> bool:
    return isinstance(relation, sympy.Ne) and sympy.S.One in relation.args


def _squeezed(graph: fx.Graph) -> Iterator[Any]:
    """That dimensions which are asked to go if their size is 1 have another one."""
    for node in g.calls(graph):
        if g.op_name(node) == "aten::squeeze":
            val = node.all_input_nodes[0].meta["val"]
            named = node.args[1] if len(node.args) > 1 else range(val.dim())
            for dimension in named if isinstance(named, (list, tuple, range)) else [named]:
                if isinstance(val.shape[dimension], torch.SymInt):
                    yield sympy.Ne(val.shape[dimension].node.expr, 1)
