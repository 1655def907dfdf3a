"""Pass `sequence`: what stands between the divided products of a layer as shards of tokens ("sequence parallel")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from csc.passes.tensor import GROUP
from csc.passes.token_rows import RowShards, rows_of
from csc.passes.token_shards import Arriving, Leaving, TokenShards

from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Evaluation, unique
from csc.ir.mesh import on_fewer, on_more
from csc.ir.program import LOSS, DividedAxis, Options, Program, Region, Template


def sequence(program: Program, options: Options) -> Program:
    """With `options.sequence_parallel`, let tensor-parallel ranks share out tokens where they computed them all alike.

    Requires  pass `tensor`.
    Ensures   without it, or with tp = 1, nothing changes. Else sums over ranks give each rank its tokens where calls
              that work token by token read them (norms, additions, dropout), and divided products read what is
              gathered; regions hand shards to each other; parameters that only such calls read have gradients that are
              parts. Where ranks do not divide the number of tokens, the last slots repeat the last token.
    Before    %y = csc.all_reduce(%part);  %z = norm(%y : f32[2, 12, 48]);  %up = linear(csc.share(%z), %w_up)
    After     %y = csc.reduce_scatter(%part, 1, 12);  %z = norm(%y : f32[2, 6, 48]);
              %up = linear(csc.gather_shared(%z, 1, 12), %w_up)
    """
    if not options.sequence_parallel:
        return program
    if options.mesh.tp == 1:
        raise InputError(
            "sequence_parallel=True shares tokens out among tensor-parallel ranks, and the mesh has tp=1",
            "sequence_parallel", "give the mesh a tp, or leave sequence_parallel out; cp divides tokens without tp",
        )  # fmt: skip
    assert program.shared is not None
    named = zip(g.outputs(program.shared), program.shared.output_node().meta["names"], strict=True)
    groups = {name: node.meta["val"] for node, name in named if node.meta.get("role") == GROUP}
    if not groups:
        return program
    fewer = (*options.mesh.held_in_copies, *on_fewer(options.mesh), *on_more(options.mesh))
    return _Handing(program, options.mesh.tp, [*groups.values()][-1], tuple(groups), fewer).program()


@dataclass(frozen=True)
class _HandedOn:
    """A template as regions with such activations and outputs run it."""

    template: Template
    leaves: tuple[RowShards | None, ...]
    taken: frozenset[int]  # activations
    parts: frozenset[str]  # local names of parameters
    meets: bool  # others, where the template before did not


@dataclass
class _Handing:
    """What regions hand each other.

    tables: of the number of a rank's group, the last one for regions that have none. fewer: components that fewer ranks
    divide, whose regions stay as they are. whole: values that no reader takes as shards. cut: those that some reader of
    a kind gets whole, and others of it as shards: their region cuts them. summed: parameters whose gradient calls in
    graphs have to add up.
    """

    before: Program
    ranks: int
    number: torch.Tensor
    tables: tuple[str, ...]
    fewer: tuple[str, ...]
    whole: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    summed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.evaluate = Evaluation(self.before.fake_mode)
        self.made: dict[object, _HandedOn] = {}

    def program(self) -> Program:
        """With the values that settle."""
        while True:
            found, shards = self._swept()
            if not (self._to_hand_on(found, shards) or self._to_add_up(found)):
                return self._applied(found)

    def _swept(self) -> tuple[dict[str, _HandedOn], dict[str, Arriving]]:
        shards: dict[str, Arriving] = {}
        found: dict[str, _HandedOn] = {}
        for region in self.before.regions:
            one = found[region.name] = self._region(region, shards)
            for value, rows, node in zip(region.outputs, one.leaves, g.outputs(one.template.graph)):
                if rows is not None:
                    shards[value] = Arriving(rows, node.meta["val"])
        return found, shards

    def _region(self, region: Region, shards: Mapping[str, Arriving]) -> _HandedOn:
        template = self.before.templates[region.template]
        if region.component in self.fewer:
            return self.made.setdefault(
                region.template, _HandedOn(template, (None,) * len(region.outputs), frozenset(), frozenset(), False)
            )
        arriving = {place: shards[value] for place, value in enumerate(region.activations) if value in shards}
        leaving = tuple(
            Leaving(value not in self.whole and value != LOSS, value in self.cut) for value in region.outputs
        )
        local = zip(region.parameters, template.parameters, strict=True)
        summed = frozenset(own for name, own in local if name in self.summed)
        shapes = tuple((place, one.rows, tuple(one.val.shape), one.val.stride()) for place, one in arriving.items())
        groups = tuple(local for name, local in zip(region.shared, template.shared, strict=True) if name in self.tables)
        key = (region.template, shapes, leaving, summed, groups)
        if key not in self.made:
            self.made[key] = self._template(template, arriving, leaving, summed, groups)
        return self.made[key]

    def _template(
        self, template: Template, arriving: Mapping[int, Arriving], leaving: tuple[Leaving, ...],
        summed: frozenset[str], groups: tuple[str, ...],
    ) -> _HandedOn:  # fmt: skip
        given = g.placeholders(template.graph)
        inexact = [given[place] for place in template.inexact]
        tokens = TokenShards(
            template.graph, {given[place]: one for place, one in arriving.items()}, leaving, self.ranks, self.number,
            groups, self.evaluate, inexact, summed,
        ).run()  # fmt: skip
        if not tokens.rows and not any(tokens.leaves):
            return _HandedOn(template, tuple(tokens.leaves), frozenset(), frozenset(tokens.parts), False)
        shared = tuple(node.name for node in g.placeholders(tokens.graph) if node.meta["role"][0] == "shared")
        counts = dict.fromkeys(rows.length for rows in (*tokens.rows.values(), *filter(None, tokens.leaves)))
        axes = tuple(DividedAxis("tokens", count, self.ranks, ()) for count in counts)
        changed = replace(template, graph=tokens.graph, shared=shared, divided=(*template.divided, *axes))
        taken = frozenset(place for place in arriving if given[place] in tokens.taken)
        meets = len(shared) > len(template.shared)
        return _HandedOn(changed, tuple(tokens.leaves), taken, frozenset(tokens.parts), meets)

    def _to_hand_on(self, found: Mapping[str, _HandedOn], shards: Mapping[str, Arriving]) -> bool:
        """Whether values are to be handed on in another way."""
        taken = {region.activations[place] for region in self.before.regions for place in found[region.name].taken}
        whole = shards.keys() - taken
        kinds: dict[tuple[str, int], RowShards] = {}
        for region in self.before.regions:
            for place in found[region.name].taken:
                kinds[(region.template, place)] = shards[region.activations[place]].rows
        vals = {
            value: node.meta["val"] for region in self.before.regions
            for value, node in zip(region.outputs, g.outputs(self.before.templates[region.template].graph))
        }  # fmt: skip
        cut = {
            value for region in self.before.regions for place, value in enumerate(region.activations)
            if value not in shards and value not in self.whole
            and kinds.get((region.template, place), ()) == rows_of(vals[value])
        }  # fmt: skip
        changed = bool(whole - self.whole or cut - self.cut)
        self.whole |= whole
        self.cut = (self.cut | cut) - self.whole
        return changed

    def _to_add_up(self, found: Mapping[str, _HandedOn]) -> bool:
        """Whether gradients of a parameter are parts in one region and whole in another."""
        parts: set[str] = set()
        others: set[str] = set()
        for region in self.before.regions:
            one = found[region.name]
            for name, local in zip(region.parameters, one.template.parameters, strict=True):
                (parts if local in one.parts else others).add(name)
        changed = bool((parts & others) - self.summed)
        self.summed |= parts & others
        return changed

    def _applied(self, found: Mapping[str, _HandedOn]) -> Program:
        templates: dict[str, Template] = {}
        names: dict[int, str] = {}
        regions: list[Region] = []
        parts: set[str] = set()
        for region in self.before.regions:
            one = found[region.name]
            if id(one) not in names:
                names[id(one)] = unique(one.template.name, templates)
                templates[names[id(one)]] = replace(one.template, name=names[id(one)])
            tables = (*region.shared, self.tables[-1]) if one.meets else region.shared
            regions.append(replace(region, template=names[id(one)], shared=tables))
            local = zip(region.parameters, one.template.parameters, strict=True)
            parts |= {name for name, own in local if own in one.parts}
        held = tuple(replace(p, parts=p.parts or (p.name in parts and not p.boxes)) for p in self.before.parameters)
        return replace(self.before, templates=templates, regions=tuple(regions), parameters=held)
