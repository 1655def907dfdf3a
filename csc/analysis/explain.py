"""What every region costs and why: the rows of `csc explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csc.analysis.costs import count
from csc.ir import graph as g
from csc.ir.program import Program, Region, Variant


@dataclass(frozen=True)
class ExplainRow:
    """One region or, summed, one component. Work of one microbatch; pruned: what training all would add."""

    name: str
    component: str
    template: str
    stage: int
    parameters: int
    trainable: int
    needs_dx: bool
    needs_dw: bool
    matmuls: tuple[int, int, int]
    flops: tuple[int, int, int]
    pruned_nodes: int
    pruned_flops: int
    why: str


def explain(program: Program) -> tuple[list[ExplainRow], list[ExplainRow]]:
    """(rows of components, rows of regions), in order of execution. The Program must have been partitioned."""
    trainable = {p.name: p.trainable for p in program.parameters}
    numel = {p.name: p.numel for p in program.parameters}
    stage = {name: s.index for s in program.stages for name in s.regions}
    totals = {name: (count(t.joint).flops, len(g.calls(t.joint))) for name, t in program.templates.items() if t.joint}
    regions = [_region_row(program, region, stage[region.name], trainable, numel, totals) for region in program.regions]
    by_component: dict[str, list[ExplainRow]] = {}
    for row in regions:
        by_component.setdefault(row.component, []).append(row)
    components = [_component_row(program, name, rows, trainable, numel) for name, rows in by_component.items()]
    return components, regions


def _region_row(program: Program, region: Region, stage: int, trainable: dict, numel: dict, whole: dict) -> ExplainRow:
    variant = program.variants[region.variant]
    flops, nodes = whole[region.template]
    left = len(g.calls(variant.pruned))
    return ExplainRow(
        name=region.name,
        component=region.component,
        template=region.variant,
        stage=stage,
        parameters=sum(numel[p] for p in region.parameters),
        trainable=sum(numel[p] for p in region.parameters if trainable[p]),
        needs_dx=region.needs_dx,
        needs_dw=region.needs_dw,
        matmuls=variant.matmuls,
        flops=variant.flops,
        pruned_nodes=nodes - left,
        pruned_flops=max(0, flops - sum(variant.flops)),
        why="; ".join(filter(None, (_why(region, any(trainable[p] for p in region.parameters)), _again(variant)))),
    )


def _why(region: Region, trains: bool) -> str:
    if not region.needs_dx and not region.needs_dw:
        return (
            "frozen, nothing trainable upstream: F only" if region.parameters else "nothing trainable upstream: F only"
        )
    if region.needs_dx and not region.needs_dw:
        return "frozen, but passes a gradient on: no W" if region.parameters else "passes a gradient on"
    partly = "" if all(region.dw) else f"{sum(region.dw)} of {len(region.dw)} parameters train"
    if region.activations and not region.needs_dx:
        led = f"; {partly}, W holds what leads to them" if partly else ""
        return f"nothing trainable upstream: no B{led}"
    return partly or ("trained" if trains else "")


def _again(variant: Variant) -> str:
    return f"B runs {variant.rematerialised / 1e6:.2f} MFLOPs of F again" if variant.saves is not None else ""


def _component_row(program: Program, name: str, rows: Sequence[ExplainRow], trainable: dict, numel: dict) -> ExplainRow:
    regions = {r.name: r for r in program.regions}
    parameters = {p for row in rows for p in regions[row.name].parameters}
    stages = sorted({row.stage for row in rows})
    return ExplainRow(
        name=name,
        component=name,
        template=f"{len(rows)} regions",
        stage=stages[0],
        parameters=sum(numel[p] for p in parameters),
        trainable=sum(numel[p] for p in parameters if trainable[p]),
        needs_dx=any(row.needs_dx for row in rows),
        needs_dw=any(row.needs_dw for row in rows),
        matmuls=_sum3([row.matmuls for row in rows]),
        flops=_sum3([row.flops for row in rows]),
        pruned_nodes=sum(row.pruned_nodes for row in rows),
        pruned_flops=sum(row.pruned_flops for row in rows),
        why=f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}",
    )


def _sum3(items: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    return (sum(i[0] for i in items), sum(i[1] for i in items), sum(i[2] for i in items))
