"""Runs the graphs of a Program on real tensors, region by region, as a reference for what is emitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from csc.ir import graph as g
from csc.ir.program import Program, Region, compute_dtypes

Role = tuple[str, str]


@dataclass(frozen=True)
class Run:
    """One region on one microbatch: its inputs by role (gradients of its outputs are random numbers)."""

    region: Region
    values: Mapping[Role, torch.Tensor]


def run(graph: fx.Graph, values: Mapping[Role, Any]) -> Any:
    """The graph's results; placeholders are looked up by role."""
    inputs = [values[node.meta["role"]] for node in g.placeholders(graph)]
    return fx.Interpreter(nn.Module(), graph=graph).run(*inputs)


@torch.no_grad()
def regions(program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Iterator[Run]:
    """Every region of the Program with its real inputs, in order of execution."""
    torch.manual_seed(0)
    dtypes = compute_dtypes(program)
    weights = {name: p.detach().to(dtypes.get(name, p.dtype)) for name, p in model.named_parameters()}
    tables: dict[str, torch.Tensor] = {}
    if program.shared is not None:
        entries = {("input", n): t for n, t in batch.items()} | {
            ("constant", n): t for n, t in program.constants.items()
        }
        entries["random", "seed"] = torch.tensor(1, dtype=torch.int64)
        tables = dict(zip(program.shared.output_node().meta["names"], run(program.shared, entries)))
    made: dict[str, torch.Tensor] = {}
    for region in program.regions:
        template = program.templates[region.template]
        values: dict[Role, torch.Tensor] = {}
        values |= {("activation", str(i)): made[v].clone() for i, v in enumerate(region.activations)}
        values |= {("shared", own): tables[t] for own, t in zip(template.shared, region.shared)}
        values |= {("parameter", own): weights[p].detach() for own, p in zip(template.parameters, region.parameters)}
        results = run(template.graph, values)
        made.update(zip(region.outputs, results))
        for node in g.placeholders(template.joint):
            if node.meta["role"][0] == "tangent":
                val = node.meta["val"]
                values[node.meta["role"]] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype).normal_()
        yield Run(region, values)
