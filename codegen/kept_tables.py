"""Which tables a program does not make in each step: those that no batch changes (positions, rotary tables, causal
masks) are made once, and those that sizes alone change (windows of images) while these are the same.

Terms: a call is *fixed* if constants and numbers alone lead to it, *sized* if sizes of the batch (Program.sizes) do,
too. Of such calls those are *kept* that a function returns or that another call reads. Functions that need the same
kept values get them from one function.

    kept(graph, wanted, sizes) -> [KeptTables]      wanted: the results of each function of layers/tables.py by its name
    decorator(tables)                               what stands above such a function in a program's text
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from csc.codegen.python import quoted, wrapped
from torch import fx

from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

MOST = 2**24  # bytes of one kept value: what is larger is made in each step, and gone after it
LEAST = 3  # sized calls that are worth a look at the sizes
ONCE = "@once\n"
WHILE_EQUAL = "@while_equal("
OF_MASKS = frozenset({"csc::pack_mask", "csc::group_ranges", "csc::seeing_ranges"})  # csc's own that read values alone


@dataclass(frozen=True)
class KeptTables:
    """One function of kept values: `results`, under the names of their nodes, for the functions `readers`. entries: the
    sizes that it is made of; none: it is fixed.
    """

    name: str
    readers: tuple[str, ...]
    results: tuple[fx.Node, ...]
    entries: tuple[str, ...] = ()


def decorator(tables: KeptTables) -> str:
    """With the end of its line."""
    if not tables.entries:
        return ONCE
    return "\n".join(wrapped(WHILE_EQUAL, map(quoted, tables.entries), ")", indent=0)) + "\n"


def kept(graph: fx.Graph, wanted: Mapping[str, Sequence[fx.Node]], sizes: Collection[str]) -> list[KeptTables]:
    """One for each set of readers, fixed ones first, in the order of the graph. Sized ones read fixed ones, too."""
    returned = {node for results in wanted.values() for node in results}
    needed = {name: g.ancestors(results) for name, results in wanted.items()}
    sized = _sized(graph, needed, returned, sizes)
    if sized:
        ends = {node for one in sized for node in one.results}
        needed = {name: g.ancestors(results, until=ends) for name, results in wanted.items()}
        needed |= {one.name: g.ancestors(one.results) for one in sized}
    nodes, _ = _kept(graph, returned, needed, ())
    return [*_tables("_fixed", _by_readers(nodes, needed)), *sized]


def _sized(
    graph: fx.Graph, needed: Mapping[str, set[fx.Node]], returned: set[fx.Node], sizes: Collection[str]
) -> list[KeptTables]:
    """Those that take more than a look at the sizes does."""
    if not sizes:
        return []
    _, fixed = _kept(graph, returned, needed, ())
    nodes, _ = _kept(graph, returned, needed, sizes)
    found = []
    for one in _tables("_sized", _by_readers([node for node in nodes if node not in fixed], needed)):
        own = g.ancestors(one.results, until=fixed) - fixed
        entries = [node.meta["role"][1] for node in g.placeholders(graph) if node in own and _is_size(node, sizes)]
        if sum(node.op == "call_function" for node in own) >= LEAST:
            found.append(replace(one, entries=tuple(entries)))
    return found


def _by_readers(
    nodes: Sequence[fx.Node], needed: Mapping[str, set[fx.Node]]
) -> dict[tuple[str, ...], list[fx.Node]]:  # fmt: skip
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(tuple(name for name in needed if node in needed[name]), []).append(node)
    return groups


def _tables(prefix: str, groups: Mapping[tuple[str, ...], Sequence[fx.Node]]) -> list[KeptTables]:
    return [KeptTables(f"{prefix}_{i + 1}", names, tuple(nodes)) for i, (names, nodes) in enumerate(groups.items())]


def _kept(
    graph: fx.Graph, returned: set[fx.Node], needed: Mapping[str, set[fx.Node]], sizes: Collection[str]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """(what is kept of a graph: nothing that is too large, but what leads to it is; all that these sizes and constants
    lead to).
    """
    asked = set[fx.Node]().union(*needed.values())
    large: set[fx.Node] = set()
    while True:
        found = _led_to(graph, sizes, large)
        kept = [
            node for node in g.calls(graph)
            if node in found & asked and (node in returned or any(u in asked and u not in found for u in node.users))
        ]  # fmt: skip
        beyond = {node for node in kept if not 0 <= _bytes(node) <= MOST}
        if not beyond:
            return kept, found
        large |= beyond


def _led_to(graph: fx.Graph, sizes: Collection[str], large: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            alone = node.meta["role"][0] == "constant" or _is_size(node, sizes)
        else:
            alone = node.op == "call_function" and node not in large and _of_values(node)
        if alone and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _is_size(node: fx.Node, sizes: Collection[str]) -> bool:
    return node.op == "placeholder" and node.meta["role"][0] == "input" and node.meta["role"][1] in sizes


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
