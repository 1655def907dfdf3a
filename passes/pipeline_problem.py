"""The planning problem of a Program: its regions and values as numbers. The passes `partition` and `schedule` ask it.

problem(program, options) -> Problem             needs pass `split`
chosen_hardware(program, options) -> Hardware    the profile that turns work into seconds
"""

from __future__ import annotations

import math

from csc import devices
from csc.analysis.costs import region_costs, value_bytes
from csc.analysis.hardware import Hardware, Wire, hardware
from csc.ir.groups import Group
from csc.ir.program import Options, Program
from csc.planning.problem import Problem, Unit, Value
from csc.simulation.pipeline import Link, Network


def chosen_hardware(program: Program, options: Options) -> Hardware:
    """The profile that the options name, else one for the device that the program was captured on."""
    return hardware(options.hardware or devices.profile(program.device))


def problem(program: Program, options: Options) -> Problem:
    """Units are the regions in order. The memory limit is the options', else that of hardware chosen by name, without
    what one region makes again while its B runs, as far as it is not in what B leaves for W.
    """
    profile = chosen_hardware(program, options)
    ranks = math.prod(options.mesh.sizes(Group.DATA))
    costs = region_costs(program, profile, zero=options.zero, ranks=ranks)
    units = tuple(
        Unit(
            name=cost.name,
            component=cost.component,
            forward=cost.forward,
            backward_input=cost.backward_input,
            backward_weight=cost.backward_weight,
            has_b=cost.has_b,
            has_w=cost.has_w,
            saved=cost.saved,
            kept=cost.kept,
            state=cost.state,
            gathered=cost.gathered,
        )
        for cost in costs
    )
    memory = limit(program, options)
    if memory is not None:
        memory -= max(0, *(cost.again - max(0, cost.kept - cost.saved) for cost in costs))
    return Problem(
        units, values(program), options.mesh.pp, options.microbatches, memory, network(profile), scale=None,
        gathering=gathering(profile, options),
    )  # fmt: skip


def gathering(profile: Hardware, options: Options) -> Link:
    """How data-parallel ranks get each other's shards: all but its own come to each, over the slowest of its links."""
    ranks = options.mesh.group(Group.DATA, 0)
    wire = profile.within if ranks[-1] < profile.ranks_per_node else profile.between
    others = len(ranks) - 1
    return Link(wire.latency * others, wire.bandwidth * len(ranks) / others) if others else Link()


def limit(program: Program, options: Options) -> float | None:
    """What one rank may hold, in bytes; None: nobody says."""
    if options.memory is not None:
        return float(options.memory)
    return chosen_hardware(program, options).memory if options.hardware else None


def network(profile: Hardware) -> Network:
    """The links of a hardware profile."""
    return Network(_link(profile.within), _link(profile.between), profile.ranks_per_node)


def _link(wire: Wire) -> Link:
    return Link(wire.latency, wire.bandwidth)


def values(program: Program) -> tuple[Value, ...]:
    """The values that regions hand to each other, with their bytes."""
    position = {region.name: i for i, region in enumerate(program.regions)}
    readers: dict[str, dict[int, bool]] = {}
    for region in program.regions:
        for value, needed in zip(region.activations, region.dx):
            of_value = readers.setdefault(value, {})
            of_value[position[region.name]] = of_value.get(position[region.name], False) or needed
    sizes = value_bytes(program)
    return tuple(
        Value(
            maker=position[region.name],
            readers=tuple(readers[value]),
            gradient=tuple(readers[value].values()),
            size=sizes[value][0],
            gradient_size=sizes[value][1],
        )
        for region in program.regions
        for value in region.outputs
        if value in readers
    )


def names(program: Program) -> tuple[str, ...]:
    """The names of the values of `values`, in the same order."""
    read = {value for region in program.regions for value in region.activations}
    return tuple(value for region in program.regions for value in region.outputs if value in read)
