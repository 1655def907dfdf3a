"""Pass `simplify`: leave out arithmetic that changes no number, and do the rest of it once for each entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import frexp
from typing import Any, ClassVar

import torch
from torch import fx

from csc.analysis.operators.table import ARITHMETIC, NEUTRAL, SCALES
from csc.ir import graph as g
from csc.ir.graph import Writer, values_of
from csc.ir.program import Options, Pass, Program, Template

aten = torch.ops.aten


@dataclass(frozen=True)
class SimplifyPass(Pass):
    """Shorten the joint graphs by identities of single entries, which keep every bit, but the sign of a zero, and what
    is infinite when it is doubled.

    Ensures   the same outputs, names and layouts; no power, product or quotient by 1; what scales an expanded value
              scales it before it is expanded, where only calls on entries read it; of an expanded value times one
              that is doubled the expanded one is doubled, before that; gradients of the two parts of a value are
              joined, and not put among zeros and added.
    Before    %a = expand(%mean, [2, 256, 512]); %b = div(%a, 512); %c = mul(pow(%x, 1.0), 2.0); %d = mul(%b, %c)
              %e = slice_backward(%low, [2, 64], 1, 0, 32); %f = slice_backward(%high, [2, 64], 1, 32, 64)
              %g = add(%e, %f)
    After     %b = mul(div(%mean, 512), 2.0); %a = expand(%b, [2, 256, 512]); %d = mul(%a, %x)
              %g = cat([%low, %high], 1)
    """

    requires: ClassVar = ("differentiated",)
    establishes: ClassVar = ("simplified",)

    def __call__(self, program: Program, options: Options) -> Program:
        return replace(program, templates={name: shorter(template) for name, template in program.templates.items()})


def shorter(template: Template) -> Template:
    """A template with a joint graph that does the same in fewer or smaller calls."""
    assert template.joint is not None
    graph, mapping = fx.Graph(), dict[fx.Node, Any]()
    kept = set(template.joint.output_node().all_input_nodes)  # a result is a tensor of its own
    for node in template.joint.nodes:
        if node.op == "placeholder":
            mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], node.meta["role"])
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], mapping.__getitem__))
        elif (same := None if node in kept else _same(graph, node, mapping)) is not None:
            mapping[node] = same
        else:
            g.copy_node(graph, node, mapping)
    g.erase_dead(graph)
    return replace(template, joint=graph)


def _same(graph: fx.Graph, node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """What gives the same as a call of the old graph, for less; None: nothing is known."""
    if g.op_name(node) == "aten::add":
        return _joined(graph, node, mapping)
    if g.op_name(node) == "aten::mul" and all(isinstance(operand, fx.Node) for operand in node.args):
        return _doubled_first(graph, node, mapping)
    operand, number = _by_number(node)
    if operand is None:
        return None
    if number == NEUTRAL[g.op_name(node)]:
        return mapping[operand] if _alike(operand.meta["val"], node.meta["val"]) else None
    if g.op_name(node) in SCALES and g.op_name(operand) == "aten::expand":
        return _scaled_first(graph, node, operand, mapping)
    return None


def _joined(graph: fx.Graph, node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The gradients of two parts that are all of a value, side by side; None for any other sum."""
    parts = [_part(operand) for operand in node.args] if len(node.args) == 2 and not node.kwargs else []
    if None in parts or len(parts) != 2:
        return None
    (low, dim, start, middle), (high, other_dim, begin, end) = sorted(filter(None, parts), key=lambda part: part[2])
    val = node.meta["val"]
    if (dim, start, middle, end) != (other_dim, 0, begin, val.shape[dim]):
        return None
    with val.fake_mode:
        again = torch.cat([low.meta["val"], high.meta["val"]], dim)
    if not _alike(again, val):
        return None
    return Writer(graph, val.fake_mode).named(node.name, node, aten.cat.default, [mapping[low], mapping[high]], dim)


def _part(node: Any) -> tuple[fx.Node, int, int, int] | None:
    """(gradient, dimension, start, end) of what puts the gradient of consecutive entries among zeros, and that one sum
    alone reads.
    """
    if not isinstance(node, fx.Node) or g.op_name(node) != "aten::slice_backward" or len(node.users) != 1:
        return None
    gradient, sizes, dim, start, end, step = node.args
    size = node.meta["val"].shape[dim]
    first, last, _ = slice(start, end).indices(size)
    return (gradient, dim % len(sizes), first, last) if step == 1 else None  # type: ignore


def _by_number(node: fx.Node) -> tuple[Any, Any]:
    """The tensor and the number of an operation that NEUTRAL knows; None where it is another call."""
    if g.op_name(node) not in NEUTRAL or len(node.args) != 2 or node.kwargs:
        return None, None
    operand, number = node.args
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return (operand, number) if is_number and isinstance(operand, fx.Node) else (None, None)


def _alike(first: torch.Tensor, other: torch.Tensor) -> bool:
    return first.dtype == other.dtype and first.shape == other.shape and first.stride() == other.stride()


def _scaled_first(
    graph: fx.Graph, node: fx.Node, expanded: fx.Node, mapping: Mapping[fx.Node, fx.Node]
) -> fx.Node | None:
    """The product of the smaller value, expanded; None if that is no smaller, or a reader would see it."""
    small, val = expanded.args[0], node.meta["val"]
    assert isinstance(small, fx.Node)
    if small.meta["val"].numel() == val.numel() or expanded.meta["val"].dtype != val.dtype:
        return None
    with val.fake_mode:  # scaled, a value that is not dense lies otherwise than before
        again = expanded.target(node.target(small.meta["val"], *node.args[1:]), *expanded.args[1:])  # type: ignore[operator]
    if not all(_is_blind(reader, node, again) for reader in node.users):
        return None
    writer = Writer(graph, val.fake_mode)
    scaled = writer.named(node.name, node, node.target, mapping[small], *node.args[1:])
    return writer.named(f"{node.name}_expand", expanded, expanded.target, scaled, *expanded.args[1:])


def _doubled_first(graph: fx.Graph, node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The product of an expanded value and one that is doubled (or made larger by another power of two) for this alone,
    as the backward of a square has it: the smaller value is doubled instead. None for any other product.
    """
    factors = [operand for operand in node.args if isinstance(operand, fx.Node)]
    for first, scaled in (factors, factors[::-1]):
        operand, number = _by_number(scaled)
        expanded = mapping[first]  # as it is now: an earlier step may have put a scale before it
        if operand is None or g.op_name(expanded) != "aten::expand" or not _is_power_of_two(scaled, number):
            continue
        small, val = expanded.args[0], node.meta["val"]
        assert isinstance(small, fx.Node)
        alike = _alike(operand.meta["val"], scaled.meta["val"]) and small.meta["val"].dtype == val.dtype
        if not alike or len(scaled.users) != 1 or small.meta["val"].numel() == val.numel():
            continue
        if val.dtype is torch.float16:  # of whose range gradients may take all, where losses are scaled
            continue
        writer = Writer(graph, val.fake_mode)
        doubled = writer.named(scaled.name, scaled, scaled.target, small, number)
        again = writer.named(f"{scaled.name}_expand", expanded, expanded.target, doubled, *expanded.args[1:])
        operands = (again if factor is first else mapping[operand] for factor in factors)
        doubled_product = writer.named(node.name, node, node.target, *operands)
        if _alike(doubled_product.meta["val"], val):  # what is not dense lies otherwise once it is scaled
            return doubled_product
    return None


def _is_power_of_two(scaled: fx.Node, number: float) -> bool:
    """Of a product by a number, which then shifts exponents alone, unless it is out of range."""
    return g.op_name(scaled) == "aten::mul" and number > 1 and frexp(number)[0] == 0.5


def _is_blind(reader: fx.Node, old: fx.Node, value: torch.Tensor) -> bool:
    """Whether a call gives the same for this expanded value in the place of another one, laid out as before."""
    if g.op_name(reader) not in ARITHMETIC:
        return False
    arguments = fx.map_arg(reader.args, lambda operand: value if operand is old else operand.meta["val"])
    val = reader.meta["val"]
    with val.fake_mode:
        result = reader.target(*arguments, **values_of(reader.kwargs))  # type: ignore[operator]
    return _alike(result, val)
