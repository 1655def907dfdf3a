"""The forms in which ranks may divide a model, and stages that its encoders may have of their own.

Terms: see csc.planning.meshes. The *encoders* are the components that have layers, but for the one whose layers run
last, from which the loss comes.

    encoders(program) -> names
    forms(names, options, division) -> [MeshForm]   those that come first are seldom beaten by the others
    forms_of(name, division, form) -> [MeshForm]    the form, with one encoder divided otherwise
    own_stages(names, numbers) -> [own_stages]      as csc.ir.mesh has them, near the components' parts of the work

Shared-out tokens come first: they take the bytes of one sum in two exchanges, or less, and divide norms and additions
too, in seconds and in bytes. Ranks of cp that share out an encoder's samples do a part of what each does else. Samples
that do not divide (one image, six tiles among four ranks) let ranks compute the same: there fewer groups of ranks, each
of which divides layers too, or tokens in place of samples, may take less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from csc.ir.program import Options, Program
from csc.planning.meshes import PLAIN, MeshDivision, MeshForm
from csc.planning.problem import Problem

OwnStages = tuple[tuple[str, int], ...]


def encoders(program: Program) -> tuple[str, ...]:
    """In order of execution."""
    names = list(dict.fromkeys(region.component for region in program.regions if region.kind == "layer"))
    last = next((region.component for region in reversed(program.regions) if region.kind == "layer"), "")
    return tuple(name for name in names if name != last)


def forms(names: Sequence[str], options: Options, division: MeshDivision) -> list[MeshForm]:
    """What a division, whatever its form, is first looked at in, until csc can divide so. A component whose tokens the
    options spread has no tp or cp of its own; options that share out tokens stay so.
    """
    free = tuple(name for name in names if name not in dict(options.context))
    groups = [(), free, *((name,) for name in free if len(free) > 1)] if free else [()]
    sequences = (True, *(() if options.sequence_parallel else (False,)))
    found = [PLAIN]
    if division.tp > 1:
        owns = [tuple((name, 1) for name in sorted(apart)) for apart in groups]
        found = [MeshForm(own, sequence) for sequence in sequences for own in owns]
    whole = tuple(sorted(free)) if division.cp > 1 else ()
    return [*(replace(form, whole=whole) for form in found), *found] if whole else found


def forms_of(name: str, division: MeshDivision, form: MeshForm) -> list[MeshForm]:
    """The form with other numbers of ranks that divide the layers of an encoder, or share out its tokens over cp. Those
    between 1 and all of tp are the same for all components: the time that more would take is better given to other
    meshes (VALM-L of benchmarks.mesh on 64 H100: 14.6 s a step in place of 14.0).
    """
    others = tuple(one for one in form.own if one[0] != name)
    between = {tp for _, tp in others if tp > 1}
    sizes = [tp for tp in range(1, division.tp + 1) if division.tp % tp == 0]
    fitting = [tp for tp in sizes if tp in (1, division.tp) or not between or tp in between]
    if name in form.spread:
        return []
    found = [replace(form, own=tuple(sorted((*others, (name, tp)))) if tp < division.tp else others) for tp in fitting]
    if division.cp > 1:
        whole = tuple(one for one in form.whole if one != name)
        found.append(replace(form, own=others, whole=whole, spread=tuple(sorted((*form.spread, name)))))
    return [one for one in found if one != form]


def own_stages(names: Sequence[str], numbers: Problem) -> list[OwnStages]:
    """Of a pipeline with more ranks than encoders, so many that the rest has at least one."""
    whole = sum(unit.work for unit in numbers.units)
    shares = {name: sum(unit.work for unit in numbers.units if unit.component == name) / whole for name in names}
    found = [
        tuple((name, max(1, rounded(numbers.ranks * share))) for name, share in shares.items())
        for rounded in (math.floor, math.ceil)
    ]
    fitting = [one for one in found if one and sum(stages for _, stages in one) < numbers.ranks]
    return list(dict.fromkeys(fitting))
