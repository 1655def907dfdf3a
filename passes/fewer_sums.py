"""Sums between ranks where there is least to sum: behind calls that are linear in what is summed, before those that
hand on what calls on shards read.

    fewer_sums(graph, group, inexact, evaluate) -> fx.Graph
    entries_summed(graph) -> int

Terms
  part     what a rank has of a sum; csc::all_reduce makes the sum of all
  late     of a call: it is linear in a sum that nothing else reads, so that it makes of parts a part of its result

A sum's price is its entries, and those of what is multiplied by its parts behind it: that is shared then, and its
gradient summed in B.

Experts: tokens' rows are weighed, put in order and added up, `top_k` for each token, all of it linear. Attention beside
an MLP: two sums that are added are one sum.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from csc.kernels.collectives import ALL_REDUCE, SHARE
from csc.passes.local_values import is_parameter
from torch import fx

from csc.analysis.gradient_flow import carrying_calls
from csc.analysis.operators.execution import draws
from csc.analysis.operators.table import ARITHMETIC, LOOK_UPS, SCALES, is_linear
from csc.ir import graph as g
from csc.ir.graph import Evaluation, Writer

aten = torch.ops.aten
ADDING = {*ARITHMETIC} - {*SCALES}
DIVIDED = "divided"  # in the meta of calls on shards, and of those that make or take parts


def fewer_sums(graph: fx.Graph, group: str, inexact: Collection[str], evaluate: Evaluation) -> fx.Graph:
    """The same values and gradients. The graph is changed, or another one stands for it.

    group: the name of the number of the rank's group; inexact: those of activations that a gradient is asked for.
    """

    def named() -> tuple[fx.Node, set[fx.Node]]:
        given = {node.name: node for node in g.placeholders(graph)}
        return given[group], carrying_calls(graph, [given[name] for name in inexact])

    number, carries = named()
    _share_earlier(graph, number, carries, Writer(graph, evaluate))
    late = _late(graph)
    _sum_beside_each_other(graph, late, Writer(graph, evaluate))
    number, carries = named()
    summed, parts = _summed(late, carries)
    return _Later(graph, number, late, summed, parts, carries, evaluate).graph if summed else graph


def entries_summed(graph: fx.Graph) -> int:
    """That ranks sum in F."""
    return sum(_size(node) for node in g.calls(graph) if node.target is ALL_REDUCE)


def _late(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """The late calls, and the operands that are parts then; none of a sum itself."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in g.calls(graph):
        if node.target is ALL_REDUCE:
            found[node] = ()
        elif DIVIDED not in node.meta and isinstance(node.meta["val"], torch.Tensor):
            parts = _parts(node, found)
            if parts and all(len(one.users) == 1 and _dtype(one) is _dtype(node) for one in parts):
                found[node] = parts
    return found


def _parts(node: fx.Node, late: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """The operands that a call is linear in, all of them late; none if it is linear in none."""
    given = node.all_input_nodes
    parts = tuple(one for one in given if one in late)
    if not parts or draws(node):
        return ()
    name = g.op_name(node)
    if name in ADDING:
        return parts if len(parts) == 2 and _alike(*parts) else ()
    if name in SCALES:
        places = [place for place, one in enumerate(node.args) if one is parts[0]]
        once = places in ([0], [1]) if node.target is aten.mul.Tensor else places == [0] and not node.kwargs
        return parts if len(parts) == 1 and once and not any(map(is_parameter, given)) else ()
    if parts != (node.args[0],):
        return ()
    return parts if _hands_on(node) or (len(given) == 1 and name == "aten::sum") else ()


def _hands_on(node: fx.Node) -> bool:
    """Whether a call is linear in its only operand, or looks up entries of it."""
    given = node.all_input_nodes
    looked_up = g.op_name(node) in LOOK_UPS and not any(map(g.is_inexact, given[1:]))
    return looked_up or (len(given) == 1 and is_linear(node))


def _sum_beside_each_other(graph: fx.Graph, late: dict[fx.Node, tuple[fx.Node, ...]], writer: Writer) -> None:
    """`((x + sum) + bias) + sum` becomes `(x + bias) + (sum + sum)`."""
    adding = {node: None for node in g.calls(graph) if node not in late and _is_plain(node)}
    for node in adding:
        if len(node.users) == 1 and next(iter(node.users)) in adding:
            continue  # its reader's terms are looked at
        terms, inner = _terms(node, adding)
        sums = [one for one in terms if _is_sum(one, node, late)]
        rest = [one for one in terms if not _is_sum(one, node, late)]
        if len(sums) < 2 or not rest:
            continue
        with graph.inserting_before(node):
            beside, together = rest[0], sums[0]
            for one in rest[1:]:
                beside = writer.named(f"{node.name}_rest", node, aten.add.Tensor, beside, one)
            for one in sums[1:]:
                before, together = together, writer.named(f"{node.name}_sums", node, aten.add.Tensor, together, one)
                late[together] = (before, one)
        node.args = (beside, together)
        for one in inner:
            graph.erase_node(one)


def _is_plain(node: fx.Node) -> bool:
    """Whether a call adds two values, of one dtype and times 1."""
    given = node.all_input_nodes
    plain = node.target is aten.add.Tensor and len(given) == 2 and not node.kwargs
    return plain and all(_dtype(one) is _dtype(node) for one in given)


def _terms(node: fx.Node, adding: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What calls that nothing else reads add up, in order, and these calls, the last one first."""
    terms: list[fx.Node] = []
    inner: list[fx.Node] = []
    stack = node.all_input_nodes[::-1]
    while stack:
        one = stack.pop()
        if one in adding and len(one.users) == 1:
            inner.append(one)
            stack += one.all_input_nodes[::-1]
        else:
            terms.append(one)
    return terms, inner


def _is_sum(term: fx.Node, whole: fx.Node, late: Collection[fx.Node]) -> bool:
    return term in late and len(term.users) == 1 and _alike(term, whole)


def _alike(*nodes: Any) -> bool:
    return len({(node.meta["val"].shape, _dtype(node)) for node in nodes}) == 1


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _summed(
    late: dict[fx.Node, tuple[fx.Node, ...]], carries: Collection[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The late calls whose results are summed in place of the sums that they come from, and all that makes parts for
    them.
    """
    beside, least, better = dict[fx.Node, int](), dict[fx.Node, int](), set[fx.Node]()
    for node, parts in late.items():
        others = [one for one in node.all_input_nodes if one not in parts and one in carries] if parts else []
        beside[node] = sum(beside[one] for one in parts) + sum(map(_size, others))
        here, early = _size(node) + beside[node], sum(least[one] for one in parts)
        least[node] = min(here, early) if parts else here
        better |= {node} if parts and here < early else set()
    makes_parts = set[fx.Node]()
    for node in reversed(late):
        if node in better or node in makes_parts:
            makes_parts.update(late[node])
    return better - makes_parts, makes_parts


def _size(node: fx.Node) -> int:
    return int(node.meta["val"].numel())


class _Later:
    """Copies a graph with sums at these calls."""

    def __init__(
        self, graph: fx.Graph, group: fx.Node, late: dict[fx.Node, tuple[fx.Node, ...]], summed: set[fx.Node],
        parts: set[fx.Node], carries: Collection[fx.Node], evaluate: Evaluation,
    ) -> None:  # fmt: skip
        self.graph, self.carries = fx.Graph(), carries
        self.writer, self.mapping = Writer(self.graph, evaluate), dict[fx.Node, Any]()
        self.shared: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node in summed or (node in parts and late[node]):
                self._part(node, group, late[node], node in summed)
            elif node in parts:
                self.mapping[node] = self.mapping[node.args[0]]
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.mapping.__getitem__))
            else:
                copied = g.copy_node(self.graph, node, self.mapping)
                if node.target is SHARE:
                    self.shared.setdefault(node.args[0], copied)

    def _part(self, node: fx.Node, group: fx.Node, parts: Collection[fx.Node], is_summed: bool) -> None:
        """A call on parts; what else it reads is shared, as its gradient is parts then."""

        def given(one: fx.Node) -> Any:
            return self.mapping[one] if one in parts or one not in self.carries else self._shared(one, group)

        args, kwargs = fx.map_arg((node.args, node.kwargs), given)
        part = self.writer.named(f"{node.name}_part", node, node.target, *args, **kwargs)
        part.meta[DIVIDED] = True
        self.mapping[node] = part
        if is_summed:
            self.mapping[node] = self.writer.named(node.name, node, ALL_REDUCE, part, self.mapping[group])
            self.mapping[node].meta[DIVIDED] = True

    def _shared(self, node: fx.Node, group: fx.Node) -> fx.Node:
        """As calls on parts read it, once for all of them."""
        if node not in self.shared:
            made = self.writer.named(f"{node.name}_shared", node, SHARE, self.mapping[node], self.mapping[group])
            made.meta[DIVIDED] = True
            self.shared[node] = made
        return self.shared[node]


def _share_earlier(graph: fx.Graph, group: fx.Node, carries: Collection[fx.Node], writer: Writer) -> None:
    """Share what has fewer entries, where calls that hand it on stand before: of rows that are looked up several times
    the gradients are added up before they are summed between ranks.
    """
    shared = {node.args[0]: node for node in graph.nodes if node.target is SHARE}
    for share in [node for node in graph.nodes if node.target is SHARE]:
        chain = _handing_on(share.args[0], carries)
        sizes = [_size(one) for one in chain]
        if not chain or min(sizes) >= _size(share):
            continue
        chain = chain[: sizes.index(min(sizes)) + 1]
        source, last = chain[-1], chain[-2] if len(chain) > 1 else share.args[0]
        if source not in shared:
            shared[source] = writer.named(f"{source.name}_shared", source, SHARE, source, group)
            shared[source].meta[DIVIDED] = True
        source.append(shared[source])  # before all that reads it
        last.replace_input_with(source, shared[source])
        for one in (share.args[0], *chain[:-1]):
            one.meta[DIVIDED] = True
        share.replace_all_uses_with(share.args[0])
        graph.erase_node(share)


def _handing_on(node: fx.Node, carries: Collection[fx.Node]) -> list[fx.Node]:
    """The values that a value was before calls that hand on entries of one operand, the nearest first, while nothing
    else reads them.
    """
    chain: list[fx.Node] = []
    while node.op == "call_function" and len(node.users) == 1 and DIVIDED not in node.meta and not draws(node):
        given = node.all_input_nodes
        if not given or node.args[0] is not given[0] or given[0] not in carries or is_parameter(given[0]):
            break
        if not _hands_on(node) or _dtype(given[0]) is not _dtype(node):
            break
        node = given[0]
        chain.append(node)
    return chain
