"""Which axes of a template tensor-parallel ranks divide.

Terms: see csc.passes.tensor_graph. An axis is a *candidate* if it is in a parameter and nothing blocks it: neither a
call that needs it whole, nor the region's edge, where values are equal on all ranks. Those in more elements of
parameters come first; one that does not go together with those before it is left out.

    chosen(template, mode, number, ranks, whole, operators) -> Choice
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from csc.passes.tensor_graph import Divided, Undivided
from torch import fx

from csc.analysis.dimension_trees import Dim, block, contains
from csc.analysis.tensor_axes import Trees, dimensions, sharded
from csc.ir import graph as g
from csc.ir.program import Box, DividedAxis, Template
from csc.torch_private import FakeTensorMode

EDGE = "it is part of what regions hand each other"
WORTH = 64  # FLOPs for each element that is summed between ranks, below which the sum takes longer than it saves
UNNEEDED = ("vocabulary", "positions")  # axes that may stay whole if they do not divide
# A function's own backward stands in its template as calls of its own.
OWN_BACKWARD = {"csc::incoming", "csc::own_gradient", "csc::checkpointed", "csc::with_hooks"}


@dataclass(frozen=True)
class Choice:
    """graph: of one rank; None: the template stays as it is. boxes: of parameters that are divided, for each rank.

    shared_reads, equal_reads: whole parameters that calls on shards, and others, read. operators: of the former those
    whose gradient is summed in the graph. odd: (name, size, a parameter) of axes that do not divide. reasons: why
    heads, or what else takes most of the work, stay whole.
    """

    graph: fx.Graph | None = None
    meets: bool = False
    axes: tuple[DividedAxis, ...] = ()
    boxes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    shared_reads: frozenset[str] = frozenset()
    equal_reads: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()
    odd: tuple[tuple[str, int, str], ...] = ()
    reasons: tuple[str, ...] = ()


def chosen(
    template: Template, mode: FakeTensorMode, number: torch.Tensor, ranks: int, whole: Collection[str],
    operators: Collection[str],
) -> Choice:  # fmt: skip
    """whole: parameters that are not to be divided. operators: those whose gradient calls in the graph add up."""
    reads = frozenset(template.parameters)
    if any(g.op_name(node) in OWN_BACKWARD for node in g.calls(template.graph)):
        return Choice(equal_reads=reads, reasons=(f"{template.name}, which has a backward of its own",))
    trees = dimensions(template.graph)
    named = _candidates(template, trees, whole)
    axes: list[tuple[str, Dim]] = []
    odd: list[tuple[str, int, str]] = []
    reasons: list[str] = []
    made: Divided | None = None
    inexact = {g.placeholders(template.graph)[i] for i in template.inexact}
    for name, axis in named:
        if _meet(trees, axis, [one for _, one in axes]):
            continue
        if axis.size % ranks:
            if name == "heads" or (axis.size > ranks and name not in UNNEEDED):
                odd.append((_plural(name), axis.size, sharded(trees, axis)[0]))
            continue
        try:
            tried = Divided(
                template.graph, inexact, trees, [*(one for _, one in axes), axis], ranks, mode, number, operators
            ).run()
        except Undivided as error:
            reasons.append(f"{_plural(name)} of {sharded(trees, axis)[0]} in {template.name}: {error}")
            continue
        before = (made.flops, made.summed) if made is not None else (0, 0)
        if tried.flops - before[0] >= WORTH * (tried.summed - before[1]):
            made, axes = tried, [*axes, (name, axis)]
    if made is None:
        return Choice(equal_reads=reads, odd=tuple(odd), reasons=tuple(reasons))
    return Choice(
        graph=made.graph,
        meets=made.meets,
        axes=tuple(DividedAxis(_plural(name), axis.size, ranks, tuple(sharded(trees, axis))) for name, axis in axes),
        boxes=_boxes(trees, [axis for _, axis in axes], ranks),
        shared_reads=frozenset(made.shared_reads),
        equal_reads=frozenset(made.equal_reads),
        operators=frozenset(operators),
        odd=tuple(odd),
        reasons=tuple(reasons),
    )


def _candidates(template: Template, trees: Trees, whole: Collection[str]) -> list[tuple[str, Dim]]:
    """By name, those in most elements first."""
    for node in g.placeholders(template.graph):
        if node.meta["role"][0] != "parameter":
            for dim in trees.of[node][0]:
                block(dim, EDGE)
    for node in g.outputs(template.graph):
        for dim in trees.of[node][0]:
            block(dim, EDGE)
    sizes = {node.meta["role"][1]: node.meta["val"].numel() for node in g.placeholders(template.graph)}
    found = []
    for name, axis in trees.axes().items():
        held = sharded(trees, axis)
        if not axis.blocked and held and not set(held) & set(whole):
            found.append((sum(sizes[one] for one in held), name, axis))
    return [(name, axis) for _, name, axis in sorted(found, key=lambda item: -item[0])]


def _meet(trees: Trees, axis: Dim, others: Sequence[Dim]) -> bool:
    """Whether a parameter has the axis and another one."""
    return any(
        any(contains(dim, axis) for dim in dims) and any(contains(dim, other) for dim in dims for other in others)
        for dims in trees.parameters.values()
    )


def _boxes(trees: Trees, axes: Sequence[Dim], ranks: int) -> dict[str, tuple[Box, ...]]:
    return {
        name: tuple(trees.boxes(name, axis, rank, ranks) for rank in range(ranks))
        for axis in axes for name in sharded(trees, axis)
    }  # fmt: skip


def _plural(name: str) -> str:
    """`heads`, `vocabulary`; of an axis that is called after a parameter `features`."""
    return "features" if "." in name else name.split("#")[0]
