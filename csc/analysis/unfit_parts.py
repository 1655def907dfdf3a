"""What of a program's stages cannot be recorded on a device, and runs as it is: see csc.kernels.recordable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from csc.analysis.operators.execution import is_random
from csc.ir import graph as g
from csc.ir.mesh import Mesh
from csc.ir.program import Program
from csc.kernels.recordable import GATHERED, MEETS, unfit
from csc.torch_private.exported import OpOverload

PARTS = {"forward": "F", "backward_input": "B", "backward_weight": "W"}


class UnfitPart(NamedTuple):
    """stage: its index. part: F, B or W."""

    stage: int
    part: str
    why: str


def unfit_in(graph: fx.Graph) -> str:
    """Returns why the first unfit call of a graph cannot be recorded; "" where the graph has none."""
    for node in g.calls(graph):
        operator = node.target
        if not isinstance(operator, OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in operator.tags and not is_random(node):
            continue
        tensors = (g.tensor_value(operand) for operand in node.all_input_nodes)
        why = unfit(operator, [tensor for tensor in tensors if tensor is not None])
        if why:
            return why
    return ""


def unfit_parts(program: Program, mesh: Mesh) -> list[UnfitPart]:
    """Returns the parts that cannot be recorded, in the order of stages, and of F, B and W."""
    parts = []
    for stage in program.stages:
        if stage.divided:
            parts.append(UnfitPart(stage.index, "F", GATHERED))
            continue
        if stage.contexts or mesh.width(stage.rank) > 1 or mesh.own("cp"):
            parts.append(UnfitPart(stage.index, "F", MEETS))
            continue
        for part in PARTS:
            whys = (
                f"{why} ({region.name})"
                for region in map(program.region, stage.regions)
                if (graph := getattr(program.variants[region.variant], part)) is not None and (why := unfit_in(graph))
            )
            why = next(whys, "")
            if why:
                parts.append(UnfitPart(stage.index, PARTS[part], why))
    return parts
