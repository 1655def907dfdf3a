"""Which meshes so many devices can make for the samples of one step, and what no plan on one beats."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from csc.ir.mesh import Mesh
from csc.planning.partition_bound import round_trip, shared_lower_bound
from csc.planning.problem import Problem, Unit
from csc.simulation.pipeline import Network

# --- Which meshes so many devices can make for the samples of one step -----------------------------------------------
#
# Terms
#   layout      a mesh with its microbatches: each of dp replicas takes `microbatches` of `samples` samples through its
#               pipeline
#   node        devices that fast links join; tensor-parallel ranks stand within one
#   form        how ranks divide a model: whether those of tp share out tokens between products (`sequence_parallel`);
#               components of which fewer of them divide the layers, and all share out the samples
#               (`vision_tower.tp=1`); those of which the ranks of cp share out the samples (`vision_tower.cp=1`) or
#               the tokens (`context`)
#   division    what layouts that need the same traced graphs have in common: tp, cp, form and the samples of a
#               microbatch


CONTEXT = 8  # ranks that share a sequence, at most


@dataclass(frozen=True)
class MeshForm:
    """own: components with a tp of their own, and this; whole: those with a cp of 1; spread: those whose tokens all
    ranks of cp share out.
    """

    own: tuple[tuple[str, int], ...] = ()
    sequence: bool = False
    whole: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()


PLAIN = MeshForm()


@dataclass(frozen=True)
class MeshDivision:
    """samples: of a microbatch."""

    tp: int
    cp: int
    samples: int
    form: MeshForm = PLAIN

    def __str__(self) -> str:
        named = [f"tp={self.tp}", f"cp={self.cp}", *(f"{component}.tp={tp}" for component, tp in self.form.own)]
        named += [f"{component}.cp=1" for component in self.form.whole]
        named += [f"context {component}={self.cp}" for component in self.form.spread]
        return ", ".join([*named, "sequence_parallel"] if self.form.sequence else named)


@dataclass(frozen=True)
class MeshLayout:
    """samples: of a microbatch. microbatches: of a replica. sequence: tokens are shared out between products. spread:
    components whose tokens all ranks of cp share out.
    """

    mesh: Mesh
    samples: int
    microbatches: int
    sequence: bool = False
    spread: tuple[str, ...] = ()

    @property
    def division(self) -> MeshDivision:
        form = MeshForm(tuple(self.mesh.own("tp").items()), self.sequence, tuple(self.mesh.own("cp")), self.spread)
        return MeshDivision(self.mesh.tp, self.mesh.cp, self.samples, form)

    def in_form(self, form: MeshForm) -> MeshLayout:
        """The same devices and samples; with a tp (cp) of 1 nothing of the form is about tp (cp)."""
        several = self.mesh.tp > 1
        mesh = self.mesh.with_own(tp=dict(form.own) if several else {}, cp=dict.fromkeys(form.whole, 1))
        spread = form.spread if self.mesh.cp > 1 else ()
        return replace(self, mesh=mesh, sequence=form.sequence and several, spread=spread)

    @property
    def context(self) -> dict[str, int]:
        """Of its components, as the option has it."""
        return dict.fromkeys(self.spread, self.mesh.cp)

    def __str__(self) -> str:
        shared = "".join(f", context {component}={self.mesh.cp}" for component in self.spread)
        shared += ", sequence_parallel" if self.sequence else ""
        return f"{self.mesh}{shared}, {self.microbatches} microbatches of {self.samples}"


def layouts(devices: int, step: int, sizes: Collection[int], node: int, regions: int) -> list[MeshLayout]:
    """All that use every device and every sample of a step alike, those of least cp and then tp first.

    step: samples of a step; sizes: samples that a microbatch may have; node: devices of a node; regions: of the model,
    of which each pipeline rank has one at least.
    """
    return [
        MeshLayout(Mesh(dp=dp, pp=pp, cp=cp, tp=tp), samples, step // (dp * samples))
        for cp in _divisors(devices, CONTEXT)
        for tp in _divisors(devices // cp, node)
        for samples in sorted(sizes)
        for pp in _divisors(devices // (tp * cp), regions)
        if step % ((dp := devices // (tp * cp * pp)) * samples) == 0
    ]


def _divisors(number: int, most: int) -> Iterator[int]:
    return (divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)


# --- What no plan on a mesh beats, told without planning: so that few layouts have to be planned ---------------------
#
# Before the first B of a microbatch all of its F have run, so a rank then holds what all of its units saved of it,
# beside its parameters, gradients and optimizer state; the fullest rank holds at least the mean of that. Whoever runs
# a unit holds what it takes while it runs, and its parameters whole.
#
# What a unit saves is held from the start of its F to the end of its B, and meanwhile at least the *way* passes: F of
# all that follows it and B of that, on the longest path. Bytes times seconds that all microbatches take so are no more
# than what all ranks have, beside what they hold anyhow, times the makespan.


def least_seconds(problem: Problem) -> float:
    """Messages and gathers take no time. See csc.planning.partition_bound for what leaves memory out."""
    work = shared_lower_bound(replace(problem, network=Network())).seconds
    if problem.memory is None:
        return work
    held = sum(unit.saved * seconds for unit, seconds in zip(problem.units, _ways(problem)) if unit.has_b)
    scales = problem.scale or (1.0,) * problem.microbatches
    needed = held * sum(scale * scale for scale in scales)
    room = problem.ranks * problem.memory - sum(unit.state for unit in problem.units)
    if not needed:
        return work if room >= 0 else math.inf
    return max(work, needed / room) if room > 0 else math.inf


def expected_seconds(problem: Problem) -> float:
    """No bound: with room for k microbatches a rank starts one whenever the first of k has come back. inf: for none."""
    least = least_seconds(problem)
    if problem.memory is None:
        return least
    held = sum(unit.state + unit.gathered for unit in problem.units) / problem.ranks
    saved = sum(unit.saved for unit in problem.units if unit.has_b) / problem.ranks
    room = problem.memory - held - max(unit.working for unit in problem.units)
    if room < saved:
        return math.inf
    waves = problem.microbatches / math.floor(room / saved) if saved else 0.0
    return max(least, waves * round_trip(problem))


def least_memory(problem: Problem) -> float:
    """In bytes. Microbatches are of one size, or the smallest counts."""
    scale = min(problem.scale or (1.0,))

    def held(unit: Unit) -> float:
        return unit.state + (unit.saved * scale if unit.has_b else 0.0)

    mean = sum(map(held, problem.units)) / problem.ranks
    return max(mean, *(held(unit) + unit.gathered + unit.working * scale for unit in problem.units))


def _ways(problem: Problem) -> list[float]:
    """By unit: seconds from the start of its F to the end of its B of one microbatch of scale 1, at least."""
    units = problem.units
    after = [0.0] * len(units)
    for value in sorted(
        problem.values, key=lambda value: -value.maker
    ):  # units stand in an order in which they can run
        for reader, needed in zip(value.readers, value.gradient):
            if needed:
                through = units[reader].forward + after[reader] + units[reader].backward_input
                after[value.maker] = max(after[value.maker], through)
    return [unit.forward + waited + unit.backward_input for unit, waited in zip(units, after)]
