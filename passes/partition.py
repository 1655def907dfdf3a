"""Pass `partition`: regions to stages, and the messages between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import LOSS, Message, Options, Program, Region, Stage
from csc.planning.partition import at_cuts, balance


def partition(program: Program, options: Options) -> Program:
    """Cut the regions, in order of execution, into one run of regions a stage.

    Requires  pass `split` (its FLOPs are what is balanced).
    Ensures   every region is in one stage; activations go straight to every later stage that reads them; a gradient
              visits the readers of its value from the last to the first; no message for a gradient that nobody needs.
    Before    regions: embed, layers.0, layers.1, head
    After     stage 0: embed, layers.0;  stage 1: layers.1, head;  F 0>1: layers.0;  B 1>0: layers.0
    """
    stages = options.mesh.pp
    names = [region.name for region in program.regions]
    if stages > len(names):
        raise InputError(
            f"the mesh asks for {stages} stages, and {program.name} has {len(names)} regions", "mesh",
            f"use pp={len(names)} or less",
        )  # fmt: skip
    if options.cuts is None:
        starts = balance([sum(program.variants[region.variant].flops) for region in program.regions], stages)
    else:
        starts = at_cuts(names, options.cuts)
        if len(starts) != stages:
            raise InputError(
                f"{len(options.cuts)} cuts make {len(starts)} stages, and the mesh has pp={stages}", "cuts",
                f"name {stages - 1} regions, each the first of a stage",
            )  # fmt: skip
    bounds = [*starts, len(names)]
    home = {name: stage for stage in range(stages) for name in names[bounds[stage] : bounds[stage + 1]]}
    messages = _messages(program.regions, home)
    built = tuple(_stage(program, index, program.regions[bounds[index] : bounds[index + 1]]) for index in range(stages))
    return replace(program, stages=built, messages=messages)


def _messages(regions: Sequence[Region], home: dict[str, int]) -> tuple[Message, ...]:
    values: dict[tuple[str, int, int], list[str]] = {}
    maker = {value: home[region.name] for region in regions for value in region.outputs}
    for region in regions:
        for value in region.activations:
            source, destination = maker[value], home[region.name]
            sent = values.setdefault(("F", source, destination), []) if source != destination else None
            if sent is not None and value not in sent:
                sent.append(value)
    holder: dict[str, int] = {}  # where the gradient of a value is while it visits the value's readers
    first_reader = {v: r.name for r in reversed(regions) for v, needed in zip(r.activations, r.dx) if needed}
    for region in reversed(regions):
        here = home[region.name]
        for value, needed in zip(region.activations, region.dx):
            if not needed:
                continue
            if value in holder and holder[value] != here:
                values.setdefault(("B", holder[value], here), []).append(value)
            holder[value] = here
            if first_reader[value] == region.name and maker[value] != here:
                values.setdefault(("B", here, maker[value]), []).append(value)
    return tuple(Message(*channel, tuple(names)) for channel, names in sorted(values.items()))


def _stage(program: Program, index: int, regions: Sequence[Region]) -> Stage:
    tables = list(dict.fromkeys(name for region in regions for name in region.shared))
    if program.loss_tokens and any(LOSS in region.outputs for region in regions):
        tables.append(program.loss_tokens)
    needed = g.ancestors(shared_outputs(program, tables))
    roles = [n.meta["role"] for n in g.placeholders(program.shared) if n in needed] if program.shared else []
    parameters = tuple(dict.fromkeys(name for region in regions for name in region.parameters))
    return Stage(
        index=index,
        regions=tuple(region.name for region in regions),
        inputs=tuple(name for kind, name in roles if kind == "input"),
        constants=tuple(name for kind, name in roles if kind == "constant"),
        parameters=parameters,
        shared=tuple(tables),
        has_b=any(region.needs_dx or region.needs_dw for region in regions),
        has_w=any(region.needs_dw for region in regions),
    )


def shared_outputs(program: Program, tables: Sequence[str]) -> list:
    """The nodes of the shared graph that make the named tables."""
    assert program.shared is not None
    made = dict(zip(program.shared.output_node().meta["names"], g.outputs(program.shared)))
    return [made[table] for table in tables]
