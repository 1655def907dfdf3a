"""Whether a batch has as many placeholders as there are features to put in their places.

A traced graph scatters rows of features to the places of a mask and cannot ask whether they are as many: with too few
placeholders the last rows would be dropped in silence. The mask depends on the batch alone: it is asked beforehand.

    places_for_features(program) -> Places            program: with concrete sizes (after pass `shapes`)
    places.check(microbatch, name)                    InputError that counts placeholders sample by sample
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Program


@dataclass(frozen=True)
class Scatter:
    """calls: what makes the masks, in order. places: the mask of placeholders; shape: of what rows are scattered into.

    numbers: how many numbers are scattered; selected: the mask of the rows that count, where some do not; width: how
    many numbers are in a row.
    """

    calls: tuple[fx.Node, ...]
    places: fx.Node
    shape: tuple[int, ...]
    numbers: int
    selected: fx.Node | None
    width: int
    source: str


@dataclass(frozen=True)
class Places:
    """All scatters of a program, and what it takes to ask a batch."""

    scatters: tuple[Scatter, ...]
    constants: Mapping[str, torch.Tensor]
    device: str

    def check(self, microbatch: Mapping[str, Any], name: str) -> None:
        """InputError if a microbatch, called `name`, has another number of placeholders than rows for them."""
        for scatter in self.scatters:
            values = _evaluated(scatter, self, microbatch)
            places = values[scatter.places].expand(scatter.shape).flatten(1).sum(1).tolist()
            expected = scatter.numbers
            if scatter.selected is not None:
                expected = int(values[scatter.selected].sum()) * scatter.width
            if sum(places) != expected:
                by_sample = ", ".join(f"sample {i}: {count // scatter.width}" for i, count in enumerate(places))
                raise InputError(
                    f"{name} has {sum(places) // scatter.width} placeholders for {expected // scatter.width} rows of "
                    f"features ({by_sample})",
                    scatter.source,
                    "give the text one placeholder for each row that its images or sounds become; the model's "
                    "processor writes them",
                )


def places_for_features(program: Program) -> Places:
    """The scatters whose places depend on the batch alone."""
    found = []
    for node in g.calls(program.graph):
        if g.op_name(node) != "aten::masked_scatter":
            continue
        whole, places, rows = node.args
        assert isinstance(whole, fx.Node) and isinstance(places, fx.Node) and isinstance(rows, fx.Node)
        selected = _selected(rows)
        needed = g.ancestors([places] + ([selected] if selected is not None else []))
        if any(one.op == "placeholder" and one.meta["role"][0] == "parameter" for one in needed):
            continue
        shape = tuple(whole.meta["val"].shape)
        found.append(
            Scatter(
                calls=tuple(g.subgraph_nodes(program.graph, needed)),
                places=places,
                shape=shape,
                numbers=rows.meta["val"].numel(),
                selected=selected,
                width=shape[-1],
                source=node.meta.get("source") or node.meta.get("module") or "model",
            )
        )
    return Places(tuple(found), program.constants, program.device)


def _selected(rows: fx.Node) -> fx.Node | None:
    """The mask of a selection that was put together (see csc.capture.selection): the others stand behind."""
    if g.op_name(rows) != "aten::index_select" or g.op_name(order := rows.args[2]) != "aten::argsort":  # type: ignore[arg-type]
        return None
    others = order.args[0]  # type: ignore[union-attr]
    return others.args[0] if g.op_name(others) == "aten::logical_not" else None  # type: ignore[arg-type, union-attr, return-value]


def _evaluated(scatter: Scatter, known: Places, microbatch: Mapping[str, Any]) -> dict[fx.Node, torch.Tensor]:
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in scatter.calls:
            if node.op == "placeholder":
                kind, name = node.meta["role"]
                given = known.constants[name] if kind == "constant" else microbatch[name]
                values[node] = given.to(known.device)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values
