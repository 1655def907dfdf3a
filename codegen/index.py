"""What the emission looks up in a Program again and again, found once: with it the work is linear in the program.

Terms: tables: what a stage makes from the batch and the constants alone; see csc.codegen.tables_file.

    index(program) -> ProgramNames
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from csc.codegen import tables_file

from csc.ir import graph as g
from csc.ir.program import Message, Program, Region, Template, Variant

BESIDE = -1  # the stage of what no step runs: see csc.ir.program.Features


@dataclass(frozen=True)
class ProgramNames:
    """A Program by names, what its `features` have included.

    readers: how many regions read a value. types: `f32[2, 20, 48]` of every value between regions. arriving and
    leaving: messages by kind and stage. seeds: tables that are a microbatch's seed. functions: the function of
    layers/tables.py that makes a set of tables.
    """

    program: Program
    templates: Mapping[str, Template]
    variants: Mapping[str, Variant]
    regions: Mapping[str, Region]
    readers: Mapping[str, int]
    types: Mapping[str, str]
    trainable: frozenset[str]
    arriving: Mapping[tuple[str, int], list[Message]]
    leaving: Mapping[tuple[str, int], list[Message]]
    seeds: frozenset[str]
    tables: tables_file.Tables
    functions: Mapping[tuple[str, ...], str]


def index(program: Program) -> ProgramNames:
    """The Index of a scheduled Program."""
    arriving: dict[tuple[str, int], list[Message]] = {}
    leaving: dict[tuple[str, int], list[Message]] = {}
    for message in program.messages:
        arriving.setdefault((message.kind, message.destination), []).append(message)
        leaving.setdefault((message.kind, message.source), []).append(message)
    left_out = program.features
    if left_out is not None:  # what its function returns is what a stage would send
        leaving["F", BESIDE] = [Message("F", BESIDE, BESIDE, left_out.values)]
    regions, templates, variants = program.regions, dict(program.templates), dict(program.variants)
    if left_out is not None:
        regions = (*left_out.regions, *regions)
        templates, variants = {**templates, **left_out.templates}, {**variants, **left_out.variants}
    returned = {name: g.outputs(template.graph) for name, template in templates.items()}
    tables = tables_file.tables(program)
    return ProgramNames(
        program,
        templates,
        variants,
        regions={region.name: region for region in regions},
        readers=Counter(value for region in regions for value in set(region.activations)),
        types={
            value: g.type_text(node.meta["val"])
            for region in regions
            for value, node in zip(region.outputs, returned[region.template])
        },
        trainable=frozenset(p.name for p in program.parameters if p.trainable),
        arriving=arriving,
        leaving=leaving,
        seeds=frozenset(tables_file.seeds(program)),
        tables=tables,
        functions=tables_file.function_names(program, tables),
    )
