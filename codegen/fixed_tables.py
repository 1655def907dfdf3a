"""Which tables no batch changes, so that a program makes them once: positions, rotary tables, causal masks.

Terms: a call is *fixed* if constants and numbers alone lead to it. Of fixed calls those are *kept* that a function
returns or that a call reads which is not fixed. Functions that need the same kept values get them from one function.

    fixed(graph, wanted) -> [FixedTables]      wanted: the results of each function of layers/tables.py by its name
    ONCE                                       what stands above such a function in a program's text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

MOST = 2**24  # bytes of one kept value: what is larger is made in each step, and gone after it
ONCE = "@once\n"
OF_MASKS = frozenset({"csc::pack_mask", "csc::group_ranges", "csc::seeing_ranges"})  # csc's own that read values alone


@dataclass(frozen=True)
class FixedTables:
    """One function of kept values: `results`, under the names of their nodes, for the functions `readers`."""

    name: str
    readers: tuple[str, ...]
    results: tuple[fx.Node, ...]


def fixed(graph: fx.Graph, wanted: Mapping[str, Sequence[fx.Node]]) -> list[FixedTables]:
    """One for each set of readers, in the order of the graph."""
    needed = {name: g.ancestors(results) for name, results in wanted.items()}
    readers = {node: tuple(name for name in wanted if node in needed[name]) for node in g.calls(graph)}
    returned = {node for results in wanted.values() for node in results}
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in _kept(graph, returned, {node for node, names in readers.items() if names}):
        groups.setdefault(readers[node], []).append(node)
    return [FixedTables(f"_fixed_{i + 1}", names, tuple(nodes)) for i, (names, nodes) in enumerate(groups.items())]


def _kept(graph: fx.Graph, returned: set[fx.Node], needed: set[fx.Node]) -> list[fx.Node]:
    """What is kept of a graph: nothing that is too large, but what leads to it is."""
    large: set[fx.Node] = set()
    while True:
        found = _fixed(graph, large)
        kept = [
            node for node in g.calls(graph)
            if node in found & needed and (node in returned or any(u in needed and u not in found for u in node.users))
        ]  # fmt: skip
        beyond = {node for node in kept if not 0 <= _bytes(node) <= MOST}
        if not beyond:
            return kept
        large |= beyond


def _fixed(graph: fx.Graph, large: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            alone = node.meta["role"][0] == "constant"
        else:
            alone = node.op == "call_function" and node not in large and _of_values(node)
        if alone and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _of_values(node: fx.Node) -> bool:
    """Whether a call gives the same whenever its operands are the same, and does nothing else."""
    if not isinstance(node.target, OpOverload):
        return g.op_name(node) == "getitem"
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return (node.target.namespace == "aten" and not drawn) or g.op_name(node) in OF_MASKS


def _bytes(node: fx.Node) -> int:
    """Of what a call gives; -1 if it is no tensor."""
    value = node.meta["val"]
    if not hasattr(value, "stride"):
        return -1
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return int(value.dtype.itemsize * (1 + reach)) if 0 not in value.shape else 0
