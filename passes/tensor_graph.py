"""The forward graph of a template as one tensor-parallel rank runs it: in local sizes, with the sums between ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import torch
from csc.kernels.collectives import ALL_REDUCE, GATHER_PIECES, OWN_PART, SHARE
from csc.kernels.linear_cross_entropy import DIVIDED_HEAD, DIVIDED_LOSS, ROWS
from torch import fx

from csc.analysis.gradient_flow import carrying_calls
from csc.analysis.operators import table
from csc.analysis.operators.execution import draws
from csc.analysis.operators.table import (
    ARITHMETIC,
    ATTENTION,
    CONTEXT_ATTENTION,
    FILLED,
    GROUPED,
    HEAD,
    LOOK_UPS,
    NEW,
    PARTS,
    PRODUCTS,
    RULES,
    SAME_ON_SHARDS,
    SCALES,
    SDPA,
    SIZED_VIEWS,
    is_linear,
    relation_of_features,
    resized,
)
from csc.analysis.tensor_axes import Dim, Division, Trees, contains, divides_all, flat, leaves
from csc.ir import graph as g
from csc.ir.graph import Evaluation, Writer
from csc.torch_private.traces import FakeTensorMode

# --- What one tensor-parallel rank has of each value of a template's graph -------------------------------------------
#
# Terms
#   axis     a leaf of the trees of dimensions (csc.analysis.tensor_axes) that is divided: heads, hidden features
#   cut      of a value: one of its dimensions has an axis, so that a rank holds a shard of it; other values are equal
#   pieces   of key heads that several ranks have (csc.analysis.tensor_axes): each has its own columns of one. Of a
#            value with key heads that is not in pieces each of these ranks has the whole head: it is *loose*


class Undivided(Exception):
    """A call, or a parameter, that cannot be divided: the reason is a phrase with it as its subject."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        called = node.meta["role"][1] if is_parameter(node) else f"{g.op_name(node)} at {g.place(node)}"
        super().__init__(f"{called} {reason}")


class LocalValues:
    """in_pieces: the values that are; to be added to as their calls are made."""

    def __init__(self, trees: Trees, divisions: Sequence[Division]) -> None:
        self._trees, self._divisions = trees, divisions
        self.in_pieces: set[fx.Node] = set()

    def dims(self, node: fx.Node) -> list[list[Dim]]:
        return self._trees.of.get(node, [[]])

    def division(self, dim: Dim) -> Division | None:
        return next((division for division in self._divisions if division.takes(dim)), None)

    def is_cut(self, node: fx.Node) -> bool:
        return any(self.division(dim) is not None for dims in self.dims(node) for dim in dims)

    def cut_dims(self, node: fx.Node) -> list[int]:
        return [place for place, dim in enumerate(self.dims(node)[0]) if self.division(dim) is not None]

    def _size(self, dim: Dim, pieces: bool) -> int:
        division = self.division(dim)
        return dim.size if division is None else division.size(dim, pieces)

    def sizes(self, node: fx.Node, result: int = 0) -> list[int]:
        return [self._size(dim, node in self.in_pieces) for dim in self.dims(node)[result]]

    def check_one_axis(self, node: fx.Node) -> None:
        """Undivided unless a rank's shard is its own in full: one axis, in one dimension, in every stretch of it; its
        groups may be a dimension of their own.
        """
        for dims in self.dims(node):
            having = [(dim, division) for dim in dims for division in self._divisions if division.takes(dim)]
            with_axis = [(dim, division) for dim, division in having if contains(dim, division.axis)]
            rest = [dim for dim, division in having if not contains(dim, division.axis)]
            twice = (
                any(division.groups is not None and contains(dim, division.groups) for dim, division in with_axis)
                and rest
            )
            if having and (len(with_axis) != 1 or len(rest) > 1 or twice):
                raise Undivided(node, "would be divided in two ways")
            if any(not divides_all(dim, division.axis) for dim, division in with_axis):
                raise Undivided(node, "joins what is divided to what is not")

    def check_pieces(self, parameter: fx.Node) -> None:
        """Of a parameter every rank has a piece of its own."""
        for dim in self.dims(parameter)[0]:
            division = self.division(dim)
            misfit = division.misfit(dim) if division is not None else ""
            if misfit:
                raise Undivided(parameter, misfit)
        if self.knows_no_groups(parameter) is not None:
            self.in_pieces.add(parameter)

    def knows_no_groups(self, node: fx.Node, result: int = 0) -> int | None:
        """The dimension in which a value has key heads of several ranks."""
        for place, dim in enumerate(self.dims(node)[result]):
            division = self.division(dim)
            if division is not None and division.in_pieces(dim):
                return place
        return None

    def is_loose(self, node: fx.Node) -> bool:
        """Whether several ranks have the same of a value: nothing can be summed over its heads."""
        return self.knows_no_groups(node) is not None and node not in self.in_pieces


def add_group(graph: fx.Graph, old: fx.Graph, number: torch.Tensor) -> fx.Node:
    """The number of the rank's group, under a name that nothing in the old graph has. number: what it is like."""
    names = {node.name for node in old.nodes}
    name = next(name for name in ("tp", "tp_group", "_tp_group") if name not in names)
    return g.add_placeholder(graph, name, number, ("shared", name))


def is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"][0] == "parameter"


# --- Calls that give a stretch of a dimension, or all of its stretches -----------------------------------------------
#
# Their bounds on a rank's shard are local ones.


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
        start, stop = (division.index(dims[dim], bound, pieces) for bound in (start, stop))
    except ValueError as error:
        raise Undivided(node, f"cuts where no shard ends ({error})") from error
    return (node.target, given(operand), dim, start, stop, step)


# --- Dropout of what tensor-parallel ranks divide: each takes its entries of the mask that the whole would have ------


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
    own_entries = [_entries(writer, node, division, dim, group), places[0], dim.size]
    x, seed, tokens = (fx.map_arg(bound[name], given) for name in ("x", "seed", "tokens"))
    of_tokens = [] if tokens is None else [tokens, bound["dim"], bound["whole"]]
    return [x, bound["p"], seed, bound["index"], *of_tokens, *own_entries]


def _entries(writer: Writer, node: fx.Node, division: Division, dim: Dim, group: fx.Node) -> fx.Node:
    """Which of a dimension a rank has: its part of the numbers of all, in the order of the ranks. Undivided where these
    do not have every so many in turn.
    """
    ranks, whole = division.ranks, dim.size
    stretches = division.ranges(dim, 0)
    turns, size_each = len(stretches), stretches[0][1] - stretches[0][0]
    in_turn = [
        [((turn * ranks + rank) * size_each, (turn * ranks + rank + 1) * size_each) for turn in range(turns)]
        for rank in range(ranks)
    ]
    if division.misfit(dim) or [division.ranges(dim, rank) for rank in range(ranks)] != in_turn:
        raise Undivided(node, "draws random numbers for what ranks divide in stretches of their own")
    numbers = writer.named(f"{node.name}_all", node, aten.arange.default, whole, device=node.meta["val"].device)
    if turns > 1:
        numbers = writer.named(f"{node.name}_turns", node, aten.view.default, numbers, [turns, ranks, size_each])
        numbers = writer.named(f"{node.name}_ranks", node, aten.transpose.int, numbers, 0, 1)
        numbers = writer.named(f"{node.name}_order", node, aten.reshape.default, numbers, [whole])
    return writer.named(f"{node.name}_own", node, OWN_PART, numbers, 0, whole, ranks, True, group)


# --- Sums between ranks where there is least to sum ------------------------------------------------------------------
#
# That is behind calls that are linear in what is summed, before those that hand on what calls on shards read.
#
# Terms
#   part     what a rank has of a sum; csc::all_reduce makes the sum of all
#   late     of a call: it is linear in a sum that nothing else reads, so that it makes of parts a part of its result
#
# A sum's price is its entries, and those of what is multiplied by its parts behind it: that is shared then, and its
# gradient summed in B.
#
# Experts: tokens' rows are weighed, put in order and added up, `top_k` for each token, all of it linear. Attention
# beside an MLP: two sums that are added are one sum.


ADDING = {*ARITHMETIC} - {*SCALES}
DIVIDED = "divided"  # in the meta of calls on shards, and of those that make or take parts


def fewer_sums(graph: fx.Graph, group: str, inexact: Collection[str], evaluate: Evaluation) -> fx.Graph:
    """The same values and gradients. The graph is changed, or another one stands for it.

    group: the name of the number of the rank's group; inexact: those of activations that a gradient is asked for.
    """

    def named() -> tuple[fx.Node, set[fx.Node]]:
        inputs = {node.name: node for node in g.placeholders(graph)}
        return inputs[group], carrying_calls(graph, [inputs[name] for name in inexact])

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
    late: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in g.calls(graph):
        if node.target is ALL_REDUCE:
            late[node] = ()
        elif DIVIDED not in node.meta and isinstance(node.meta["val"], torch.Tensor):
            parts = _parts(node, late)
            if parts and all(len(part.users) == 1 and _dtype(part) is _dtype(node) for part in parts):
                late[node] = parts
    return late


def _parts(node: fx.Node, late: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """The operands that a call is linear in, all of them late; none if it is linear in none."""
    operands = node.all_input_nodes
    parts = tuple(operand for operand in operands if operand in late)
    if not parts or draws(node):
        return ()
    name = g.op_name(node)
    if name in ADDING:
        return parts if len(parts) == 2 and _alike(*parts) else ()
    if name in SCALES:
        places = [place for place, operand in enumerate(node.args) if operand is parts[0]]
        once = places in ([0], [1]) if node.target is aten.mul.Tensor else places == [0] and not node.kwargs
        return parts if len(parts) == 1 and once and not any(map(is_parameter, operands)) else ()
    if parts != (node.args[0],):
        return ()
    return parts if _hands_on(node) or (len(operands) == 1 and name == "aten::sum") else ()


def _hands_on(node: fx.Node) -> bool:
    """Whether a call is linear in its only operand, or looks up entries of it."""
    operands = node.all_input_nodes
    looked_up = g.op_name(node) in LOOK_UPS and not any(map(g.is_inexact, operands[1:]))
    return looked_up or (len(operands) == 1 and is_linear(node))


def _sum_beside_each_other(graph: fx.Graph, late: dict[fx.Node, tuple[fx.Node, ...]], writer: Writer) -> None:
    """`((x + sum) + bias) + sum` becomes `(x + bias) + (sum + sum)`."""
    adding = {node: None for node in g.calls(graph) if node not in late and _is_plain(node)}
    for node in adding:
        if len(node.users) == 1 and next(iter(node.users)) in adding:
            continue  # its reader's terms are looked at
        terms, inner = _terms(node, adding)
        sums = [term for term in terms if _is_sum(term, node, late)]
        rest = [term for term in terms if not _is_sum(term, node, late)]
        if len(sums) < 2 or not rest:
            continue
        with graph.inserting_before(node):
            beside, together = rest[0], sums[0]
            for term in rest[1:]:
                beside = writer.named(f"{node.name}_rest", node, aten.add.Tensor, beside, term)
            for term in sums[1:]:
                before, together = together, writer.named(f"{node.name}_sums", node, aten.add.Tensor, together, term)
                late[together] = (before, term)
        node.args = (beside, together)
        for node_of_tree in inner:
            graph.erase_node(node_of_tree)


def _is_plain(node: fx.Node) -> bool:
    """Whether a call adds two values, of one dtype and times 1."""
    operands = node.all_input_nodes
    plain = node.target is aten.add.Tensor and len(operands) == 2 and not node.kwargs
    return plain and all(_dtype(operand) is _dtype(node) for operand in operands)


def _terms(node: fx.Node, adding: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What calls that nothing else reads add up, in order, and these calls, the last one first."""
    terms: list[fx.Node] = []
    inner: list[fx.Node] = []
    stack = node.all_input_nodes[::-1]
    while stack:
        term = stack.pop()
        if term in adding and len(term.users) == 1:
            inner.append(term)
            stack += term.all_input_nodes[::-1]
        else:
            terms.append(term)
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
        more = (
            [operand for operand in node.all_input_nodes if operand not in parts and operand in carries]
            if parts
            else []
        )
        beside[node] = sum(beside[part] for part in parts) + sum(map(_size, more))
        here, early = _size(node) + beside[node], sum(least[part] for part in parts)
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

        def given(operand: fx.Node) -> Any:
            return (
                self.mapping[operand]
                if operand in parts or operand not in self.carries
                else self._shared(operand, group)
            )

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
            shared = self.writer.named(f"{node.name}_shared", node, SHARE, self.mapping[node], self.mapping[group])
            shared.meta[DIVIDED] = True
            self.shared[node] = shared
        return self.shared[node]


def _share_earlier(graph: fx.Graph, group: fx.Node, carries: Collection[fx.Node], writer: Writer) -> None:
    """Share what has fewer entries, where calls that hand it on stand before: of rows that are looked up several times
    the gradients are added up before they are summed between ranks.
    """
    shared = {node.args[0]: node for node in graph.nodes if node.target is SHARE}
    for share in [node for node in graph.nodes if node.target is SHARE]:
        chain = _handing_on(share.args[0], carries)
        sizes = [_size(node_of_chain) for node_of_chain in chain]
        if not chain or min(sizes) >= _size(share):
            continue
        chain = chain[: sizes.index(min(sizes)) + 1]
        source, last = chain[-1], chain[-2] if len(chain) > 1 else share.args[0]
        if source not in shared:
            shared[source] = writer.named(f"{source.name}_shared", source, SHARE, source, group)
            shared[source].meta[DIVIDED] = True
        source.append(shared[source])  # before all that reads it
        last.replace_input_with(source, shared[source])
        for node_of_chain in (share.args[0], *chain[:-1]):
            node_of_chain.meta[DIVIDED] = True
        share.replace_all_uses_with(share.args[0])
        graph.erase_node(share)


def _handing_on(node: fx.Node, carries: Collection[fx.Node]) -> list[fx.Node]:
    """The values that a value was before calls that hand on entries of one operand, the nearest first, while nothing
    else reads them.
    """
    chain: list[fx.Node] = []
    while node.op == "call_function" and len(node.users) == 1 and DIVIDED not in node.meta and not draws(node):
        operands = node.all_input_nodes
        if not operands or node.args[0] is not operands[0] or operands[0] not in carries or is_parameter(operands[0]):
            break
        if not _hands_on(node) or _dtype(operands[0]) is not _dtype(node):
            break
        node = operands[0]
        chain.append(node)
    return chain


# --- The forward graph of a template as one tensor-parallel rank runs it ---------------------------------------------
#
# It is in local sizes, with the sums between ranks.
#
# Terms
#   axis, cut, pieces, loose      see csc.passes.tensor_graph
#   part     what a rank has of a sum over an axis: of a contraction, or of a reduction; it is summed where it is made
#   shared   an equal value as calls on shards read it: its gradient is parts, which csc::share adds up in B. A
#            parameter needs no such call if nothing else reads it: its gradient is summed once a step, in REDUCE
#
# Calls go on with pieces as far as they can; the first that cannot reads the head, which csc::gather_pieces makes.
#
# Each call is allowed by name. One that is not, on a shard, is Undivided, with the call; so is one whose result does
# not have the sizes that the trees say.


MEAN, SUM = 1, 2  # reductions of a loss
MAKES_SHARDS = FILLED | NEW | {"aten::expand"}  # of equal operands, or of none
WITHOUT_BIAS = {"aten::linear": aten.linear.default, "aten::addmm": aten.mm.default, "aten::baddbmm": aten.bmm.default}
ENTRY_BY_ENTRY = (table.broadcasting, table.elementwise, table.typed)


class ShardedGraph:
    """Copies a template's graph for one of the ranks, which all run the same.

    inexact: the placeholders of activations that a gradient is asked for. operators: names of the parameters' roles
    whose gradient a call in the graph has to add up. flops: of the calls that are divided, before they are; summed: the
    elements that are summed between ranks in F.
    """

    def __init__(
        self, graph: fx.Graph, inexact: Collection[fx.Node], trees: Trees, divisions: Sequence[Division],
        mode: FakeTensorMode, evaluate: Evaluation, number: torch.Tensor, operators: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.old, self.divisions, self.operators = graph, divisions, operators
        self.values = LocalValues(trees, divisions)
        self.mode, self.number = mode, number
        self.graph = fx.Graph()
        self.evaluate, self.writer = evaluate, Writer(self.graph, evaluate)
        self.mapping: dict[fx.Node, Any] = {}
        self.group: fx.Node
        self.shared: dict[fx.Node, fx.Node] = {}  # by the old node: what calls on shards read
        self.heads: dict[fx.Node, fx.Node] = {}  # of those, by the old node
        self.keeps = False  # whether the call at hand goes on with pieces
        self.inexact, self.carrying = inexact, carrying_calls(graph, inexact)
        self.shared_reads: set[str] = set()  # parameters, by the names of their roles
        self.equal_reads: set[str] = set()
        self.flops = self.summed = 0

    def run(self) -> ShardedGraph:
        """Make the graph. Undivided if a call does not allow it."""
        self._placeholders()
        for node in g.calls(self.old):
            self._call(node)
        self.graph.output(fx.map_arg(self.old.output_node().args[0], self.mapping.__getitem__))
        for node in g.outputs(self.old):
            if self.values.is_cut(node):
                raise Undivided(node, "leaves as a shard")
        g.erase_dead(self.graph)
        self._sum_fewer()
        return self

    def _sum_fewer(self) -> None:
        before = entries_summed(self.graph)
        inexact = {self.mapping[node].name for node in self.inexact}
        self.graph = fewer_sums(self.graph, self.group.name, inexact, self.evaluate)
        self.group = next(node for node in g.placeholders(self.graph) if node.name == self.group.name)
        self.summed -= before - entries_summed(self.graph)

    @property
    def meets(self) -> bool:
        """Whether its ranks exchange anything."""
        return bool(self.group.users)

    def _placeholders(self) -> None:
        """As they were, parameters in their local sizes; the number of the group behind the tables."""
        group: fx.Node | None = None
        for node in g.placeholders(self.old):
            if node.meta["role"][0] == "parameter" and group is None:
                group = add_group(self.graph, self.old, self.number)
            val = node.meta["val"]
            if self.values.is_cut(node):
                self.values.check_one_axis(node)
                self.values.check_pieces(node)
                with self.mode:
                    val = torch.empty(self.values.sizes(node), dtype=val.dtype, device=val.device)
            self.mapping[node] = g.add_placeholder(self.graph, node.name, val, node.meta["role"])
        self.group = group or add_group(self.graph, self.old, self.number)

    # pieces of key heads

    def _goes_on(self, node: fx.Node, name: str, cut: Sequence[fx.Node]) -> bool:
        """Whether a call gives pieces if it is given some."""
        pieces = [used for used in cut if used in self.values.in_pieces]
        if not pieces or any(map(self.values.is_loose, cut)) or name in (ATTENTION, CONTEXT_ATTENTION, SDPA):
            return False
        if name in PRODUCTS or name in PARTS or self._ends(node, pieces[0], "summed"):
            return True
        return all(self._along(used) in map(_leaves, self.values.dims(node)[0]) for used in pieces)

    def _along(self, node: fx.Node) -> list[int]:
        place = self.values.knows_no_groups(node)
        return [] if place is None else _leaves(self.values.dims(node)[0][place])

    def _gathered(self, node: fx.Node) -> fx.Node:
        """The heads that a value has a piece of."""
        if node not in self.heads:
            place = self.values.knows_no_groups(node)
            assert place is not None
            dim = self.values.dims(node)[0][place]
            division = self.values.division(dim)
            if division is None or len(flat(dim, "sum")) > 1:
                raise Undivided(node, "joins heads of several ranks to others")
            self.heads[node] = self.writer.named(
                f"{node.name}_heads", node, GATHER_PIECES, self.mapping[node], self.group, place, division.each
            )  # fmt: skip
            self.heads[node].meta[DIVIDED] = True
            self.summed += self.heads[node].meta["val"].numel()
        return self.heads[node]

    # calls

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            several, which = node.args
            self.mapping[node] = self.writer.named(node.name, node, node.target, self.mapping[several], which)  # type: ignore[index]
            if DIVIDED in self.mapping[several].meta:  # type: ignore[index]
                self.mapping[node].meta[DIVIDED] = True
            if several in self.values.in_pieces and self.values.knows_no_groups(node) is not None:
                self.values.in_pieces.add(node)
            return
        cut = [used for used in node.all_input_nodes if self.values.is_cut(used) and not self._is_unread(node, used)]
        if not cut and not self.values.is_cut(node):
            self.equal_reads |= {used.meta["role"][1] for used in node.all_input_nodes if is_parameter(used)}
            g.copy_node(self.graph, node, self.mapping)
            return
        self.values.check_one_axis(node)
        name = g.op_name(node)
        self.keeps = self._goes_on(node, name, cut)
        if self.keeps and any(
            self.values.knows_no_groups(node, result) is not None for result in range(len(self.values.dims(node)))
        ):
            self.values.in_pieces.add(node)
        if draws(node):
            dropped = divided_dropout(self.values, self.writer, node, self._given, self.group)
            self._put(node, node.target, *dropped)
            return
        if not cut and name not in MAKES_SHARDS:
            raise Undivided(node, "makes a shard of what is equal, which csc knows for expand alone")
        if name in PRODUCTS or name in GROUPED:
            self._product(node, cut)
        elif name in ("aten::sum", "aten::mean"):
            self._reduction(node)
        elif name == "aten::embedding" and self._ends(node, node.args[0], "picked"):  # type: ignore[arg-type]
            self._look_up(node)
        elif name == "aten::cross_entropy_loss":
            self._loss(node)
        elif name == HEAD:
            self._head(node)
        elif name in (ATTENTION, CONTEXT_ATTENTION, SDPA):
            self._attention(node)
        elif name in PARTS:
            stretched = stretch(self.values, node, self._given, self.keeps)
            if stretched is None:
                self._same(node)
            else:
                self._put(node, *stretched)
        elif name in SIZED_VIEWS or name in MAKES_SHARDS:
            self._sized(node)
        elif name in SAME_ON_SHARDS or RULES.get(name, table.broadcasting) in ENTRY_BY_ENTRY:
            self._same(node)
        else:
            raise Undivided(node, "is none that csc can divide")

    def _given(self, node: fx.Node) -> Any:
        """An operand of a call on shards."""
        if node in self.values.in_pieces and not self.keeps:
            return self._gathered(node)
        if self.values.is_cut(node) or node not in self.carrying:
            return self.mapping[node]
        if is_parameter(node):
            name = node.meta["role"][1]
            self.shared_reads.add(name)
            if name not in self.operators:
                return self.mapping[node]
        if node not in self.shared:
            self.shared[node] = self.writer.named(
                f"{node.name}_shared", node, SHARE, self.mapping[node], self.group
            )  # fmt: skip
        return self.shared[node]

    def _put(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
        """The call that stands for a node; Undivided unless it gives what the trees say."""
        sharded = self._made(node, node.name, target, *args, **kwargs)
        for result, val in enumerate(_results(sharded.meta["val"])):
            sizes = self.values.sizes(node, result)
            if list(val.shape) != sizes:
                raise Undivided(node, f"gives {list(val.shape)} on shards, where {sizes} was expected")
        self.mapping[node] = sharded

    def _made(self, node: fx.Node, name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        try:
            sharded = self.writer.named(name, node, target, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            cause = (str(error).strip().splitlines() or [""])[0]
            raise Undivided(node, f"does not run on shards ({cause})") from error
        sharded.meta[DIVIDED] = True
        return sharded

    def _same(self, node: fx.Node) -> None:
        if not self.values.is_cut(node):
            raise Undivided(node, "loses track of what is divided")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._given)
        self._put(node, node.target, *args, **kwargs)

    def _sized(self, node: fx.Node) -> None:
        """A call that lists the sizes of its result, which are local ones now."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._given)
        args, kwargs = resized(node, args, kwargs, self.values.sizes(node))
        self._put(node, node.target, *args, **kwargs)

    def _attention(self, node: fx.Node) -> None:
        """Each rank its key heads, with the query heads that read them."""
        query, key, value = node.args[:3]
        assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
        one_head = key.meta["val"].shape[-3] == 1 and not self.values.is_cut(key) and not self.values.is_cut(value)
        by_heads = (query,) if one_head else (query, key, value)
        if any(self.values.cut_dims(operand) != [operand.meta["val"].dim() - 3] for operand in by_heads):
            raise Undivided(node, "can be divided by its heads alone")
        self.flops += 4 * query.meta["val"].numel() * key.meta["val"].shape[-2]
        self._same(node)

    def _product(self, node: fx.Node, cut: Sequence[fx.Node]) -> None:
        """Along rows or columns: the same. Contracted: a part, summed; a bias is added to the sum, once."""
        left, right = (node.args[place] for place in PRODUCTS.get(g.op_name(node), (0, 1)))
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        self.flops += 2 * node.meta["val"].numel() * left.meta["val"].shape[-1]
        contracted = [used for used in cut if self._ends(node, used, "contracted")]
        if not contracted:
            self._same(node)
            return
        if set(contracted) != {left, right} or self.values.is_cut(node):
            raise Undivided(node, "sums over what one operand alone is divided by")
        if any(map(self.values.is_loose, contracted)):
            raise Undivided(node, "sums over key heads that several ranks have")
        apart = g.op_name(node) in GROUPED  # what it reads beside says where groups end
        rest = fx.map_arg((node.args[2:], node.kwargs), self._given) if apart else ((), {})
        added = [
            operand
            for operand in node.args
            if isinstance(operand, fx.Node) and operand not in (left, right) and not apart
        ]
        factors = [factor for name, factor in g.bind(node).items() if name in ("alpha", "beta")]
        if any(factor != 1 for factor in factors) or (node.kwargs and not apart):
            raise Undivided(node, "scales its operands")
        if added and g.op_name(node) not in WITHOUT_BIAS:
            raise Undivided(node, "adds to what it sums")
        target = WITHOUT_BIAS.get(g.op_name(node), node.target) if added else node.target
        part = self._made(node, f"{node.name}_part", target, self._given(left), self._given(right), *rest[0], **rest[1])
        name = f"{node.name}_sum" if added else node.name
        total = self._total(node, part, name)
        for bias in added:
            self.equal_reads |= {bias.meta["role"][1]} if is_parameter(bias) else set()
            total = self.writer.named(node.name, node, aten.add.Tensor, total, self.mapping[bias])
        self.mapping[node] = total

    def _reduction(self, node: fx.Node) -> None:
        """Over the axis: a part, summed; of a mean, the mean of the ranks' means."""
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        if not self._ends(node, operand, "summed"):
            self._same(node)
            return
        if self.values.is_cut(node):
            raise Undivided(node, "sums over a part of what is divided")
        if self.values.is_loose(operand):
            raise Undivided(node, "sums over key heads that several ranks have")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._given)
        part = self._made(node, f"{node.name}_part", node.target, *args, **kwargs)
        mean = g.op_name(node) == "aten::mean"
        total = self._total(node, part, f"{node.name}_sum" if mean else node.name)
        self.mapping[node] = (
            self.writer.named(node.name, node, aten.div.Tensor, total, self.divisions[0].ranks) if mean else total
        )

    def _look_up(self, node: fx.Node) -> None:
        """Each rank in its own rows: a part, since others have zeros."""
        bound = g.bind(node)
        if bound["scale_grad_by_freq"] or bound["sparse"] or bound["weight"].op != "placeholder":
            raise Undivided(node, "looks up in another way than in a parameter, row by row")
        part = self._made(
            node, f"{node.name}_part", ROWS, self._given(bound["weight"]), self._given(bound["indices"]), self.group,
            bound["padding_idx"],
        )  # fmt: skip
        self.mapping[node] = self._total(node, part, node.name)

    def _loss(self, node: fx.Node) -> None:
        """Cross entropy over logits of which each rank has those of its words."""
        bound = g.bind(node)
        logits, labels = bound["self"], bound["target"]
        plain = bound["weight"] is None and not bound["label_smoothing"] and bound["reduction"] in (MEAN, SUM)
        if self.values.cut_dims(logits) != [1] or logits.meta["val"].dim() != 2 or not plain or g.is_inexact(labels):
            raise Undivided(node, "is no plain mean or sum over labels")
        self.summed += 3 * labels.meta["val"].numel()
        several = self._made(
            node, f"{node.name}_results", DIVIDED_LOSS, self._given(logits), self._given(labels), self.group,
            bound["ignore_index"], bound["reduction"] == MEAN,
        )  # fmt: skip
        self.mapping[node] = self._made(node, node.name, operator.getitem, several, 0)

    def _head(self, node: fx.Node) -> None:
        """A head and its loss in chunks of tokens: each rank makes the logits of its words."""
        bound = g.bind(node)
        x, weight, bias = bound["x"], bound["weight"], bound["bias"]
        apart = [
            parameter
            for parameter in (weight, bias)
            if parameter is not None and self.values.cut_dims(parameter) != [0]
        ]
        if apart or self.values.is_cut(x) or g.is_inexact(bound["labels"]):
            raise Undivided(node, "can be divided by its words alone")
        tokens = bound["labels"].meta["val"].numel()
        self.flops += 2 * tokens * weight.meta["val"].numel()
        self.summed += 3 * tokens
        self.mapping[node] = self._made(
            node, node.name, DIVIDED_HEAD, self._given(x), self._given(weight),
            None if bias is None else self._given(bias), self._given(bound["labels"]), self.group, bound["scale"],
            bound["softcap"], bound["ignored"], bound["mean"], bound["rows"], bound["output_mask"],
        )  # fmt: skip

    def _total(self, node: fx.Node, part: fx.Node, name: str) -> fx.Node:
        if list(part.meta["val"].shape) != list(node.meta["val"].shape):
            raise Undivided(node, f"gives parts of {list(part.meta['val'].shape)}")
        self.summed += prod(part.meta["val"].shape)
        return self._made(node, name, ALL_REDUCE, part, self.group)

    def _is_unread(self, node: fx.Node, operand: fx.Node) -> bool:
        """Whether an operand is looked at for its type alone."""
        relation = relation_of_features(node)
        uses = [use for use in relation.uses if use.node is operand] if relation is not None else []
        return bool(uses) and all(use.rest.how == "unread" for use in uses)

    def _ends(self, node: fx.Node, operand: fx.Node, how: str) -> bool:
        """Whether the divided dimension of an operand ends so in a call."""
        relation = relation_of_features(node)
        uses = [use for use in relation.uses if use.node is operand] if relation is not None else []
        return any(
            (end := use.end(dim)) is not None and end.how == how
            for use in uses
            for dim in self.values.cut_dims(operand)
        )


def _leaves(dim: Dim) -> list[int]:
    return [id(leaf) for leaf in leaves(dim)]


def _results(val: Any) -> list[torch.Tensor]:
    return list(val) if isinstance(val, (tuple, list)) else [val]
