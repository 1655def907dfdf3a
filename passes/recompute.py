"""Pass `recompute`: what F keeps for B, and what B makes again.

Terms
  choice   what is done with one region:
           none       F keeps all that B and W read of it
           selective  B runs again what is cheap; F keeps the fewest bytes that spare B every matmul, convolution and
                      attention
           elementwise  B runs again what becomes part of its own kernels if Inductor compiles them; F keeps the fewest
                      bytes that spare B everything else. What `fuse` does where nothing is said; else `none` is
           full       F keeps what enters the region, B runs the rest again
           auto       the least that is run again with which every rank fits within its memory
           (names)    F keeps these values and what enters the region
  fixed    a call that is never run again: it draws random numbers, meets other ranks, or is an opaque module
"""

from __future__ import annotations

import difflib
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, ClassVar

import torch
from csc.passes.partition import decide
from csc.passes.pipeline_problem import chosen_hardware, limit, problem
from csc.passes.split import divided, is_cheap, parts_of
from torch import fx

from csc.analysis.costs import Kernels, call_of, dense_bytes, fusible, held_bytes, is_elementwise, seconds
from csc.analysis.hardware import Hardware
from csc.analysis.operators.execution import is_random
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import unique
from csc.ir.program import Choice, Options, Pass, Program, Region, Template, Variant
from csc.planning.rematerialise import Candidate, StashChoice, least, savings

NONE, SELECTIVE, ELEMENTWISE, FULL, AUTO = "none", "selective", "elementwise", "full", "auto"
SMALLER = 4  # times: a reduction to so much less is kept, not run again over all that it reads
PRICES = 16  # that the bisection looks at
TRIED = 4  # prices among those that fit
NEAR = 1.005  # a plan under the limit this near to one without needs no recomputation
EFFORT = 0.2  # of the search for their plans
Saves = tuple[str, ...] | None


@dataclass(frozen=True)
class RecomputePass(Pass):
    """Choose for every region what its F keeps for its B.

    Ensures   `saves` of each variant with a backward: the values that F may keep, None for whatever B reads; regions
              with the same work and the same choice share a variant; random draws and results of attention over several
              ranks are always kept.
    Before    recompute="full":  layer: saves None
    After     layer_recomputed: saves ();  then F(x) -> out, (x);  B(x, d_out) runs F again as far as B and W read it
    """

    requires: ClassVar = ("pruned",)
    establishes: ClassVar = ("recompute",)

    recompute: tuple[tuple[str, Choice], ...] = ()

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        choices = choices_of(program, options)
        if all(choice == NONE for choice in choices.values()):
            return program
        candidates = _Candidates(program, chosen_hardware(program, options), options.fuse)
        regions = {region.name: region for region in program.regions}
        saves = {name: candidates.saves(regions[name], choice) for name, choice in choices.items() if choice != AUTO}
        automatic = [region for region in program.regions if choices[region.name] == AUTO]
        if automatic:
            saves |= _fitting(program, options, candidates, automatic, saves)
        return _with(program, saves)


def saves_of(program: Program) -> tuple[tuple[str, Choice], ...]:
    """The choices that give every region what it has now, whatever the memory, the mesh and the sizes are."""
    choices: list[tuple[str, Choice]] = []
    for region in program.regions:
        saves = program.variants[region.variant].saves
        choices.append((region.name, NONE if saves is None else saves))
    return tuple(choices)


def default_choice(options: Options) -> str:
    """What is done with regions of which the options say nothing."""
    return ELEMENTWISE if options.fuse else NONE


def choices_of(program: Program, options: Options) -> dict[str, Choice]:
    """The choice for every region. InputError for a pattern that no region matches."""
    choices: dict[str, Choice] = dict.fromkeys([region.name for region in program.regions], default_choice(options))
    for pattern, choice in options.recompute:
        matched = [region.name for region in program.regions if _matches(pattern, region)]
        if not matched and not options.part:
            names = [*dict.fromkeys(region.component for region in program.regions), *choices]
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
            raise InputError(
                f"no region matches {pattern!r}",
                "recompute",
                (f"did you mean {' or '.join(map(repr, close))}? " if close else "")
                + "give the name of a component or a region, or a glob; `csc explain` lists them",
            )
        choices |= dict.fromkeys(matched, choice)
    return choices


def _matches(pattern: str, region: Region) -> bool:
    return pattern in (region.name, region.component) or fnmatchcase(region.name, pattern)


def _with(program: Program, saves: Mapping[str, Saves]) -> Program:
    """The program with these values to keep, by region."""
    variants: dict[str, Variant] = {}
    names: dict[tuple[str, Saves], str] = {}
    regions: list[Region] = []
    for region in program.regions:
        variant = program.variants[region.variant]
        key = (variant.name, saves.get(region.name))
        if key not in names:
            wanted = variant.name if key[1] is None else f"{variant.name}_recomputed"
            names[key] = unique(wanted, {**program.variants, **variants} if key[1] is not None else variants)
            variants[names[key]] = replace(variant, name=names[key], saves=key[1])
        regions.append(replace(region, variant=names[key]))
    return replace(program, regions=tuple(regions), variants=variants)


# --- auto --------------------------------------------------------------------------------------------------------


def _fitting(
    program: Program, options: Options, candidates: _Candidates, automatic: list[Region], fixed: Mapping[str, Saves]
) -> dict[str, Saves]:
    """What the automatic regions keep at the price of a second whose plan takes the least time.

    One price for all: then no byte could be had for less time elsewhere. The highest price at which the plan fits is
    found by bisection; lower ones, which hold less, may allow a better schedule, so some of them are tried, too.
    InputError if nothing fits, and if nobody says what a rank may hold.
    """
    if limit(program, options) is None:
        raise InputError(
            "recompute='auto' does not know what a rank may hold", "recompute", "give memory=, or hardware= by name"
        )
    nothing = {r.name: candidates.saves(r, default_choice(options)) for r in automatic}
    plain = candidates.makespan(_with(program, {**fixed, **nothing}), options)
    if plain <= candidates.makespan(_with(program, {**fixed, **nothing}), options, limited=False) * NEAR:
        return nothing
    corners = {r.variant: candidates.corners(program.variants[r.variant]) for r in automatic}
    prices = sorted({corner.price for corner_list in corners.values() for corner in corner_list}, reverse=True)
    prices = [prices[i * (len(prices) - 1) // (PRICES - 1)] for i in range(PRICES)]

    def at(price: float) -> dict[str, Saves]:
        kept = {
            name: candidates.names(program.variants[name], [c for c in corner_list if c.price >= price][-1])
            for name, corner_list in corners.items()
        }
        return {r.name: kept[r.variant] for r in automatic}

    @cache
    def makespan(place: int) -> float:
        return candidates.makespan(_with(program, {**fixed, **at(prices[place])}), options)

    last = len(prices) - 1
    if makespan(last) == math.inf:
        candidates.planned(_with(program, {**fixed, **at(prices[last])}), options)  # it says what would fit
    first = bisect_left(range(last), True, key=lambda place: makespan(place) < math.inf)
    tried = sorted({first + round(i * (last - first) / (TRIED - 1)) for i in range(TRIED)})
    best = min(tried, key=makespan)
    return nothing if plain <= makespan(best) else at(prices[best])


# --- what one region may keep ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Network:
    """The calls of F as steps, the node of each, and the steps that B or W reads."""

    steps: tuple[Candidate, ...]
    nodes: tuple[fx.Node, ...]
    needed: tuple[int, ...]


class _Candidates:
    """Answers what F of a region keeps under a choice; each variant is looked at once."""

    def __init__(self, program: Program, hardware: Hardware, fuse: bool) -> None:
        self.program = program
        self.hardware = hardware
        self.fuse = fuse  # what Inductor makes part of B's kernels takes no time
        self._known: dict[Any, Any] = {}

    def saves(self, region: Region, choice: Choice) -> Saves:
        """The values that F of the region keeps; None: whatever B reads."""
        variant = self.program.variants[region.variant]
        if choice == NONE or not (region.needs_dx or region.needs_dw):
            return None
        key = (variant.name, choice)
        if key not in self._known:
            self._known[key] = self._saves(variant, choice)
        return self._known[key]

    def _saves(self, variant: Variant, choice: Choice) -> Saves:
        template = self.program.templates[variant.template]
        if choice in (SELECTIVE, ELEMENTWISE):
            banned = _computes if choice == SELECTIVE else _stands_alone
            network = _network(variant, template, self.hardware, banned)
            return self.names(variant, least(network.steps, network.needed, 0.0))
        named = set(choice) if isinstance(choice, tuple) else set()
        in_f = parts_of(variant, template).in_f
        calls = {node.name: node for node in variant.pruned.nodes if node in in_f and node.op == "call_function"}
        for name in sorted(named - calls.keys() - {node.name for node in g.placeholders(variant.pruned)}):
            close = difflib.get_close_matches(name, calls, n=3, cutoff=0.5)
            raise InputError(
                f"F of {variant.name} makes no value {name!r}", "recompute",
                f"values that are close: {', '.join(close)}" if close else "its layer file has their names",
            )  # fmt: skip
        return tuple(name for name, node in calls.items() if name in named or _is_fixed(node))

    def makespan(self, tried: Program, options: Options, limited: bool = True) -> float:
        """Seconds of a step; infinite if no plan fits."""
        try:
            return self.planned(tried, options, limited)
        except InputError:
            return math.inf

    def planned(self, tried: Program, options: Options, limited: bool = True) -> float:
        """Seconds of a step by a quick plan. InputError if none fits."""
        parts = {}
        for name, variant in tried.variants.items():
            key = (variant.pruned, variant.saves)
            if key not in self._known:
                self._known[key] = divided(variant, self.program.templates[variant.template])
            parts[name] = replace(self._known[key], name=name)
        tried = replace(tried, variants=parts)
        numbers = problem(tried, options)
        return decide(tried, numbers if limited else replace(numbers, memory=None), options, EFFORT).makespan

    def corners(self, variant: Variant) -> list[StashChoice]:
        """What is best at some price, prices falling; see csc.planning.rematerialise."""
        key = (variant.name, AUTO)
        if key not in self._known:
            self._known[key] = savings(*self._priced(variant))
        return self._known[key]

    def names(self, variant: Variant, saving: StashChoice) -> Saves:
        """The names of what a saving keeps; None if it runs no work again, as that keeps all that B reads."""
        network = _network(variant, self.program.templates[variant.template], self.hardware)
        if not any(network.steps[i].seconds for i in saving.again):
            return None
        return tuple(network.nodes[i].name for i in sorted(saving.kept_steps))

    def _priced(self, variant: Variant) -> tuple[Sequence[Candidate], Sequence[int]]:
        """The steps with what it takes to run them again as the functions will run, and those that are needed."""
        network = _network(variant, self.program.templates[variant.template], self.hardware)
        if not self.fuse:
            return network.steps, network.needed
        steps = [
            step
            if step.seconds is None or node.op != "call_function" or _stands_alone(node)
            else replace(step, seconds=0.0)
            for step, node in zip(network.steps, network.nodes)
        ]
        return steps, network.needed


def _network(
    variant: Variant, template: Template, hardware: Hardware, banned: Callable[[fx.Node], bool] = lambda node: False
) -> _Network:
    """F of the variant in numbers. Parameters and tables are there anyway, and so are views of them."""
    parts = parts_of(variant, template)
    free = {n for n in g.placeholders(variant.pruned) if n.meta["role"][0] in ("parameter", "shared", "tangent")}
    nodes = [n for n in variant.pruned.nodes if n in parts.in_f and n not in free]
    place = {node: i for i, node in enumerate(nodes)}
    steps = []
    for node in nodes:
        inputs = tuple(place[used] for used in node.all_input_nodes if used in place)
        if node.op == "placeholder":
            steps.append(Candidate((), dense_bytes(node), None))
            continue
        call = call_of(node)
        time = seconds(Kernels((call,)), hardware) if call is not None else 0.0
        kept = None if is_cheap(node) or not isinstance(node.meta["val"], torch.Tensor) else held_bytes([node])
        steps.append(Candidate(inputs, kept, None if _is_fixed(node) or banned(node) else time))
    later = [n for n in variant.pruned.nodes if n.op == "call_function" and n in parts.in_b | parts.in_w]
    read = {used for node in later for used in node.all_input_nodes} | {*parts.dx, *parts.dw}
    return _Network(tuple(steps), tuple(nodes), tuple(i for node, i in place.items() if node in read))


def _computes(node: fx.Node) -> bool:
    """A matmul, convolution or attention."""
    call = call_of(node)
    return call is not None and call.flops > 0


def _stands_alone(node: fx.Node) -> bool:
    """A call that Inductor does not make part of its neighbours' kernels, or that makes much less than it reads."""
    call = call_of(node)
    if call is None:  # a view, an item, a number
        return False
    read = max(
        (dense_bytes(operand) for operand in node.all_input_nodes if isinstance(operand.meta["val"], torch.Tensor)),
        default=0,
    )
    value = node.meta["val"]
    smaller = isinstance(value, torch.Tensor) and SMALLER * dense_bytes(node) <= read
    return not fusible(node) or (smaller and not is_elementwise(node))


def _is_fixed(node: fx.Node) -> bool:
    """True for a random draw, attention over several ranks, an opaque module, and the items of what these return."""
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    return is_random(maker) or g.op_name(maker).startswith(("csc::context_", "csc::opaque"))
