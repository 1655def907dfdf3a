"""How much of what attention could compute its mask lets it skip: the share of tiles that a query sees anything of.

Terms: a *tile* is TILE queries by TILE keys, about what kernels walk through. A mask is a few ranges of keys for each
query, which the shared graph makes (pass `attention`). Where these follow from sizes alone, as causal and windowed ones
do, they are known before there is a batch. Where a batch decides (documents packed in a row), all counts.

    shares(program) -> {table: share}        of each packed mask, from 0 to 1
    named(region, template_shared, shares)   the same by the names that the region's graphs have for its tables
    mask_of(node) -> name                    of the table that a call of attention reads as its mask, "" for none
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from csc.ir import graph as g
from csc.ir.program import Program, Region

TILE = 128
MASKED = {"csc::attention": 3, "csc::attention_backward": 6}  # the position of the mask among the arguments


def shares(program: Program) -> dict[str, float]:
    """By the name of the table; masks that a batch decides are not in it."""
    if program.shared is None:
        return {}
    output = program.shared.output_node()
    found = {}
    for name, node in zip(output.meta["names"], g.outputs(program.shared)):
        if isinstance(node, fx.Node) and node.op == "call_function" and g.op_name(node) == "csc::pack_mask":
            ranges = _known(node.args[0])  # type: ignore[arg-type]
            if ranges is not None:
                found[name] = _share(ranges, int(node.kwargs.get("keys") or node.args[3]))  # type: ignore[arg-type]
    return found


def named(region: Region, template_shared: tuple[str, ...], found: Mapping[str, float]) -> dict[str, float]:
    """The shares by the names that the region's own graphs have for its tables."""
    return {own: found[table] for own, table in zip(template_shared, region.shared) if table in found}


def mask_of(node: fx.Node) -> str:
    """By the name in the call's own graph."""
    place = MASKED.get(g.op_name(node))
    mask = node.args[place] if place is not None and len(node.args) > place else None
    if not isinstance(mask, fx.Node) or mask.op != "placeholder":
        return ""
    kind, name = mask.meta["role"]
    return str(name) if kind == "shared" else ""


def _known(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input; None for others."""
    needed = g.ancestors([node])
    if any(one.op != "call_function" for one in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for one in node.graph.nodes:
        if one in needed:
            arguments = fx.map_arg((one.args, one.kwargs), lambda used: values[used])
            values[one] = one.target(*arguments[0], **arguments[1])
    found = values[node]
    return found.cpu() if isinstance(found, torch.Tensor) else None


def _share(ranges: torch.Tensor, keys: int) -> float:
    """ranges: [B, R, Tq, 2], the first key and the one behind the last."""
    first, end = ranges.clamp(0, keys).to(torch.int64).unbind(-1)
    empty = end <= first
    first, end = first.masked_fill(empty, keys), end.masked_fill(empty, 0)
    rows = -(-first.shape[-1] // TILE) * TILE
    more = rows - first.shape[-1]
    first = torch.nn.functional.pad(first, (0, more), value=keys).unflatten(-1, (-1, TILE)).amin(-1)
    end = torch.nn.functional.pad(end, (0, more), value=0).unflatten(-1, (-1, TILE)).amax(-1)
    tiles = (-(-end // TILE) - first // TILE).clamp(min=0).sum(dim=1)  # over the ranges of a query
    every = -(-keys // TILE)
    return float((tiles.clamp(max=every).double() / every).mean())
