"""The planning problem of a Program: its regions and values as numbers, and where ranks encode ahead."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from csc.passes.batch_loss import held

from csc import devices
from csc.analysis.costs import RegionTimes, recorded_bytes, region_costs, stored_dtypes, value_bytes, working
from csc.analysis.hardware import Hardware, Wire, hardware
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.ir.program import LOSS, Options, Program
from csc.planning.encode_ahead import AheadPlan, fit_ahead
from csc.planning.plan import PipelinePlan
from csc.planning.problem import Problem, RankKind, Unit, Value, unequal
from csc.simulation.pipeline import Link, Network, RankNodes

# --- The planning problem of a Program: its regions and values as numbers --------------------------------------------
#
# The passes `partition` and `schedule` ask it.


def profiles(program: Program, options: Options) -> tuple[Hardware, ...]:
    """By pipeline rank what the options name, else one for the device that the program was captured on."""
    named = options.hardware or devices.profile(program.device)
    names = named if isinstance(named, tuple) else (named,) * options.mesh.pp
    known = {name: hardware(name) for name in names}
    return tuple(known[name] for name in names)


def chosen_hardware(program: Program, options: Options) -> Hardware:
    """The profile of the pipeline ranks; of several the slowest, for which the others wait."""
    return min(profiles(program, options), key=lambda profile: profile.peak["bfloat16"] * profile.matmul_efficiency)


def batch_loss_bytes(program: Program, options: Options) -> int:
    """What a loss over the whole batch holds on each rank of its stage."""
    if program.batch_loss is None:
        return 0
    return held(program.batch_loss, options.microbatches, options.microbatches * options.mesh.dp)


def problem(program: Program, options: Options) -> Problem:
    """Units are the regions in order. The memory limit is the options', else what hardware chosen by name leaves."""
    hardware = profiles(program, options)
    costs = _costs(program, hardware[0], options)
    of_variant = {name: working(variant, fuse=options.fuse) for name, variant in program.variants.items()}
    besides = recorded(program, options)
    head = batch_loss_bytes(program, options)
    units = tuple(
        replace(
            Unit(**vars(cost), working=of_variant[region.variant]),
            state=cost.state + besides[region.variant] + (head if LOSS in region.outputs else 0),
        )
        for cost, region in zip(costs, program.regions, strict=True)
    )
    most = limits(program, options)
    left = [None] * options.mesh.pp if most is None else list(most)
    result = Problem(
        units, values(program, options.mesh), options.mesh.pp, options.microbatches, left[0],
        links(hardware, options.mesh),
        scale=None, gathering=gathering(hardware, options), waiting=True,
        action=max(profile.action for profile in hardware), handling=max(profile.handling for profile in hardware),
    )  # fmt: skip
    alike: dict[tuple[str, float | None], list[int]] = {}
    for rank in range(options.mesh.pp):
        named = options.hardware[rank] if isinstance(options.hardware, tuple) else ""
        alike.setdefault((named, left[rank]), []).append(rank)
    if len(alike) == 1:
        return result
    kinds = [
        RankKind(
            hardware[members[0]].name,
            tuple(members),
            tuple(
                (cost.forward, cost.backward_input, cost.backward_weight)
                for cost in _costs(program, hardware[members[0]], options)
            ),
            memory,
        )
        for (_, memory), members in alike.items()
    ]
    return unequal(result, kinds)


def recorded(program: Program, options: Options) -> dict[str, int]:
    """By variant the bytes that cuda_graphs takes on the device."""
    takes = options.cuda_graphs and devices.records(program.device)
    stored = stored_dtypes(program)
    return {name: recorded_bytes(variant, stored[name]) if takes else 0 for name, variant in program.variants.items()}


def _costs(program: Program, profile: Hardware, options: Options) -> list[RegionTimes]:
    """The regions on a rank of this profile."""
    ranks = math.prod(options.mesh.sizes(Group.DATA))
    return region_costs(program, profile, zero=options.zero, ranks=ranks, fuse=options.fuse, mesh=options.mesh)


def gathering(own: Sequence[Hardware], options: Options) -> Link:
    """How data-parallel ranks get each other's shards: all but its own come to each, over the slowest of its links."""
    shared = options.mesh.replicas_share_ranks  # at positions in front, which have fewer to gather from
    ranks = options.mesh.group(Group.DATA, 0, [options.mesh.pp - 1] if shared else None)
    count = len(ranks) - 1
    if not count:
        return Link()
    apart = [len({rank // profile.ranks_per_node for rank in (ranks[0], ranks[-1])}) > 1 for profile in own]
    wires = [profile.between if far else profile.within for profile, far in zip(own, apart)]
    latency, bandwidth = max(wire.latency for wire in wires), min(wire.bandwidth for wire in wires)
    return Link(latency * count, bandwidth * len(ranks) / count)


def limits(program: Program, options: Options) -> tuple[float, ...] | None:
    """What each pipeline rank may hold, in bytes; None: nobody says."""
    memory = options.memory
    if memory is not None:
        return tuple(map(float, memory)) if isinstance(memory, tuple) else (float(memory),) * options.mesh.pp
    return (
        tuple(profile.memory - profile.reserved for profile in profiles(program, options)) if options.hardware else None
    )


def limit(program: Program, options: Options) -> float | None:
    """What the rank may hold that may hold the most; None: nobody says."""
    limits_found = limits(program, options)
    return None if limits_found is None else max(limits_found)


def network(profile: Hardware) -> Network:
    """The links of a hardware profile, for ranks that stand in a row."""
    return Network(
        _link(profile.within), _link(profile.between), profile.ranks_per_node, answered=profile.answered
    )  # fmt: skip


def links(own: Sequence[Hardware], mesh: Mesh) -> Network:
    """The links between pipeline ranks. A rank of the pipeline is a device for each index on the other axes of the
    mesh; devices fill nodes in the order of their global ranks, and a node has devices of one profile.
    """
    node, free, before = -1, 0, None
    of_device: list[int] = []
    for device in range(mesh.size):
        position = mesh.coordinates(device).pp
        if not free or own[position] is not before:
            node, free, before = node + 1, own[position].ranks_per_node, own[position]
        free -= 1
        of_device.append(node)
    most = max(range(mesh.pp), key=lambda position: math.prod(mesh.extent(position)))
    widest = [rank for rank in range(mesh.size) if mesh.coordinates(rank).pp == most]
    nodes = [[of_device[mesh.sender(rank, position)] for rank in widest] for position in range(mesh.pp)]
    known = network(own[0])
    in_a_row = all(node == [rank // own[0].ranks_per_node] for rank, node in enumerate(nodes))
    if in_a_row and all(profile == own[0] for profile in own):
        return known
    places = (RankNodes(tuple(profile), _link(p.within), _link(p.between)) for profile, p in zip(nodes, own))
    return replace(known, places=tuple(places))


def _link(wire: Wire) -> Link:
    return Link(wire.latency, wire.bandwidth)


def values(program: Program, mesh: Mesh | None = None) -> tuple[Value, ...]:
    """The values that regions hand to each other, with their bytes: what a rank sends. mesh: of one rank."""
    position = {region.name: i for i, region in enumerate(program.regions)}
    components = [region.component for region in program.regions]
    readers: dict[str, dict[int, bool]] = {}
    for region in program.regions:
        for value, needed in zip(region.activations, region.dx):
            of_value = readers.setdefault(value, {})
            of_value[position[region.name]] = of_value.get(position[region.name], False) or needed
    sizes = value_bytes(program)
    values_found = []
    for region in program.regions:
        for value in region.outputs:
            if value in readers:
                maker = position[region.name]
                tp_there, back = _receivers(mesh, components, maker, readers[value])
                size, gradient = sizes[value]
                values_found.append(
                    Value(
                        maker, tuple(readers[value]), tuple(readers[value].values()), size * tp_there, gradient * back
                    )
                )
    return tuple(values_found)


def _receivers(mesh: Mesh | None, components: Sequence[str], maker: int, readers: Collection[int]) -> tuple[int, int]:
    """To how many ranks each rank of what makes a value sends it, and each that reads it the gradient. Or from how many
    it comes, if that is more: a rank works for several replicas.
    """
    if mesh is None:
        return 1, 1
    replicas, here = mesh.extent_of(components[maker])
    others = [mesh.extent_of(components[reader]) for reader in readers if components[reader] != components[maker]]
    several = mesh.dp // min([replicas, *(other for other, _ in others)])
    tp_there = max((tp for _, tp in others), default=here)
    return several * max(1, tp_there // here), several * max(1, here // tp_there)


def names(program: Program) -> tuple[str, ...]:
    """The names of the values of `values`, in the same order."""
    read = {value for region in program.regions for value in region.activations}
    return tuple(value for region in program.regions for value in region.outputs if value in read)


# --- Where ranks encode for the next step ----------------------------------------------------------------------------
#
# The program's frozen encoder is no part of a step (pass `features`).


def encoded_ahead(program: Program, decided: PipelinePlan, options: Options) -> AheadPlan | None:
    """None: nothing is left out of the step, no stage reads what is, or replicas share ranks."""
    apart = program.features
    if apart is None or options.mesh.replicas_share_ranks:
        return None
    readers = {stage.rank for stage in program.stages if set(apart.entries).intersection(stage.inputs)}
    if not readers:
        return None
    alone = replace(program, regions=apart.regions, templates=apart.templates, variants=apart.variants)
    costs = region_costs(alone, chosen_hardware(program, options), fuse=options.fuse, mesh=options.mesh)
    sizes = value_bytes(alone)
    size = sum(sizes[value][0] for value in apart.values)
    most = limits(program, options) or [float("inf")] * options.mesh.pp
    left = [limit - peak for limit, peak in zip(most, decided.peak_memory, strict=True)]
    room = [
        room_of_rank / size - options.microbatches * (rank in readers) for rank, room_of_rank in enumerate(left)
    ]  # the step's own
    seconds = sum(cost.forward for cost in costs)
    return fit_ahead(decided.pipeline, decided.schedule, seconds, readers, room)
