"""Losses over spread tokens: each rank sums over its own, so that what it has is a part of the whole loss.

Terms
  part     a value that the ranks have terms of a sum of; whatever is made of it must be linear
  equal    a value that all of them have alike: where it is added to a part, each adds its share of it

    sums = TokenSums(spread)
    sums.made(node, place) -> fx.Node or None    what a call becomes that sums over tokens, or reads a part
    sums.parts                                   calls of the old graph that have become parts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from csc.passes.loss_terms import counted_labels
from torch import fx

from csc.analysis.operators.table import ELEMENTS, LABELS, is_linear
from csc.analysis.tokens import Place, TokenOrder
from csc.errors import InputError
from csc.ir import graph as g

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # values of ATen's `reduction` argument
NOT_LINEAR = "does more than add up or scale what was summed over tokens"
JOINED = "sums tokens that do not stand in their order"


class SpreadTokens(Protocol):
    """What csc.passes.sharding.Spreading knows."""

    dims: Callable[[fx.Node], tuple[int, ...]]
    local: Collection[fx.Node]
    mapping: dict[fx.Node, Any]
    own: dict[str, fx.Node]
    order: TokenOrder
    ranks: int

    def given(self, node: Any, place: Place) -> Any: ...

    def call(self, like: fx.Node, target: Any, /, *arguments: Any, **keywords: Any) -> fx.Node: ...

    def named(self, name: str, like: fx.Node, target: Any, /, *arguments: Any) -> fx.Node: ...

    def mixed(self, node: fx.Node, why: str) -> InputError: ...


@dataclass
class TokenSums:
    """See the module."""

    spread: SpreadTokens
    parts: set[fx.Node] = field(default_factory=set)

    def made(self, node: fx.Node, place: Place | None) -> fx.Node | None:
        """InputError for what is not linear in a part."""
        name = g.op_name(node)
        if any(used in self.parts for used in node.all_input_nodes):
            found = self._linear(node, name)
        elif place is None:
            return None
        elif name in LABELS and not node.meta["val"].dim():
            found = self._loss(node, place)
        elif name in ELEMENTS and not node.meta["val"].dim():
            found = self._of_elements(node, place)
        elif name in ("aten::sum", "aten::mean") and self._reduces(node):
            bound = g.bind(node)
            shard = self.spread.given(bound["self"], place)
            found = self._sum(node, place, bound["self"], shard, name == "aten::mean")
        else:
            return None
        self.parts.add(node)
        return found

    def _loss(self, node: fx.Node, place: Place) -> fx.Node:
        """Over labels: those of slots without a token are ignored. A mean is a sum over the labels of all ranks."""
        bound = g.bind(node)
        target, weight, ignored = bound["target"], bound.get("weight"), int(bound["ignore_index"])
        if target.meta["val"].dtype is not torch.int64:
            raise self.spread.mixed(node, "is a loss over probabilities")
        if target in self.spread.local:  # in slots without a token it would be some label
            raise self.spread.mixed(node, "is a loss over labels that the model computes")
        logits, labels = (self.spread.given(one, place) for one in (bound["self"], target))
        classes = self.spread.mapping[weight] if isinstance(weight, fx.Node) else None
        rest = [bound["label_smoothing"]] if "label_smoothing" in bound else []
        summed = (logits, labels, classes, SUM, ignored, *rest)
        if bound["reduction"] != MEAN:
            return self.spread.named(node.name, node, node.target, *summed)
        total = self.spread.named(f"{node.name}_sum", node, node.target, *summed)

        def call(target: Any, *arguments: Any) -> fx.Node:
            return self.spread.call(node, target, *arguments)

        count = counted_labels(call, self.spread.mapping[target], ignored, classes)
        return self.spread.named(node.name, node, aten.div.Tensor, total, count)

    def _reduces(self, node: fx.Node) -> bool:
        """Whether a sum or mean runs over tokens."""
        bound = g.bind(node)
        dims, rank = bound.get("dim"), bound["self"].meta["val"].dim()
        along = range(rank) if dims is None or dims == [] else [dim % rank for dim in dims]
        return any(dim in along for dim in self.spread.dims(bound["self"]))

    def _of_elements(self, node: fx.Node, place: Place) -> fx.Node:
        """A loss entry by entry, of operands that are as large as each other."""
        bound = g.bind(node)
        value = next(one for one in node.all_input_nodes if self.spread.dims(one))
        if any(one.meta["val"].shape != value.meta["val"].shape for one in node.all_input_nodes):
            raise self.spread.mixed(node, "broadcasts its operands")
        arguments = {name: fx.map_arg(one, lambda used: self.spread.given(used, place)) for name, one in bound.items()}
        each = self.spread.call(node, node.target, **{**arguments, "reduction": NONE})
        return self._sum(node, place, value, each, bound["reduction"] == MEAN)

    def _sum(self, node: fx.Node, place: Place, value: fx.Node, shard: fx.Node, mean: bool) -> fx.Node:
        """Slots without a token, or with one outside the place, count nothing. value: of the old graph, with the sizes
        of what is summed; shard: what is.
        """
        bound, own, call = g.bind(node), self.spread.own, self.spread.call
        dims, shape, length = self.spread.dims(value), value.meta["val"].shape, place[1] - place[0]
        step = self.spread.order.step(value, place)
        if len(dims) != 1 or step is None or shape[dims[0]] % (length * step):
            raise self.spread.mixed(node, JOINED)
        there = own["real"]
        for test, edge in ((aten.ge.Scalar, place[0]), (aten.lt.Scalar, place[1])):
            there = call(node, aten.logical_and.default, there, call(node, test, own["tokens"], edge))
        none = call(node, aten.logical_not.default, there)
        several = shape[dims[0]] // length
        if several > 1:  # samples, and neighbours that belong to one token
            none = call(node, aten.view.default, none, [1, -1, 1])
            none = call(node, aten.expand.default, none, [several // step, -1, step])
            none = call(node, aten.reshape.default, none, [-1])
        none = call(node, aten.view.default, none, [-1 if d == dims[0] else 1 for d in range(len(shape))])
        kept = call(node, aten.masked_fill.Scalar, shard, none, 0)
        dtype = {"dtype": bound["dtype"]} if bound.get("dtype") is not None else {}
        along, keepdim = bound.get("dim") or [], bound.get("keepdim", False)
        every = not along
        target, rest = (aten.sum.default, ()) if every else (aten.sum.dim_IntList, (along, keepdim))
        total = call(node, target, kept, *rest, **dtype)
        if not mean:
            return total
        sizes = shape if every else [shape[dim] for dim in along]
        return call(node, aten.div.Tensor, total, math.prod(sizes))

    def _linear(self, node: fx.Node, name: str) -> fx.Node:
        """A call that reads a part, or several."""
        bound = g.bind(node)
        if name in ("aten::add", "aten::sub", "aten::rsub"):
            terms = [self._term(node, bound[which]) for which in ("self", "other")]
            return self.spread.call(
                node, node.target, *terms, **({"alpha": bound["alpha"]} if bound["alpha"] != 1 else {})
            )
        if name == "aten::stack":
            terms = [self._term(node, one) for one in bound["tensors"]]
            return self.spread.call(node, node.target, terms, bound["dim"])
        if name in ("aten::mul", "aten::div"):
            one, other = bound["self"], bound["other"]
            scaled = (one in self.parts) + (other in self.parts)
            if scaled > 1 or (name == "aten::div" and other in self.parts) or bound.get("rounding_mode") is not None:
                raise self.spread.mixed(node, NOT_LINEAR)
        elif (
            not (is_linear(node) or name in ("aten::sum", "aten::mean", "aten::_to_copy"))
            or len(node.all_input_nodes) > 1
        ):
            raise self.spread.mixed(node, NOT_LINEAR)
        if any(self.spread.dims(used) for used in node.all_input_nodes):
            raise self.spread.mixed(node, NOT_LINEAR)
        arguments, keywords = fx.map_arg((node.args, node.kwargs), self.spread.mapping.__getitem__)
        return self.spread.call(node, node.target, *arguments, **keywords)

    def _term(self, node: fx.Node, value: Any) -> Any:
        """A part, or a rank's share of what is equal."""
        if value in self.parts:
            return self.spread.mapping[value]
        if not isinstance(value, fx.Node):
            return value / self.spread.ranks
        if self.spread.dims(value):
            raise self.spread.mixed(node, NOT_LINEAR)
        return self.spread.call(node, aten.div.Tensor, self.spread.mapping[value], self.spread.ranks)
