"""What a program's graph asks of a batch before the step: rows of tables, classes, numbers of tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from csc.analysis.operators.table import CASTS, COPIES, EMBEDDING, LABELS, PADS, SAME_NUMBERS, SLICE
from csc.analysis.samples.propagation import without_spare
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import extract
from csc.ir.program import Program
from csc.ir.stored import record_from_tree, record_to_tree

# --- Which whole numbers of the batch have to be rows of a table, or classes -----------------------------------------
#
# Token ids go as they are into an embedding, labels into a cross entropy.


def table_limits(graph: fx.Graph) -> dict[str, tuple[str, int]]:
    """Of a graph in plain sizes or in symbols; tables whose number of rows is a symbol are left out."""
    limits: dict[str, tuple[str, int]] = {}
    for node in g.calls(graph):
        if g.op_name(node) != EMBEDDING:
            continue
        bound = g.bind(node)
        table, ids = _origin(bound["weight"], COPIES | CASTS), _origin(bound["indices"], SAME_NUMBERS)
        rows: Any = bound["weight"].meta["val"].shape[0]
        if table[0] == "parameter" and ids[0] == "input" and isinstance(rows, int):
            limits[ids[1]] = min(limits.get(ids[1], (table[1], rows)), (table[1], rows), key=lambda limit: limit[1])
    return limits


def class_limits(graph: fx.Graph) -> dict[str, tuple[int, int, int]]:
    """Of a graph in plain sizes or in symbols; entries that calls read in two ways are left out."""
    limits: dict[str, set[tuple[int, int, int]]] = {}
    for node in g.calls(graph):
        if g.op_name(node) not in LABELS:
            continue
        bound = g.bind(node)
        scores, target, ignored = bound["self"].meta["val"], bound["target"], bound["ignore_index"]
        classes: Any = scores.shape[1 if scores.dim() > 1 else 0]
        labels, first = _labels(target, ignored)
        if isinstance(classes, int) and labels and not target.meta["val"].is_floating_point():
            limits.setdefault(labels, set()).add((classes, ignored, first))
    return {name: limits.pop() for name, limits in limits.items() if len(limits) == 1}


def _labels(node: fx.Node, ignored: int) -> tuple[str, int]:
    """The batch entry whose numbers these are, from a place on its last dimension on, and perhaps ignored ones behind
    them: labels that are shifted. ("", 0) for anything else.
    """
    first = 0
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        name = g.op_name(node)
        if name == SLICE:
            bound = g.bind(node)
            last = node.meta["val"].dim() - 1
            if bound["dim"] not in (-1, last) or not _from(bound):
                return "", 0
            first += bound["start"] or 0
        elif name in PADS:
            bound = g.bind(node)
            sides = list(bound["pad"])
            if sides[0] or len(sides) > 2 or bound.get("mode", "constant") != "constant" or bound["value"] != ignored:
                return "", 0
        elif name not in SAME_NUMBERS or (first and name not in COPIES):
            return "", 0
        node = node.args[0]
    role = node.meta["role"] if node.op == "placeholder" else ("", "")
    return (role[1], first) if role[0] == "input" else ("", 0)


def _from(bound: dict[str, Any]) -> bool:
    """Whether a slice has all from its start on."""
    start, end = bound["start"] or 0, bound["end"]
    return isinstance(start, int) and start >= 0 and bound["step"] == 1 and (end is None or end == sys.maxsize)


def _origin(node: fx.Node, through: set[str]) -> tuple[str, str]:
    """The role of the placeholder that a value is; ("", "") if it is computed."""
    while node.op == "call_function" and g.op_name(node) in through and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.meta["role"] if node.op == "placeholder" else ("", "")


# --- Whether a batch is one that a program's graph can be run on, asked before the step ------------------------------
#
# A traced graph scatters rows of features to the places of a mask and cannot ask whether they are as many: with too
# few placeholders the last rows would be dropped in silence. The mask depends on the batch alone: it is asked
# beforehand.
#
# Groups of tokens (documents) that a mask compares have to stand together: that too is asked beforehand.


SMALL = 2**14  # numbers that take less to compare than to find groups among


@dataclass(frozen=True)
class Scatter:
    """graph: from the batch to the mask of placeholders, and to masks of the rows that count: none (all do), one, or
    two, without a spare row (csc.analysis.samples.propagation) and with it, which may be in a place or in none.

    shape: of what rows are scattered into; numbers: how many numbers are scattered; width: how many are in a row.
    """

    graph: fx.Graph
    shape: tuple[int, ...]
    numbers: int
    width: int
    source: str

    @cached_property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The graph as a function."""
        return _runner(self.graph)


@dataclass(frozen=True)
class MaskGroups:
    """graph: from the batch to the ranges of keys that the groups of a mask stand in. stood: a copy of what it was
    given last of which they do, if that is small.
    """

    graph: fx.Graph
    source: str
    stood: list[list[torch.Tensor]] = field(default_factory=list, init=False, compare=False)

    @cached_property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The graph as a function."""
        return _runner(self.graph)

    def check(self, given: list[torch.Tensor]) -> None:
        """InputError if groups do not stand together. Images of one size come with the same numbers in each step."""
        if any(all(map(torch.equal, given, before)) for before in self.stood):
            return
        with torch.no_grad():
            self.run(*given)
        small = all(tensor.is_cpu and tensor.numel() <= SMALL for tensor in given)
        self.stood[:] = [[tensor.clone() for tensor in given]] if small else []


@dataclass(frozen=True)
class Places:
    """All scatters of a program, the groups of its masks, and what it takes to ask a batch."""

    scatters: tuple[Scatter, ...]
    groups: tuple[MaskGroups, ...]
    constants: Mapping[str, torch.Tensor]
    device: str

    def check(self, microbatch: Mapping[str, Any], name: str) -> None:
        """InputError if a microbatch, called `name`, has another number of placeholders than rows for them, or groups
        of tokens that do not stand together.
        """
        for group in self.groups:
            try:
                group.check(_given(group, self, microbatch))
            except InputError as torn:
                raise InputError(f"{name}: {torn.what}", group.source, torn.remedy) from None
        for scatter in self.scatters:
            with torch.no_grad():
                mask, *selected = scatter.run(*_given(scatter, self, microbatch))
            places = set_in_samples(mask.expand(scatter.shape))
            # some of the rows that were put together, each as long as all are
            numbers = [scatter.numbers // mask.numel() * int(mask.sum()) for mask in selected] or [scatter.numbers]
            if sum(places) not in numbers:
                expected = numbers[0]
                by_sample = ", ".join(f"sample {i}: {count // scatter.width}" for i, count in enumerate(places))
                raise InputError(
                    f"{name} has {sum(places) // scatter.width} placeholders for {expected // scatter.width} rows of "
                    f"features ({by_sample})",
                    scatter.source,
                    "give the text one placeholder for each row that its images or sounds become; the model's "
                    "processor writes them. If the model picks tokens by their ids and an entry has a row for each, "
                    "say whose they are, divide={'entry': lambda batch: (batch['input_ids'] == token).sum(1)}; or make "
                    "their places an entry (samples, slots), and pick hidden[torch.arange(len(hidden))[:, None], "
                    "places]",
                )


KEPT = (Scatter, MaskGroups)


def places_for_features(program: Program, masked: Program) -> Places:
    """The scatters whose places, and the masks whose groups depend on the batch alone."""
    found = []
    for node in g.calls(program.graph):
        if g.op_name(node) != "aten::masked_scatter":
            continue
        tensor, places, rows = node.args
        assert isinstance(tensor, fx.Node) and isinstance(places, fx.Node) and isinstance(rows, fx.Node)
        selected = _selected(rows)
        if g.reads_parameters([places, *selected]):
            continue
        shape = tuple(tensor.meta["val"].shape)
        found.append(
            Scatter(
                graph=extract(program.graph, [places, *selected]),
                shape=shape,
                numbers=rows.meta["val"].numel(),
                width=shape[-1],
                source=g.line(node),
            )
        )
    groups = tuple(_groups(masked))
    constants = {
        name: program.constants[name]
        for part in [*(scatter.graph for scatter in found), *(group.graph for group in groups)]
        for kind, name in (node.meta["role"] for node in g.placeholders(part))
        if kind == "constant"
    }
    return Places(tuple(found), groups, constants, program.device)


def _groups(program: Program) -> Iterator[MaskGroups]:
    """Of each mask that compares groups, once for layers that compare the same."""
    seen = set()
    for node in g.calls(program.graph):
        if g.op_name(node) == "csc::group_ranges" and not g.reads_parameters([node]):
            graph = extract(program.graph, [node, None])
            form = g.canonical(graph, lambda node: node.meta["role"])
            if form not in seen:
                seen.add(form)
                yield MaskGroups(graph, g.line(node))


def _selected(rows: fx.Node) -> list[fx.Node]:
    """The mask of a selection that was put together (see csc.capture.lower.masked_index): the others stand behind."""
    if g.op_name(rows) != "aten::index_select" or g.op_name(order := rows.args[2]) != "aten::argsort":  # type: ignore[arg-type]
        return []
    negated = order.args[0]  # type: ignore[union-attr]
    if g.op_name(negated) != "aten::logical_not":  # type: ignore[arg-type]
        return []
    mask: Any = negated.args[0]  # type: ignore[union-attr]
    kept = without_spare(mask)
    return [mask] if kept is mask else [kept, mask]


def _runner(graph: fx.Graph) -> Callable[..., tuple[Any, ...]]:
    """The graph as a function of its placeholders, in their order: every step asks it."""
    return fx.GraphModule(nn.Module(), g.copy_graph(graph)[0]).forward


def _given(one: Scatter | MaskGroups, known: Places, microbatch: Mapping[str, Any]) -> list[torch.Tensor]:
    """What its graph reads."""
    tensors = []
    for node in g.placeholders(one.graph):
        kind, name = node.meta["role"]
        tensor = known.constants[name] if kind == "constant" else microbatch[name]
        tensors.append(tensor.to(known.device))
    return tensors


def set_in_samples(mask: torch.Tensor) -> list[int]:
    """How many places of each sample are set. Along a row of features a mask repeats itself: there one is looked at."""
    repeats = 1
    for dim in range(1, mask.dim()):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            repeats *= mask.shape[dim]
            mask = mask.narrow(dim, 0, 1)
    return [count * repeats for count in mask.flatten(1).sum(1).tolist()]


def to_tree(places: Places) -> tuple[Any, dict[str, torch.Tensor]]:
    """Plain JSON, and the constants. Unstorable as of csc.ir.stored."""
    return record_to_tree((places.scatters, places.groups, places.device), KEPT), dict(places.constants)


def from_tree(tree: Any, constants: Mapping[str, torch.Tensor]) -> Places:
    """The inverse."""
    scatters, groups, device = record_from_tree(tree, KEPT)
    return Places(scatters, groups, constants, device)
