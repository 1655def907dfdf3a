"""What a call gets from the other ranks of its stage: collectives of tensor and context parallelism, as csc runs them.

Terms: the *payload* is what one rank brings to a collective. Each rank sends the others what they need, all at once
(csc.kernels.collectives, csc.runtime.context_group): of a small all-reduce its whole payload goes to each of them; in a
large one each rank sums a piece for all.

    exchange(node) -> Exchange or None       of a call of a graph: over which axis, and how many bytes come to a rank
    wires(mesh, hardware, component) -> {axis: (ranks, Wire)}      the slowest wire of any group of ranks along the axis
    within(known) -> {axis: (ranks, Wire)}        of components whose layers fewer ranks divide
    seconds(exchange, wires) -> float        0 along an axis that is not among the wires

Attention starts on a rank's own keys while those of others come, so it takes the longer of the two; all other
collectives are waited for. Of the keys all are charged that any query could see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx

from csc.analysis.hardware import Hardware, Wire
from csc.ir import graph as g
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.kernels.collectives import arriving

DIVIDED = "csc::context_gather_backward"  # each rank gets a part of what every rank has
WHOLES = ("csc::context_gather", DIVIDED, "csc::context_whole")
SCATTERED = "csc::scatter_pieces"
TO_SHARDS = "csc::reduce_scatter"
SUM = "csc::all_reduce"
TOLD = ("csc::divided_loss", "csc::divided_linear_cross_entropy")  # three numbers a label
PIECES = ("csc::gather_pieces", SCATTERED)
ATTENTION = "csc::context_attention"
Wires = Mapping[str, tuple[int, Wire]]


class Exchange(NamedTuple):
    """axis: tp or cp. payload: bytes. ranks: 0: all of the axis. divided: as of DIVIDED. hidden: behind the compute.
    total: of an all-reduce.
    """

    axis: str
    payload: int
    ranks: int
    divided: bool
    hidden: bool
    total: bool = False


def exchange(node: fx.Node) -> Exchange | None:
    """None of a call that meets nobody."""
    name = g.op_name(node)
    if name in (SUM, "csc::all_gather", "csc::gather_shared", TO_SHARDS):
        bound = g.bind(node)
        return Exchange("tp", _bytes(bound["x"]), bound.get("ranks", 0), name == TO_SHARDS, False, name == SUM)
    if name in TOLD:
        told, narrow = g.bind(node)["labels"].meta["val"].numel(), node.args[0].meta["val"].itemsize  # type: ignore[union-attr]
        return Exchange("tp", 3 * told * max(4, narrow), 0, False, False)
    if name in PIECES:
        bound = g.bind(node)
        given = next(iter(bound.values()))
        return Exchange("tp", _bytes(given), bound["each"], name == SCATTERED, False)
    if name in WHOLES:
        given, made = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        whole, shard = max(given.numel(), made.numel()), min(given.numel(), made.numel())
        return Exchange("cp", given.numel() * given.itemsize, -(-whole // max(1, shard)), name == DIVIDED, False)
    if name.startswith(ATTENTION):
        bound = g.bind(node)
        payload = _bytes(bound["k"]) + _bytes(bound["v"])
        back = 2 if name != ATTENTION else 1  # keys and values again, and their gradients to where they are from
        tokens = bound["k"].meta["val"].shape[-2]
        return Exchange("cp", back * payload, -(-bound["keys"] // max(1, tokens)), False, True)
    return None


def wires(mesh: Mesh, hardware: Hardware, component: str = "") -> dict[str, tuple[int, Wire]]:
    """Devices fill nodes in the order of their global ranks. component: with as many tp ranks as it has."""
    found = {}
    positions = [place for place in range(mesh.pp) if mesh.width(place) == mesh.tp_ranks(component)]
    met = {"cp": Group.CONTEXT, "tp": Group.TENSOR}
    if component in mesh.held_in_copies:
        met["division"] = Group.division(mesh.dividing(component))
    for axis, group in met.items():
        listed = [ranks for place in positions for ranks in mesh.groups(group, [place])]
        most = max(map(len, listed), default=1)
        if most == 1:
            continue
        apart = any(len({rank // hardware.ranks_per_node for rank in ranks}) > 1 for ranks in listed)
        found[axis] = (most, hardware.between if apart else hardware.collective or hardware.within)
    if (mesh.components or mesh.own_ranks) and "cp" not in found and "tp" in found:
        found["cp"] = found["tp"]  # which alone share tokens then
    if mesh.own_cp and "tp" not in found:
        found["tp"] = found["cp"]  # which alone share out samples then
    return found


def within(known: Wires) -> Wires:
    """Of components whose layers fewer ranks divide, which these sums meet."""
    return {**known, "tp": known["division"]} if "division" in known else known


def seconds(met: Exchange, known: Wires) -> float:
    """On the wire, with the latency of the collective."""
    if met.axis not in known:
        return 0.0
    most, wire = known[met.axis]
    ranks = met.ranks or most
    if ranks == 1:
        return 0.0
    times, arrives = 1, met.payload * (ranks - 1) / (ranks if met.divided else 1)
    if met.total:
        times, arrives = arriving(met.payload, ranks)
    return times * wire.latency + arrives / wire.bandwidth


def _bytes(node: Any) -> int:
    val = node.meta["val"]
    return int(val.numel() * val.itemsize)
