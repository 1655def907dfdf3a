"""Which axes of a template tensor-parallel ranks divide.

Terms: see csc.passes.tensor_graph. An axis is a *candidate* if it is in a parameter and nothing blocks it: neither a
call that needs it whole, nor the region's edge, where values are equal on all ranks. Its *worth* is the FLOPs that are
divided with it for each element that ranks then have to sum. Candidates of more worth come first; one that shares a
parameter with those before it is left out.

    chosen(template, mode, number, ranks, whole, operators, ids) -> ShardChoice
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from csc.passes.tensor_graph import ShardedGraph, Undivided
from torch import fx

from csc.analysis.dimension_trees import Dim, block, contains
from csc.analysis.tensor_axes import Trees, dimensions, sharded
from csc.ir import graph as g
from csc.ir.fake_evaluation import Evaluation
from csc.ir.program import Box, DividedAxis, Template
from csc.torch_private.traces import FakeTensorMode

EDGE = "it is part of what regions hand each other"
LEAST_WORTH = 64  # below, a sum takes longer than it saves
VOCABULARY = "vocabulary"  # divided for the memory it takes, whatever its sums cost; it may stay whole
POSITIONS = "positions"
# A function's own backward stands in its template as calls of its own.
OWN_BACKWARD = {"csc::incoming", "csc::own_gradient", "csc::checkpointed", "csc::with_hooks"}


@dataclass(frozen=True)
class ShardChoice:
    """graph: of one rank; None: the template stays as it is. boxes: of parameters that are divided, for each rank.

    shared_reads, equal_reads: whole parameters that calls on shards, and others, read. operators: of the former those
    whose gradient is summed in the graph. odd: (what, how many, a parameter) of axes that do not divide. reasons: why
    something stays whole.
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
    operators: Collection[str], ids: Collection[str],
) -> ShardChoice:  # fmt: skip
    """whole: parameters that are not to be divided. operators: those whose gradient calls in the graph add up. ids:
    tables that are made of the batch.
    """
    reads = frozenset(template.parameters)
    if any(g.op_name(node) in OWN_BACKWARD for node in g.calls(template.graph)):
        return ShardChoice(equal_reads=reads, reasons=(f"{template.name}, which has a backward of its own",))
    return _TemplateSearch(template, mode, number, ranks, operators, ids).choice(whole)


@dataclass(frozen=True)
class _Axis:
    name: str
    dim: Dim
    parameters: tuple[str, ...]

    @property
    def what(self) -> str:
        """`heads`, `vocabulary`; of an axis that is called after a parameter `features`."""
        return "features" if "." in self.name else self.name.split("#")[0]


class _TemplateSearch:
    """For one template."""

    def __init__(
        self,
        template: Template,
        mode: FakeTensorMode,
        number: torch.Tensor,
        ranks: int,
        operators: Collection[str],
        ids: Collection[str],
    ) -> None:
        self.template, self.mode, self.number, self.ranks, self.operators = template, mode, number, ranks, operators
        self.trees = dimensions(template.graph, ids)
        self.evaluate = Evaluation(mode)
        self.inexact = {g.placeholders(template.graph)[i] for i in template.inexact}
        self.odd: list[_Axis] = []
        self.whole: list[tuple[_Axis, object]] = []  # what stays so, and why

    def choice(self, whole: Collection[str]) -> ShardChoice:
        axes: list[_Axis] = []
        made: ShardedGraph | None = None
        for axis in self._by_worth([one for one in self._candidates() if not set(one.parameters) & set(whole)]):
            if self._meets(axis, axes):
                continue
            if axis.dim.size % self.ranks:
                if axis.what == VOCABULARY:
                    self.whole.append((axis, f"{axis.dim.size} words cannot be divided by {self.ranks}"))
                else:
                    self.odd.append(axis)
                continue
            try:
                made = self._divided([*axes, axis], self.ranks)
            except Undivided as error:
                self.whole.append((axis, error))
                continue
            axes.append(axis)
        odd = tuple((axis.what, axis.dim.size, axis.parameters[0]) for axis in self.odd)
        if made is None:
            reads = frozenset(self.template.parameters)
            return ShardChoice(equal_reads=reads, odd=odd, reasons=self._reasons({}))
        boxes = _boxes(self.trees, axes, self.ranks)
        return ShardChoice(
            graph=made.graph,
            meets=made.meets,
            axes=tuple(DividedAxis(axis.what, axis.dim.size, self.ranks, axis.parameters) for axis in axes),
            boxes=boxes,
            shared_reads=frozenset(made.shared_reads),
            equal_reads=frozenset(made.equal_reads),
            operators=frozenset(self.operators),
            odd=odd,
            reasons=self._reasons(boxes),
        )

    def _divided(self, axes: Sequence[_Axis], ranks: int) -> ShardedGraph:
        return ShardedGraph(
            self.template.graph, self.inexact, self.trees, [axis.dim for axis in axes], ranks, self.mode, self.evaluate,
            self.number, self.operators,
        ).run()  # fmt: skip

    def _reasons(self, divided: Mapping[str, object]) -> tuple[str, ...]:
        """Of parameters that could have been divided and are not."""
        return tuple(
            f"{axis.what} of {axis.parameters[0]} in {self.template.name}: {why}"
            for axis, why in self.whole if not set(axis.parameters) & divided.keys()
        )  # fmt: skip

    def _candidates(self) -> Iterator[_Axis]:
        for node in g.placeholders(self.template.graph):
            if node.meta["role"][0] != "parameter":
                _block(self.trees, node)
        for node in g.outputs(self.template.graph):
            _block(self.trees, node)
        for name, dim in self.trees.axes().items():
            held = sharded(self.trees, dim)
            if name.startswith(POSITIONS):
                continue
            if held and not dim.blocked:
                yield _Axis(name, dim, tuple(held))
            elif dim.blocked != EDGE and any(len(self.trees.parameters[one]) > 1 for one in held):
                self.whole.append((_Axis(name, dim, tuple(held)), f"{dim.blocked} needs them together"))

    def _by_worth(self, candidates: Sequence[_Axis]) -> list[_Axis]:
        """Those that can be divided, by what it saves; each alone, by as many ranks as it has entries if they do not
        divide.
        """
        found = []
        for axis in candidates:
            try:
                tried = self._divided([axis], self.ranks if axis.dim.size % self.ranks == 0 else axis.dim.size)
            except Undivided as error:
                self.whole.append((axis, error))
                continue
            if tried.flops >= LEAST_WORTH * tried.summed or axis.what == VOCABULARY:
                found.append((tried.flops / max(tried.summed, 1), axis))
        return [axis for _, axis in sorted(found, key=lambda one: -one[0])]

    def _meets(self, axis: _Axis, others: Sequence[_Axis]) -> bool:
        """Whether a parameter has the axis and another one."""
        having = [dims for dims in self.trees.parameters.values() if any(contains(dim, axis.dim) for dim in dims)]
        return any(contains(dim, other.dim) for dims in having for dim in dims for other in others)


def _block(trees: Trees, node: fx.Node) -> None:
    for dim in trees.of[node][0]:
        block(dim, EDGE)


def _boxes(trees: Trees, axes: Sequence[_Axis], ranks: int) -> dict[str, tuple[Box, ...]]:
    return {
        name: tuple(trees.boxes(name, axis.dim, rank, ranks) for rank in range(ranks))
        for axis in axes for name in axis.parameters
    }  # fmt: skip
