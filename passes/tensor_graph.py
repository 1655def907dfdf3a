"""The forward graph of a template as one tensor-parallel rank runs it: in local sizes, with the sums between ranks.

Terms
  axis, cut, pieces, loose      see csc.passes.local_values
  part     what a rank has of a sum over an axis: of a contraction, or of a reduction; it is summed where it is made
  shared   an equal value as calls on shards read it: its gradient is parts, which csc::share adds up in B. A parameter
           needs no such call if nothing else reads it: its gradient is summed once a step, in REDUCE

Calls go on with pieces as far as they can; the first that cannot reads the head, which csc::gather_pieces makes.

    ShardedGraph(graph, inexact, trees, divisions, mode, evaluate, number).run()
    .graph, .meets, .shared_reads, .equal_reads, .flops, .summed

Each call is allowed by name. One that is not, on a shard, is Undivided, with the call; so is one whose result does not
have the sizes that the trees say.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import torch
from csc.kernels.collectives import ALL_REDUCE, GATHER_PIECES, SHARE
from csc.kernels.linear_cross_entropy import DIVIDED_HEAD, DIVIDED_LOSS, ROWS
from csc.passes.divided_dropout import divided_dropout
from csc.passes.fewer_sums import DIVIDED, entries_summed, fewer_sums
from csc.passes.local_stretches import stretch
from csc.passes.local_values import LocalValues, Undivided, is_parameter
from torch import fx

from csc.analysis.gradient_flow import carrying_calls
from csc.analysis.operators import table
from csc.analysis.operators.execution import draws
from csc.analysis.operators.table import (
    ATTENTION,
    CONTEXT_ATTENTION,
    FILLED,
    GROUPED,
    HEAD,
    NEW,
    PARTS,
    PRODUCTS,
    RULES,
    SAME_ON_SHARDS,
    SDPA,
    SIZED_VIEWS,
    relation_of_features,
    resized,
)
from csc.analysis.tensor_axes import Dim, Division, Trees, flat, leaves
from csc.ir import graph as g
from csc.ir.graph import Evaluation, Writer
from csc.torch_private.traces import FakeTensorMode

aten = torch.ops.aten
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
                group = self._group()
            val = node.meta["val"]
            if self.values.is_cut(node):
                self.values.check_one_axis(node)
                self.values.check_pieces(node)
                with self.mode:
                    val = torch.empty(self.values.sizes(node), dtype=val.dtype, device=val.device)
            self.mapping[node] = g.add_placeholder(self.graph, node.name, val, node.meta["role"])
        self.group = group or self._group()

    def _group(self) -> fx.Node:
        names = {node.name for node in self.old.nodes}
        name = next(name for name in ("tp", "tp_group", "_tp_group") if name not in names)
        return g.add_placeholder(self.graph, name, self.number, ("shared", name))

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
            found = stretch(self.values, node, self._given, self.keeps)
            if found is None:
                self._same(node)
            else:
                self._put(node, *found)
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
        made = self._made(node, node.name, target, *args, **kwargs)
        for result, val in enumerate(_results(made.meta["val"])):
            sizes = self.values.sizes(node, result)
            if list(val.shape) != sizes:
                raise Undivided(node, f"gives {list(val.shape)} on shards, where {sizes} was expected")
        self.mapping[node] = made

    def _made(self, node: fx.Node, name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        try:
            made = self.writer.named(name, node, target, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            said = (str(error).strip().splitlines() or [""])[0]
            raise Undivided(node, f"does not run on shards ({said})") from error
        made.meta[DIVIDED] = True
        return made

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
        if any(self.values.cut_dims(one) != [one.meta["val"].dim() - 3] for one in by_heads):
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
        added = [one for one in node.args if isinstance(one, fx.Node) and one not in (left, right) and not apart]
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
        apart = [one for one in (weight, bias) if one is not None and self.values.cut_dims(one) != [0]]
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
        found = relation_of_features(node)
        uses = [use for use in found.uses if use.node is operand] if found is not None else []
        return bool(uses) and all(use.rest.how == "unread" for use in uses)

    def _ends(self, node: fx.Node, operand: fx.Node, how: str) -> bool:
        """Whether the divided dimension of an operand ends so in a call."""
        found = relation_of_features(node)
        uses = [use for use in found.uses if use.node is operand] if found is not None else []
        return any(
            (end := use.end(dim)) is not None and end.how == how
            for use in uses
            for dim in self.values.cut_dims(operand)
        )


def _leaves(dim: Dim) -> list[int]:
    return [id(leaf) for leaf in leaves(dim)]


def _results(val: Any) -> list[torch.Tensor]:
    return list(val) if isinstance(val, (tuple, list)) else [val]
