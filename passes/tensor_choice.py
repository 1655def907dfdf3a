"""Which axes of a template tensor-parallel ranks divide.

Terms: see csc.passes.tensor_graph. An axis is a *candidate* if it is in a parameter and nothing blocks it: neither a
call that needs it whole, nor the region's edge, where values are equal on all ranks. One that would be a candidate but
for a call without a rule is *unknown*, and an error of pass `tensor`. A candidate's *worth* is the FLOPs that are
divided with it for each element that ranks then have to sum. Candidates of more worth come first; one that shares a
parameter with those before it is left out.

    chosen(template, mode, number, ranks, whole, operators, ids, replicated) -> ShardChoice
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from csc.passes.tensor_graph import ShardedGraph, Undivided
from torch import fx

from csc.analysis.tensor_axes import Dim, Division, Trees, block, contains, dimensions, fits, sharded
from csc.ir import graph as g
from csc.ir.graph import Evaluation
from csc.ir.program import Box, DividedAxis, Template
from csc.torch_private.traces import FakeTensorMode

EDGE = "it is part of what regions hand each other"
LEAST_WORTH = 64  # below, a sum takes longer than it saves
VOCABULARY = "vocabulary"  # divided for the memory it takes, whatever its sums cost; it may stay whole
POSITIONS = "positions"
# A function's own backward stands in its template as calls of its own.
OWN_BACKWARD = {"csc::incoming", "csc::own_gradient", "csc::checkpointed", "csc::with_hooks"}


@dataclass(frozen=True)
class OddAxis:
    """size: how many entries. groups: see DividedAxis. why: what does not allow that several ranks have one entry, and
    allowed: numbers of ranks with which it is allowed.
    """

    what: str
    size: int
    groups: int
    parameter: str
    why: str = ""
    allowed: tuple[int, ...] = ()

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks can have it."""
        return ranks in self.allowed if self.why else fits(self.size, self.groups, ranks)


@dataclass(frozen=True)
class ShardChoice:
    """graph: of one rank; None: the template stays as it is. boxes: of parameters that are divided, for each rank.

    shared_reads, equal_reads: whole parameters that calls on shards, and others, read. operators: of the former those
    whose gradient is summed in the graph. odd: axes that do not divide. reasons: why
    something stays whole. unknown: what could be divided but for a call without a rule, and that call.
    """

    graph: fx.Graph | None = None
    meets: bool = False
    axes: tuple[DividedAxis, ...] = ()
    boxes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    shared_reads: frozenset[str] = frozenset()
    equal_reads: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()
    odd: tuple[OddAxis, ...] = ()
    reasons: tuple[str, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()


def chosen(
    template: Template, mode: FakeTensorMode, number: torch.Tensor, ranks: int, whole: Collection[str],
    operators: Collection[str], ids: Collection[str], replicated: Collection[str],
) -> ShardChoice:  # fmt: skip
    """whole: parameters that are not to be divided. operators: those whose gradient calls in the graph add up. ids:
    tables that are made of the batch. replicated: calls that all ranks are to make of whole operands.
    """
    reads = frozenset(template.parameters)
    if any(g.op_name(node) in OWN_BACKWARD for node in g.calls(template.graph)):
        return ShardChoice(equal_reads=reads, reasons=(f"{template.name}, which has a backward of its own",))
    return _TemplateSearch(template, mode, number, ranks, operators, ids, replicated).choice(whole)


@dataclass(frozen=True)
class _Axis:
    name: str
    dim: Dim
    parameters: tuple[str, ...]
    groups: Dim | None = None  # of key heads: of the query heads that read one

    @property
    def readers(self) -> int:
        """Query heads for each key head; 1 of another axis."""
        return 1 if self.groups is None else self.groups.size

    def division(self, ranks: int) -> Division | None:
        """By so many ranks, if they can."""
        if not fits(self.dim.size, self.readers, ranks):
            return None
        return Division(self.dim, ranks, self.groups if self.dim.size % ranks else None)

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
        replicated: Collection[str],
    ) -> None:
        self.template, self.mode, self.number, self.ranks, self.operators = template, mode, number, ranks, operators
        self.trees = dimensions(template.graph, ids, replicated)
        self.evaluate = Evaluation(mode)
        self.inexact = {g.placeholders(template.graph)[i] for i in template.inexact}
        self.odd: list[OddAxis] = []
        self.whole: list[tuple[_Axis, object]] = []  # what stays so, and why
        self.unknown: list[tuple[_Axis, str]] = []

    def choice(self, whole: Collection[str]) -> ShardChoice:
        axes: list[_Axis] = []
        made: ShardedGraph | None = None
        for axis in self._by_worth([one for one in self._candidates() if not set(one.parameters) & set(whole)]):
            if self._meets(axis, axes):
                continue
            if axis.division(self.ranks) is None:
                if axis.what == VOCABULARY:
                    self.whole.append((axis, f"{axis.dim.size} words cannot be divided by {self.ranks}"))
                else:
                    self.odd.append(OddAxis(axis.what, axis.dim.size, axis.readers, axis.parameters[0]))
                continue
            try:
                made = self._divided([*axes, axis], self.ranks)
            except Undivided as error:
                self._refuse(axis, error)
                continue
            axes.append(axis)
        if made is None:
            reads = frozenset(self.template.parameters)
            return ShardChoice(
                equal_reads=reads, odd=tuple(self.odd), reasons=self._reasons({}), unknown=self._unknown({}, whole)
            )  # fmt: skip
        boxes = self._boxes(axes)
        return ShardChoice(
            graph=made.graph,
            meets=made.meets,
            axes=tuple(
                DividedAxis(axis.what, axis.dim.size, self.ranks, axis.parameters, axis.readers) for axis in axes
            ),
            boxes=boxes,
            shared_reads=frozenset(made.shared_reads),
            equal_reads=frozenset(made.equal_reads),
            operators=frozenset(self.operators),
            odd=tuple(self.odd),
            reasons=self._reasons(boxes),
            unknown=self._unknown(boxes, whole),
        )

    def _refuse(self, axis: _Axis, error: Undivided) -> None:
        """Of an axis that a call does not allow to be divided, by more ranks than it has entries or by any."""
        shared = axis.division(self.ranks) is not None and axis.dim.size < self.ranks
        allowed = tuple(ranks for ranks in range(2, self.ranks) if shared and self._allows(axis, ranks))
        if not allowed:
            self.whole.append((axis, error))
            return
        found = OddAxis(axis.what, axis.dim.size, axis.readers, axis.parameters[0], str(error), (1, *allowed))
        self.odd.append(found)

    def _allows(self, axis: _Axis, ranks: int) -> bool:
        """Whether so many ranks can divide an axis."""
        if axis.division(ranks) is None:
            return False
        try:
            self._divided([axis], ranks)
        except Undivided:
            return False
        return True

    def _divided(self, axes: Sequence[_Axis], ranks: int) -> ShardedGraph:
        divisions = [division for axis in axes if (division := axis.division(ranks)) is not None]
        return ShardedGraph(
            self.template.graph, self.inexact, self.trees, divisions, self.mode, self.evaluate, self.number,
            self.operators,
        ).run()  # fmt: skip

    def _boxes(self, axes: Sequence[_Axis]) -> dict[str, tuple[Box, ...]]:
        return {
            name: tuple(self.trees.boxes(name, division, rank) for rank in range(self.ranks))
            for axis in axes if (division := axis.division(self.ranks)) is not None for name in axis.parameters
        }  # fmt: skip

    def _reasons(self, divided: Mapping[str, object]) -> tuple[str, ...]:
        """Of parameters that could have been divided and are not."""
        return tuple(
            f"{axis.what} of {axis.parameters[0]} in {self.template.name}: {why}"
            for axis, why in self.whole if not set(axis.parameters) & divided.keys()
        )  # fmt: skip

    def _unknown(self, divided: Mapping[str, object], whole: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Of parameters that nothing else divides, nor is asked to leave whole."""
        left = [(axis, why) for axis, why in self.unknown if not set(axis.parameters) & {*divided, *whole}]
        return tuple((f"{axis.what} of {axis.parameters[0]}", why) for axis, why in left)

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
            of_matrices = any(len(self.trees.parameters[one]) > 1 for one in held)
            if held and not dim.whole:
                yield _Axis(name, dim, tuple(held), self.trees.groups(dim))
            elif of_matrices and not dim.blocked:
                self.unknown.append((_Axis(name, dim, tuple(held)), f"{dim.unknown} has no rule"))
            elif of_matrices and dim.blocked != EDGE:
                self.whole.append((_Axis(name, dim, tuple(held)), f"{dim.blocked} needs them together"))

    def _by_worth(self, candidates: Sequence[_Axis]) -> list[_Axis]:
        """Those that can be divided, by what it saves; each alone, by as many ranks as it has entries if they do not
        divide. Query heads are divided with their key heads, if these can be.
        """
        found: list[tuple[float, _Axis]] = []
        for axis in candidates:
            try:
                tried = self._divided([axis], self.ranks if axis.division(self.ranks) is not None else axis.dim.size)
            except Undivided as error:
                self._refuse(axis, error)
                continue
            if tried.flops >= LEAST_WORTH * tried.summed or axis.what == VOCABULARY:
                found.append((tried.flops / max(tried.summed, 1), axis))
        read = [axis.groups for _, axis in found]
        return [axis for _, axis in sorted(found, key=lambda one: -one[0]) if axis.dim not in read]

    def _meets(self, axis: _Axis, others: Sequence[_Axis]) -> bool:
        """Whether a parameter has the axis and another one."""
        having = [dims for dims in self.trees.parameters.values() if any(contains(dim, axis.dim) for dim in dims)]
        return any(contains(dim, other.dim) for dims in having for dim in dims for other in others)


def _block(trees: Trees, node: fx.Node) -> None:
    for dim in trees.of[node][0]:
        block(dim, EDGE)
