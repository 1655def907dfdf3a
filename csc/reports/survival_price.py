"""What `survive=` takes beside the plan: memory of the fullest rank, and what copies of gradients send in a step.

Sizes are bytes of one rank, as the plan accounts for them (csc.analysis.costs); the links are those of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from csc.analysis.costs import stored_dtypes, variant_cost
from csc.driver.compiled import CompiledModel
from csc.driver.options import of_fewer, refuse_beside_survive
from csc.errors import InputError
from csc.ir.groups import Group
from csc.ir.program import Options, Program
from csc.passes.pipeline_problem import profiles
from csc.runtime.survival import Survive, check
from csc.simulation.page import bytes_text, seconds_text
from csc.simulation.pipeline import Link


@dataclass(frozen=True)
class SurvivalPrice:
    """sums: of gradients, at the end of a step, beside those of the own replica. optimizer: of the shards that a rank
    steps so that other replicas have them too (ZeRO). copies: of gradients, on their way and held for another rank.
    sends: how many of them in a step, each of so many bytes, and seconds for all. before, after: microbatches of the
    busiest replica, of a whole job and after all failures. mirror: a neighbour's parameters, gradients and
    optimizer's state; fewer: the mesh that goes on without one rank, "" where replicas are lost. steps: what the step
    is planned to take then, in seconds: of a replica fewer, and of all ranks that are left.
    """

    failures: int
    sums: int
    optimizer: int
    copies: int
    sends: int
    size: int
    seconds: float
    before: int
    after: int
    mirror: int = 0
    fewer: str = ""
    steps: Mapping[str, float] = field(default_factory=dict)

    def sentences(self, makespan: float) -> list[str]:
        """makespan: of the step as it was planned."""
        several = "s" * (self.failures > 1)
        share = f"{self.seconds / makespan if makespan else math.inf:.1%} of the step"
        if self.fewer:
            more = f", with {self.after} microbatches each in place of {self.before}" * (self.after != self.before)
            goes_on = (
                f"survive={self.failures}, mirrored: when a rank is killed the others go on as {self.fewer}{more}; "
                "the step that was under way begins again"
            )
            if not self.sends:
                return [goes_on, "its memory: none, as replicas are each other's mirrors", *self._after()]
            return [
                goes_on,
                f"its memory, which the plan does not have: {bytes_text(self.mirror)} of a neighbour's parameters, "
                "gradients and optimizer's state, which the optimizer steps, too",
                f"copies: {bytes_text(self.size)} of gradients are sent at the end of a step: "
                f"{seconds_text(self.seconds)} at the speed of the links, {share}",
                *self._after(),
            ]
        lines = [
            f"survive={self.failures}: {self.failures} killed rank{several} may take as many replicas out; those that "
            f"are left do {self.after} microbatches each in place of {self.before}",
            f"its memory, which the plan does not have: {bytes_text(self.sums)} of gradients at the end of a step"
            + (f", {bytes_text(self.optimizer)} of the optimizer's state" if self.optimizer else "")
            + (f", {bytes_text(self.copies)} of copies" if self.copies else ""),
        ]
        if self.sends:
            lines.append(
                f"copies: {bytes_text(self.size)} are sent {self.sends} times a step, beside the work: "
                f"{seconds_text(self.seconds)} at the speed of the links, {share}"
            )
        return [*lines, *self._after()]

    def _after(self) -> list[str]:
        """The planned steps of the ways to go on."""
        planned = ", ".join(f"{seconds_text(seconds)} as {way}" for way, seconds in self.steps.items())
        return [f"a step afterwards is planned to take {planned}"] if planned else []


def price_of(compiled: CompiledModel, survive: Survive | None) -> SurvivalPrice | None:
    """Of a model's program; None where nothing is to be survived. InputError for ranks that cannot be lost."""
    if survive is None:
        return None
    refuse_beside_survive(compiled.options, mirror=survive.mirror)
    check(compiled.options.mesh, survive, compiled.options.zero)
    price = survival_price(compiled.program, compiled.options, survive)
    return replace(price, steps=dict(_steps_after(compiled, survive)))


def _steps_after(compiled: CompiledModel, survive: Survive) -> Iterator[tuple[str, float]]:
    """What goes on, and the seconds of its planned step; without what cannot be planned."""
    options = compiled.options
    ways = {}
    if options.mesh.dp > survive.failures and options.zero < 3:
        left = replace(options.mesh, dp=options.mesh.dp - survive.failures)
        ways[f"{left}"] = replace(
            options, mesh=left, microbatches=-(-options.mesh.dp * options.microbatches // left.dp)
        )
    with suppress(InputError):  # what has no mirrors has that way alone
        check(options.mesh, Survive(1, mirror=True), options.zero)
        fewer = of_fewer(options)
        ways[f"{fewer.mesh} (mirror=True)"] = fewer
    for way, later in ways.items():
        with suppress(InputError):  # it does not fit, or has no parts for so many stages
            other = compiled.with_options(
                check=False, mesh=later.mesh, microbatches=later.microbatches, cuts=None, stages=None, placement=None,
                chunks=None, schedule="auto",
            )  # fmt: skip
            if (plan := other.program.plan) is not None:
                yield way, plan.makespan


def survival_price(program: Program, options: Options, survive: Survive) -> SurvivalPrice:
    """Of a planned Program; that it can lose so many ranks was checked before."""
    mesh, zero = options.mesh, options.zero
    stored = stored_dtypes(program)
    costs = {name: variant_cost(variant, False, stored[name]) for name, variant in program.variants.items()}
    variant = {region.name: region.variant for region in program.regions}
    ranks, shards = math.prod(mesh.sizes(Group.DATA)), mesh.dp // (survive.failures + 1) * mesh.cp
    sums, states, size, piece, leaving = 0, 0, 0, 0, 0
    for position in range(mesh.pp):
        own = [costs[variant[name]] for stage in program.stages if stage.rank == position for name in stage.regions]
        _, gradients, state = (sum(kind) for kind in zip(*(cost.held(0, 1) for cost in own)))
        parameters, planned, planned_state = (sum(kind) for kind in zip(*(cost.held(zero, ranks) for cost in own)))
        piece, leaving = max(piece, parameters + planned + planned_state), max(leaving, planned)
        size, sums = max(size, gradients), max(sums, 2 * gradients - planned)
        states = max(states, -(-state // shards) - planned_state if zero else 0)
    if survive.mirror:
        fewer = of_fewer(options)
        if mesh.dp > 1 and zero < 3:
            piece, leaving = 0, 0
        seconds = _seconds(program, options, leaving) if leaving else 0.0
        return SurvivalPrice(
            survive.failures, 0, 0, 0, 1 if leaving else 0, leaving, seconds, options.microbatches, fewer.microbatches,
            piece, str(fewer.mesh),
        )  # fmt: skip
    sends = -(-options.microbatches // survive.copies) if survive.copies else 0
    left, total = mesh.dp - survive.failures, mesh.dp * options.microbatches
    return SurvivalPrice(
        survive.failures, sums, states, 2 * size if sends else 0, sends, size,
        sends * _seconds(program, options, size), options.microbatches, -(-total // left),
    )  # fmt: skip


def _seconds(program: Program, options: Options, size: int) -> float:
    """That a copy takes from a rank to that of the same place in the next replica, over the slowest of the links."""
    own = profiles(program, options)
    wires = [one.between if options.mesh.size > one.ranks_per_node else one.within for one in own]
    return max(Link(wire.latency, wire.bandwidth).seconds(size) for wire in wires)
