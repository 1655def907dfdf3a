"""Pass `head`: a large head and its cross entropy as one operator that walks over the tokens in chunks.

Terms
  head     the linear layer that makes the logits, and what bends or scales them before the loss
  logits   what it makes: tokens x classes, the largest value of most steps, held three times by a backward
  large    with logits that take more than twice the room for those of a chunk (csc.kernels.linear_cross_entropy)
  small    with logits of less than FASTER bytes, or of fewer tokens than the layer is wide: the gradient of its weight,
           which F keeps, would take more than their logits
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from csc.kernels.linear_cross_entropy import HEAD, room_on, rows_of, wide
from torch import fx

from csc.analysis.operators.table import RESHAPES
from csc.analysis.samples.rules import MEAN
from csc.ir import graph as g
from csc.ir.graph import Writer, replace_call
from csc.ir.program import Options, Pass, Program

aten = torch.ops.aten
SUM = 2
LARGE = 2  # rooms
FASTER = 2**21  # bytes of logits from which the operator takes less time than what Inductor makes (docs/fusing.md)
PRODUCTS = frozenset({"aten::linear", "aten::matmul"})
DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # float16 has too little room for gradients not yet scaled


@dataclass(frozen=True)
class HeadPass(Pass):
    """Put one operator for the linear layer, the scale, the soft cap, the casts, the shift and the loss.

    Ensures   logits that nothing but one cross entropy reads are no value of the graph if they are large, with `fuse`
              on a CPU unless they are small, and if options.loss_chunk says how many tokens a chunk has; with 0,
              and everywhere else, nothing changes. With tp > 1 large is what a rank has of the logits.
    Before    %logits = aten.linear(%x, %w);  %loss = aten.cross_entropy_loss(aten.view(%logits), %labels)
    After     %results = csc.linear_cross_entropy(%x, %w, None, %labels, ..);  %loss = %results[0]
    """

    requires: ClassVar = ("captured", "weighed")
    establishes: ClassVar = ("head",)

    loss_chunk: int | None = None

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        if options.loss_chunk == 0:
            return program
        graph, _ = g.copy_graph(program.graph)
        g.erase_dead(graph)
        writer = Writer(graph, program.fake_mode)
        changed = False
        for node in g.calls(graph):
            matches = _found(node)
            rows = 0 if matches is None else _rows(matches, options)
            if matches is not None and rows:
                _write(matches, rows, writer)
                changed = True
        if not changed:
            return program
        g.erase_dead(graph)
        return replace(program, graph=graph)


@dataclass
class _Head:
    """A loss and what leads to it, read from its end; logits are softcap * tanh(scale / softcap * product) where there
    is a soft cap. moved: what chooses among tokens behind the product, in order of execution.
    """

    loss: fx.Node
    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    labels: fx.Node
    ignored: int
    mean: bool
    scale: float = 1.0
    softcap: float = 0.0
    moved: list[fx.Node] = field(default_factory=list)


def _rows(match: _Head, options: Options) -> int:
    """Tokens of a chunk; 0 if the logits are to stay whole, since their bits are eager's then."""
    if options.loss_chunk is not None:
        return options.loss_chunk
    weight, tokens, mesh = match.weight.meta["val"], match.labels.meta["val"].numel(), options.mesh
    classes, width = weight.shape
    fewer = mesh.own("tp") or mesh.wide  # divide the head, or none
    divided = classes % mesh.tp == 0 and not fewer
    ranks = mesh.tp if divided else 1
    logits = tokens * classes // ranks * wide(weight.dtype).itemsize
    large = logits > LARGE * room_on(weight.device)
    small = logits < FASTER or tokens < width
    fused = options.fuse and weight.device.type == "cpu"
    return rows_of(weight, ranks) if large or (fused and not small) else 0


def _found(node: fx.Node) -> _Head | None:
    """The head of a loss that is a mean or sum over integer labels, all classes alike; None for any other call."""
    if g.op_name(node) != "aten::cross_entropy_loss":
        return None
    bound = g.bind(node)
    logits, labels, reduction = bound["self"], bound["target"], bound["reduction"]
    plain = bound.get("weight") is None and not bound["label_smoothing"] and reduction in (MEAN, SUM)
    if not plain or logits.meta["val"].dim() != 2 or labels.meta["val"].dtype is not torch.int64:
        return None
    trail = _Trail(int(logits.meta["val"].shape[1]))
    product = trail.back(logits)
    if product is None or product.meta["val"].dtype not in DTYPES:
        return None
    operands = _operands(product)
    if operands is None or trail.wide not in (None, wide(product.meta["val"].dtype)):
        return None
    return _Head(
        node, product, *operands, labels, int(bound["ignore_index"]), reduction == MEAN, trail.scale, trail.softcap,
        trail.moved[::-1],
    )  # fmt: skip


class _Trail:
    """Walks from the logits that a loss reads back to the product that they are; collects what lies between."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.scale = 1.0
        self.softcap = 0.0
        self.wide: torch.dtype | None = None  # that logits are raised to
        self.moved: list[fx.Node] = []
        self._after = 1.0  # factors behind what has been met of a soft cap

    def back(self, node: Any) -> fx.Node | None:
        """The product; None if there is none, or if anything else reads what is made of it."""
        while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
            if g.op_name(node) in PRODUCTS:
                return node
            step = STEPS.get(g.op_name(node))
            if step is None or not step(self, node):
                return None
            node = node.args[0]
        return None

    def cast(self, node: fx.Node) -> bool:
        """Up, once."""
        before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
        if before is not after and (self.wide is not None or after not in (torch.float32, torch.float64)):
            return False
        self.wide = after if before is not after else self.wide
        return True

    def move(self, node: fx.Node) -> bool:
        """A view or copy that leaves the logits of a token together, or a choice among tokens."""
        shapes = [tensor.meta["val"].shape for tensor in (node, node.args[0])]  # type: ignore[union-attr]
        if any(not shape or shape[-1] != self.classes for shape in shapes):
            return False
        bound = g.bind(node)
        if g.op_name(node) == "aten::slice" and bound["dim"] % len(shapes[0]) == len(shapes[0]) - 1:
            return False
        self.moved.append(node)
        return True

    def factor(self, node: fx.Node) -> bool:
        """A product with a number, or a quotient by one."""
        by = node.args[1]
        if not isinstance(by, (int, float)) or not by or g.bind(node).get("rounding_mode") is not None:
            return False
        self.scale *= by if g.op_name(node) == "aten::mul" else 1 / by
        return True

    def bend(self, node: fx.Node) -> bool:
        """A tanh, whose product with a number is a soft cap; `scale` is then that behind the tanh."""
        if self.softcap or self.scale <= 0:
            return False
        self.softcap = self.scale
        return True


STEPS: dict[str, Callable[[_Trail, fx.Node], bool]] = {
    "aten::_to_copy": _Trail.cast,
    **dict.fromkeys((*RESHAPES, "aten::slice", "aten::clone", "aten::contiguous"), _Trail.move),
    "aten::mul": _Trail.factor, "aten::div": _Trail.factor,
    "aten::tanh": _Trail.bend,
}  # fmt: skip


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """(x, weight, bias) of x @ weight.T + bias."""
    x, other = product.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(other, fx.Node) or x.meta["val"].dim() < 2:
        return None
    if g.op_name(product) == "aten::linear":
        bias = g.bind(product)["bias"]
        return (x, other, bias) if other.meta["val"].dim() == 2 else None
    turned = g.op_name(other) == "aten::t" or (
        g.op_name(other) == "aten::transpose" and {int(dim) % 2 for dim in other.args[1:3]} == {0, 1}  # type: ignore[arg-type]
    )
    weight = other.args[0] if turned else None
    return (x, weight, None) if isinstance(weight, fx.Node) and weight.meta["val"].dim() == 2 else None


def _write(match: _Head, rows: int, writer: Writer) -> None:
    """Put the operator in place of the loss, as code of the module that makes the logits."""
    loss, like = match.loss, match.product
    dtype = loss.meta["val"].dtype
    with writer.graph.inserting_before(loss):
        x = _tokens(match, writer)
        results = writer.call(
            like, HEAD, x, match.weight, match.bias, match.labels, match.scale, match.softcap, match.ignored,
            match.mean, rows, [True, True, True, match.bias is not None],
        )  # fmt: skip
        value = writer.call(like, operator.getitem, results, 0)
        if value.meta["val"].dtype is not dtype:
            value = writer.call(loss, aten._to_copy.default, value, dtype=dtype)
    replace_call(loss, value)


def _tokens(match: _Head, writer: Writer) -> fx.Node:
    """x of the tokens that have labels, in their order: what chose among logits chooses among them."""
    x = match.x
    if not any(g.op_name(node) == "aten::slice" for node in match.moved):
        return x  # the operator takes tokens in any leading dimensions
    width = x.meta["val"].shape[-1]
    for node in match.moved:
        if g.op_name(node) == "aten::slice":
            x = writer.call(node, node.target, x, *node.args[1:], **node.kwargs)
        elif g.op_name(node) in RESHAPES:
            x = writer.call(node, aten.reshape.default, x, [*node.meta["val"].shape[:-1], width])
    return x
