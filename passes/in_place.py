"""Pass `in_place`: results take the place of operands that nothing else reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from csc.analysis.operators.execution import EITHER, MAY_BE_OPERANDS, OWN, WAYS, is_view, maker
from csc.ir import graph as g
from csc.ir.program import Options, Pass, Program, Variant
from csc.ir.strides import dense
from csc.torch_private.exported import OpOverload

ALONE = WAYS.keys() | OWN  # whose result is memory that nothing else has


@dataclass(frozen=True)
class InPlacePass(Pass):
    """Mark calls that are emitted so that they write over their first operand.

    Ensures   with `fuse` nothing changes: the compiler decides it. Else the same graphs, but for the order of the
              operands of sums and products, with marks. What is written over was made in the same function, as memory
              of its own, lies as the result does, and is read by no later call, as a view or by an exchange that may
              still run either.
    Before    %d = mm(%a, %b);  %e = add(%c, %d);  %f = silu_backward(%e, %x)
    After     %d = mm(%a, %b);  %e = add(%d, %c) in place;  %f = silu_backward(%e, %x) in place
    """

    requires: ClassVar = ("split",)
    establishes: ClassVar = ("in_place",)
    breaks: ClassVar = ("unordered",)

    def __call__(self, program: Program, options: Options) -> Program:
        if options.fuse:
            return program
        return replace(program, variants={name: _of(graph) for name, graph in program.variants.items()})


def _of(variant: Variant) -> Variant:
    return replace(
        variant, forward=marked(variant.forward), backward_input=marked(variant.backward_input),
        backward_weight=marked(variant.backward_weight), backward=marked(variant.backward),
    )  # fmt: skip


def marked(graph: fx.Graph | None) -> fx.Graph | None:
    """The same one where nothing is to be marked."""
    if graph is None:
        return None
    copy, _ = g.copy_graph(graph)
    last, marked = _last_reads(copy), False
    for place, node in enumerate(copy.nodes):
        over = next(
            (operand for operand in _operands(node) if last[maker(operand)] == place and _may_go(operand, node)), None
        )
        if over is None:
            continue
        if node.args[0] is not over:
            node.args = (over, node.args[0])
        node.meta["in_place"], marked = WAYS[node.target.name()], True
    return copy if marked else graph


def _last_reads(graph: fx.Graph) -> dict[fx.Node, float]:
    """Where the memory that a call has made is read last, by itself or through a view."""
    last: dict[fx.Node, float] = {}
    for place, node in enumerate(graph.nodes):
        for used in node.all_input_nodes:
            last[maker(used)] = float("inf") if _may_keep(node) else max(last.get(maker(used), 0), place)
    return last


def _may_keep(node: fx.Node) -> bool:
    """Whether what a call reads may be read after it has returned, or be what it returns."""
    if node.target is operator.getitem or is_view(node):  # which `maker` sees through
        return False
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return True
    shares = any(result.alias_info is not None for result in node.target._schema.returns)
    return shares or g.op_name(node) in MAY_BE_OPERANDS


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Those that a call can write over."""
    if not isinstance(node.target, OpOverload) or node.kwargs or node.meta.get("in_place"):
        return
    name = node.target.name()
    if name in WAYS:
        yield from (operand for operand in node.args[: 1 + (name in EITHER)] if isinstance(operand, fx.Node))


def _may_go(operand: fx.Node, node: fx.Node) -> bool:
    """Whether the result of a call, which is the last to read this operand of it, may take its place."""
    producer = maker(operand)
    if not isinstance(producer.target, OpOverload) or producer.target.name() not in ALONE:
        return False
    operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
    if sum(maker(operand) is producer for operand in operands) > 1:
        return False
    if WAYS[node.target.name()] != g.METHOD and not _is_by_rows(node, operands):  # type: ignore[union-attr]
        return False
    return _is_all_of(operand.meta["val"], producer.meta["val"]) and _alike(operand.meta["val"], node.meta["val"])


def _is_by_rows(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Whether a call reads contiguous values, row by row: some kernels of ATen's write nothing else right. Those that
    go through a row several times have been tried on CPUs alone.
    """
    value = operands[0].meta["val"]
    last, bound = value.dim() - 1, g.bind(node)
    if "dim" in bound and (bound["dim"] not in (-1, last) or value.device.type != "cpu"):
        return False
    return all(operand.meta["val"].is_contiguous() for operand in operands)


def _is_all_of(value: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether a view reads all of some memory, each entry once."""
    static = all(isinstance(size, int) for tensor in (value, memory) for size in (*tensor.shape, *tensor.stride()))
    return static and value.numel() == memory.numel() and dense(value.shape, value.stride())


def _alike(first: torch.Tensor, other: torch.Tensor) -> bool:
    return (first.dtype, first.device, first.shape, first.stride()) == (
        other.dtype,
        other.device,
        other.shape,
        other.stride(),
    )
