"""What a step takes behind its last action: gradients added over the ranks that have parts of them, the optimizer's
step.

Terms: see csc.ir.groups. The ring algorithms' costs: an all-reduce moves 2 (n - 1) / n of the bytes over the slowest of
its links, a reduce-scatter or an all-gather half of that. AdamW reads a parameter, its gradient and two moments, and
writes all but the gradient; with `zero` each rank does its share, and the parameters go round again but with zero=3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from csc.passes.pipeline_problem import profiles

from csc.analysis.hardware import Hardware, Wire
from csc.ir.groups import Group
from csc.ir.program import Options, Parameter, Program, gradient_placement

MOVED = 7  # times a parameter's size, of AdamW


@dataclass(frozen=True)
class StepEnd:
    """Seconds of one pipeline rank."""

    reduce: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.reduce + self.optimizer


def step_ends(program: Program, options: Options) -> list[StepEnd]:
    """Of a planned Program."""
    held = [[name for stage in program.stages if stage.rank == rank for name in stage.regions]
            for rank in range(options.mesh.pp)]  # fmt: skip
    return _ends(program, options, held)


def seconds_behind(
    program: Program, options: Options, stages: Sequence[Sequence[int]], placement: Sequence[int]
) -> float:
    """Seconds behind the last action of the rank that takes the longest. stages: the numbers of their regions."""
    held: list[list[str]] = [[] for _ in range(options.mesh.pp)]
    for units, rank in zip(stages, placement, strict=True):
        held[rank] += [program.regions[unit].name for unit in units]
    return max(end.seconds for end in _ends(program, options, held))


def least_behind(program: Program, options: Options) -> float:
    """Seconds that no plan falls below: some rank holds an equal part at least of what is trained."""
    names = {name for region in program.regions for name in region.parameters}
    trained = [parameter for parameter in program.parameters if parameter.trainable and parameter.name in names]
    size = sum(_local(parameter) * parameter.dtype.itemsize for parameter in trained) / options.mesh.pp
    profile = profiles(program, options)[0]
    ends = (_end({Group.DATA: size}, replace(options, mesh=mesh), profile, 0) for mesh in options.mesh.orders())
    return min(end.seconds for end in ends)


def _ends(program: Program, options: Options, regions: Sequence[Collection[str]]) -> list[StepEnd]:
    """By the hardware profile of each rank; nothing is taken to run beside the last actions. regions: by pipeline rank,
    their names.
    """
    trained = {parameter.name: parameter for parameter in program.parameters if parameter.trainable}
    of_region = {region.name: region.parameters for region in program.regions}
    ends = []
    for rank, profile in enumerate(profiles(program, options)):
        sizes: Counter[Group] = Counter()
        for name in {name for region in regions[rank] for name in of_region[region]} & trained.keys():
            parameter = trained[name]
            sizes[gradient_placement(parameter).parts or Group.DATA] += _local(parameter) * parameter.dtype.itemsize
        ends.append(_end(sizes, options, profile, rank))
    return ends


def _end(sizes: Mapping[Group, float], options: Options, profile: Hardware, rank: int) -> StepEnd:
    """Of the pipeline rank. sizes: bytes that it holds of what is trained, by the group whose ranks have parts of the
    gradients.
    """
    steps_on = len(options.mesh.group(Group.DATA, 0, [rank])) if options.zero else 1
    seconds = MOVED * sum(sizes.values()) / steps_on / profile.reached_bandwidth
    groups = {group: options.mesh.group(group, 0, [rank]) for group in sizes}
    return StepEnd(sum(_reduced(sizes[group], groups[group], profile, options.zero) for group in sizes), seconds)


def _local(parameter: Parameter) -> int:
    """Entries of what a rank holds; all that tensor-parallel ranks hold is of one size."""
    if not parameter.boxes:
        return parameter.numel
    return math.prod(sum(stop - start for start, stop in ranges) for ranges in parameter.boxes[0])


def _reduced(size: float, group: tuple[int, ...], profile: Hardware, zero: int) -> float:
    """Gradients to where they are needed, and with zero=1 and 2 parameters back to all."""
    count = len(group) - 1
    if not count or not size:
        return 0.0
    nodes = {rank // profile.ranks_per_node for rank in group}
    wire: Wire = profile.within if len(nodes) == 1 else profile.between
    rounds = 1 if zero >= 3 else 2
    return rounds * (count * wire.latency + size * count / len(group) / wire.bandwidth)
