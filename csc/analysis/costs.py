"""What F, B and W of every region cost: FLOPs, bytes moved, bytes held, seconds; from the nodes of their graphs."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from networkx.utils import UnionFind
from torch import fx
from torch.utils.flop_counter import flop_registry

from csc.analysis.hardware import Hardware, Seconds, Wire
from csc.analysis.operators.execution import (
    ATTENTIONS,
    FUSED_REDUCTIONS,
    LOOK_UPS,
    MATMULS,
    OF_MATRICES,
    base,
    block,
    is_view,
    maker,
)
from csc.analysis.operators.table import CONTEXT_ATTENTION, QUANTISED
from csc.ir import graph as g
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.ir.program import Program, Region, Variant
from csc.kernels.collectives import arriving
from csc.torch_private.exported import OpOverload

# --- What a call gets from the other ranks of its stage --------------------------------------------------------------
#
# These are collectives of tensor and context parallelism, as csc runs them.
#
# Terms: the *payload* is what one rank brings to a collective. Each rank sends the others what they need, all at once
# (csc.kernels.collectives, csc.runtime.context): of a small all-reduce its whole payload goes to each of them;
# in a large one each rank sums a piece for all.
#
# Attention starts on a rank's own keys while those of others come, so it takes the longer of the two; all other
# collectives are waited for. Of the keys all are charged that any query could see.


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
        return Exchange("tp", _bytes_sent(bound["x"]), bound.get("ranks", 0), name == TO_SHARDS, False, name == SUM)
    if name in TOLD:
        elements, narrow = g.bind(node)["labels"].meta["val"].numel(), node.args[0].meta["val"].itemsize  # type: ignore[union-attr]
        return Exchange("tp", 3 * elements * max(4, narrow), 0, False, False)
    if name in PIECES:
        bound = g.bind(node)
        operand = next(iter(bound.values()))
        return Exchange("tp", _bytes_sent(operand), bound["each"], name == SCATTERED, False)
    if name in WHOLES:
        operand, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        whole, shard = max(operand.numel(), result.numel()), min(operand.numel(), result.numel())
        return Exchange("cp", operand.numel() * operand.itemsize, -(-whole // max(1, shard)), name == DIVIDED, False)
    if name.startswith(ATTENTION):
        bound = g.bind(node)
        payload = _bytes_sent(bound["k"]) + _bytes_sent(bound["v"])
        back = 2 if name != ATTENTION else 1  # keys and values again, and their gradients to where they are from
        tokens = bound["k"].meta["val"].shape[-2]
        return Exchange("cp", back * payload, -(-bound["keys"] // max(1, tokens)), False, True)
    return None


def wires_between(mesh: Mesh, hardware: Hardware, component: str = "") -> dict[str, tuple[int, Wire]]:
    """Devices fill nodes in the order of their global ranks. component: with as many tp ranks as it has."""
    wires = {}
    positions = [place for place in range(mesh.pp) if mesh.width(place) == mesh.extent_of(component).width]
    met = {"cp": Group.CONTEXT, "tp": Group.TENSOR}
    if component in mesh.held_in_copies:
        met["division"] = Group.division(mesh.dividing(component))
    for axis, group in met.items():
        listed = [ranks for place in positions for ranks in mesh.groups(group, [place])]
        most = max(map(len, listed), default=1)
        if most == 1:
            continue
        apart = any(len({rank // hardware.ranks_per_node for rank in ranks}) > 1 for ranks in listed)
        wires[axis] = (most, hardware.between if apart else hardware.collective or hardware.within)
    if (mesh.own("tp") or mesh.in_front) and "cp" not in wires and "tp" in wires:
        wires["cp"] = wires["tp"]  # which alone share tokens then
    if mesh.own("cp") and "tp" not in wires:
        wires["tp"] = wires["cp"]  # which alone share out samples then
    return wires


def within_division(known: Wires) -> Wires:
    """Of components whose layers fewer ranks divide, which these sums meet."""
    return {**known, "tp": known["division"]} if "division" in known else known


def wire_seconds(met: Exchange, known: Wires) -> float:
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


def _bytes_sent(node: Any) -> int:
    val = node.meta["val"]
    return int(val.numel() * val.itemsize)


# --- Kernels that a graph runs, in numbers: their operators, FLOPs and bytes -----------------------------------------


@dataclass(frozen=True)
class KernelCall:
    """One kernel. dtype: of the operands, which decides the peak rate. mask: the table by which attention skips. meets:
    what it gets from other ranks. compiled: a product in a compiled function.
    """

    op: str
    dtype: str
    flops: int
    bytes: int
    mask: str = ""
    meets: Exchange | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Kernels:
    """The kernels of F, B or W, in order."""

    calls: tuple[KernelCall, ...] = ()

    @cached_property
    def flops(self) -> int:
        return sum(call.flops for call in self.calls)

    @cached_property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(call.bytes for call in self.calls)

    @property
    def kernels(self) -> int:
        return len(self.calls)

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(self.calls + other.calls)


# --- Work and traffic of a head and its loss in one call (csc.ir.graph.HEADS) ----------------------------------------
#
# Its logits are values of no graph.


# Times that each logit is read or written: made, its softmax a few rows at a time between two maxima; its gradient.
LOSS_PASSES, GRADIENT_PASSES = 5, 2


def products(node: fx.Node) -> int:
    _, to_x, to_weight, _ = g.bind(node)["output_mask"]
    return 1 + to_x + to_weight


def flops(node: fx.Node) -> int:
    tokens, classes, width, _ = _sizes(node)
    return 2 * tokens * classes * width * products(node)


def traffic(node: fx.Node) -> int:
    """The logits of all chunks, and for each chunk again the weight and the sum of its gradient."""
    bound = g.bind(node)
    tokens, classes, width, wide = _sizes(node)
    _, to_x, to_weight, to_bias = bound["output_mask"]
    passes = LOSS_PASSES + (GRADIENT_PASSES if to_x or to_weight or to_bias else 0) + to_x + to_weight + to_bias
    again = max(0, -(-tokens // bound["rows"]) - 1)
    weight = classes * width * bound["weight"].meta["val"].itemsize
    return tokens * classes * wide * passes + again * ((1 + to_x) * weight + 2 * to_weight * classes * width * wide)


def _sizes(node: fx.Node) -> tuple[int, int, int, int]:
    """(tokens, classes, width, bytes of a logit)."""
    bound = g.bind(node)
    classes, width = bound["weight"].meta["val"].shape
    return bound["labels"].meta["val"].numel(), classes, width, max(4, bound["weight"].meta["val"].itemsize)


# --- FLOPs and matmuls of a graph, from the shapes of its nodes and PyTorch's own formulas ---------------------------


class FlopCount(NamedTuple):
    """flops: floating-point operations (2 for a multiply-add); matmuls: calls of mm, addmm, bmm or baddbmm, and those
    inside of csc::linear_cross_entropy.
    """

    flops: int
    matmuls: int


def count(graph: fx.Graph | None) -> FlopCount:
    """The work of one run of the graph; zero for None. Ops without a formula (element-wise ones) count as zero."""
    if graph is None:
        return FlopCount(0, 0)
    flops = matmuls = 0
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            flops += call_flops(node)
            matmuls += _matmuls(node)
    return FlopCount(flops, matmuls)


def _matmuls(node: fx.Node) -> int:
    name = g.op_name(node)
    return products(node) if name in g.HEADS else int(name in MATMULS)


def call_flops(node: fx.Node) -> int:
    """The work of one call, by PyTorch's formula where it has one, else by those of csc's own operators."""
    assert isinstance(node.target, OpOverload)
    formula = flop_registry.get(node.target.overloadpacket)
    name = node.target._schema.name
    if formula is not None:
        arguments = fx.map_arg(node.args, _value)
        keywords = fx.map_arg(node.kwargs, _value)
        return int(formula(*arguments, **keywords, out_val=node.meta["val"]))
    if name.removesuffix("_backward") == CONTEXT_ATTENTION:
        return _context_attention(node, backward=name != CONTEXT_ATTENTION)
    if name in g.HEADS:
        return flops(node)
    if name in ATTENTIONS:  # what the mask hides too, as PyTorch's formulas do: how much depends on the batch
        return _attention(*fx.map_arg(node.args[:3], _value))
    if name.removesuffix("_backward") in ATTENTIONS:
        return 5 * _attention(*fx.map_arg(node.args[1:4], _value)) // 2
    return 0


def _context_attention(node: fx.Node, backward: bool) -> int:
    """A rank's queries over the keys of all ranks: the dispatch gives every rank an equal part of what is seen."""
    first = 1 if backward else 0
    query, key, value = (_value(argument) for argument in node.args[first : first + 3])  # type: ignore[arg-type]
    keys = node.args[8 if backward else 5]
    assert isinstance(keys, int)
    work = _attention(query, key, value) * keys // key.shape[-2]
    return 5 * work // 2 if backward else work


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _attention(query: Any, key: Any, value: Any) -> int:
    """Two products of attention, QK^T and PV; its backward computes five (QK^T again, dV, dP, dQ, dK)."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])


# --- What F, B or W costs with `fuse=True`: element-wise work runs in few kernels; values in between stay in them ----
#
# Terms: a call is *fusible* if it is element-wise, a reduction or a cast, as Inductor fuses them. A *group* is fusible
# calls that hand values to each other, over views too, with no other call on a way between them. It is one kernel,
# which reads what comes from outside once and writes what is read outside. A call that may wait runs with its first
# reader.


Groups = Mapping[fx.Node, fx.Node]  # by fusible call, one of its group, the same for all of them


def fusible(node: fx.Node) -> bool:
    """Whether Inductor makes the call part of its neighbours' kernel."""
    return is_elementwise(node) or g.op_name(node) in FUSED_REDUCTIONS


def is_elementwise(node: fx.Node) -> bool:
    """Whether each entry of the result follows from one of each operand."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def fused(graph: fx.Graph, calls: Sequence[tuple[fx.Node, KernelCall]]) -> Kernels:
    """The kernels, each group in the place of its first call."""
    kernel = dict(calls)
    members: dict[fx.Node, list[fx.Node]] = {}
    group = _groups(graph)
    for node in kernel:
        if node in group:
            members.setdefault(group[node], []).append(node)
    first = {nodes[0]: nodes for nodes in members.values()}
    found = []
    for node, call in calls:
        if node not in group:
            found.append(replace(call, compiled=call.op in OF_MATRICES | g.HEADS))
        elif node in first:
            found.append(_together(first[node], kernel))
    return Kernels(tuple(found))


def within_kernels(graph: fx.Graph) -> Set[fx.Node]:
    """Calls of which nothing is in memory, as every reader is in the same kernel."""
    group = _groups(graph)
    return {node for node, kernel in group.items() if all(group.get(reader) is kernel for reader in _readers(node))}


def _groups(graph: fx.Graph) -> Groups:
    """By levels: no way from a call to another of the same level leads over a call that is not fusible."""
    calls = [node for node in g.calls(graph) if node.target is not operator.getitem and not is_view(node)]
    level: dict[fx.Node, int] = {}
    for node in calls:
        makers = [producer for used in node.all_input_nodes if (producer := maker(used)) in level]
        level[node] = max((level[producer] + (not fusible(producer)) for producer in makers), default=0)
    for node in reversed(calls):
        if fusible(node):
            waits = min((level.get(reader, 0) for reader in _readers(node)), default=0)
            level[node] = max(level[node], waits)
    joined = [node for node in calls if fusible(node)]
    groups = UnionFind(joined)
    for node in joined:
        makers = [producer for used in node.all_input_nodes if level.get(producer := maker(used)) == level[node]]
        groups.union(node, *filter(fusible, makers))
    return {node: groups[node] for node in joined}


def _together(members: Sequence[fx.Node], kernel: Mapping[fx.Node, KernelCall]) -> KernelCall:
    inside = set(members)
    read = {
        producer: None
        for member in members
        for used in member.all_input_nodes
        if (producer := maker(used)) not in inside
    }
    written = [member for member in members if any(user not in inside for user in _readers(member))]
    moved = sum(_bytes_of_results(value) for value in (*read, *written))
    return KernelCall("fused", kernel[members[0]].dtype, sum(kernel[member].flops for member in members), moved)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, through views."""
    readers = []
    for user in node.users:
        view = user.op == "call_function" and (user.target is operator.getitem or is_view(user))
        readers += _readers(user) if view else [user]
    return readers


def _bytes_of_results(node: fx.Node) -> int:
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return sum(math.prod(item.shape) * item.itemsize for item in items if isinstance(item, torch.Tensor))


# --- How much of what attention could compute its mask lets it skip --------------------------------------------------
#
# It is told by the share of tiles that a query sees anything of.
#
# Terms: a *tile* is TILE queries by TILE keys, about what kernels walk through. A mask is a few ranges of keys for
# each query, which the shared graph makes (pass `attention`). Where these follow from sizes alone, as causal and
# windowed ones do, they are known before there is a batch. Where a batch decides (documents packed in a row), all
# counts.


TILE = 128
MASKED = {"csc::attention": 3, "csc::attention_backward": 6}  # the position of the mask among the arguments


def shares(program: Program) -> dict[str, float]:
    """By the name of the table; masks that a batch decides are not in it."""
    if program.shared is None:
        return {}
    output = program.shared.output_node()
    fractions = {}
    for name, node in zip(output.meta["names"], g.outputs(program.shared)):
        if isinstance(node, fx.Node) and node.op == "call_function" and g.op_name(node) == "csc::pack_mask":
            ranges = _known(node.args[0])  # type: ignore[arg-type]
            if ranges is not None:
                fractions[name] = _share(ranges, int(node.kwargs.get("keys") or node.args[3]))  # type: ignore[arg-type]
    return fractions


def named(region: Region, template_shared: tuple[str, ...], found: Mapping[str, float]) -> dict[str, float]:
    """The shares by the names that the region's own graphs have for its tables."""
    return {name: found[table] for name, table in zip(template_shared, region.shared) if table in found}


def mask_of(node: fx.Node) -> str:
    """By the name in the call's own graph."""
    place = MASKED.get(g.op_name(node))
    mask = node.args[place] if place is not None and len(node.args) > place else None
    if not isinstance(mask, fx.Node) or mask.op != "placeholder":
        return ""
    kind, name = mask.meta["role"]
    return str(name) if kind == "shared" else ""


def _known(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input; None for others."""
    needed = g.ancestors([node])
    if any(argument.op != "call_function" for argument in needed):
        return None
    values: dict[fx.Node, Any] = {}
    for call in node.graph.nodes:
        if call in needed:
            arguments = fx.map_arg((call.args, call.kwargs), lambda used: values[used])
            values[call] = call.target(*arguments[0], **arguments[1])
    value = values[node]
    return value.cpu() if isinstance(value, torch.Tensor) else None


def _share(ranges: torch.Tensor, keys: int) -> float:
    """ranges: [B, R, Tq, 2], the first key and the one behind the last."""
    first, end = ranges.clamp(0, keys).to(torch.int64).unbind(-1)
    empty = end <= first
    first, end = first.masked_fill(empty, keys), end.masked_fill(empty, 0)
    rows = -(-first.shape[-1] // TILE) * TILE
    more = rows - first.shape[-1]
    first = torch.nn.functional.pad(first, (0, more), value=keys).unflatten(-1, (-1, TILE)).amin(-1)
    end = torch.nn.functional.pad(end, (0, more), value=0).unflatten(-1, (-1, TILE)).amax(-1)
    tiles = (-(-end // TILE) - first // TILE).clamp(min=0).sum(dim=1)  # over the ranges of a query
    every = -(-keys // TILE)
    return float((tiles.clamp(max=every).double() / every).mean())


# --- What F, B and W of every region cost ----------------------------------------------------------------------------
#
# FLOPs, bytes moved, bytes held and seconds are told from the nodes of their graphs.
#
# Terms
#   call      one node that runs a kernel. It reads its inputs and writes its outputs, once: no fusion is assumed, since
#             the emitted programs call ATen op by op. Views move nothing; a lookup reads the rows that it takes
#   work      the calls of F, B or W. Attention's products have two activation operands: their backward costs twice the
#             forward, whatever is frozen (five halves in a fused kernel, which makes QK^T again). That of a linear
#             layer costs once the forward in B and once in W
#   saved     bytes that F leaves for B, parameters and shared tables apart, each block of memory once; stashed: B for W
#   state     bytes of parameters, gradients and AdamW's two moments (all in the parameter's dtype); `master` adds a
#             float32 copy of trained parameters of a narrower dtype, and moments in float32
#   rematerialised  bytes of what B makes again of F, all of it there when B starts on its own work (pass `recompute`)
#
# They need a Program after pass `split`. A parameter or value that several regions hold counts in each: they may end
# up on different ranks.


@dataclass(frozen=True)
class RegionCost:
    """Work and bytes of one variant and one microbatch; see the module's terms.

    outputs: bytes of each output, in order; output_gradients: of the gradient that comes back to it, 0 if none does.
    computed: bytes of the parameters that have dimensions, in the dtype in which they are computed with
    (of one without entries 1, since it is gathered as well).
    """

    forward: Kernels
    backward_input: Kernels
    backward_weight: Kernels
    has_b: bool
    has_w: bool
    saved: int
    stashed: int
    rematerialised: int
    parameters: int
    gradients: int
    optimizer: int
    outputs: tuple[int, ...]
    output_gradients: tuple[int, ...]
    computed: int = 0

    @property
    def state(self) -> int:
        """Bytes that are there for the whole step."""
        return self.parameters + self.gradients + self.optimizer

    def state_of(self, zero: int, ranks: int) -> int:
        """`state` of one of so many ranks that divide it."""
        return sum(self.held(zero, ranks))

    def held(self, zero: int, ranks: int) -> tuple[int, int, int]:
        """Parameters, gradients and the optimizer's of one of so many ranks, which divide the last with zero=1, the
        last two with zero=2, all with zero=3.
        """
        kinds = (self.parameters, self.gradients, self.optimizer)
        optimizer, gradients, parameters = (ranks if zero >= level else 1 for level in (1, 2, 3))
        return tuple(-(-size // by) for size, by in zip(kinds, (parameters, gradients, optimizer)))  # type: ignore[return-value]

    def figures(self) -> dict[str, int]:
        """Every number by name; `F flops` to `W kernels`, then bytes."""
        parts = {"F": self.forward, "B": self.backward_input, "W": self.backward_weight}
        return {
            **{
                f"{part} {name}": getattr(work, name)
                for name in ("flops", "bytes", "kernels")
                for part, work in parts.items()
            },
            "saved": self.saved,
            "stashed": self.stashed,
            "rematerialised": self.rematerialised,
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "messages": sum(self.outputs),
            "gradient messages": sum(self.output_gradients),
        }


@dataclass(frozen=True)
class RegionTimes:
    """One region for the planner: seconds of F, B and W; bytes. The fields are those of csc.planning.problem.Unit."""

    name: str
    component: str
    forward: float
    backward_input: float
    backward_weight: float
    has_b: bool
    has_w: bool
    saved: int
    stashed: int
    state: int
    gathered: int = 0


def region_costs(
    program: Program,
    hardware: Hardware,
    zero: int = 0,
    ranks: int = 1,
    fuse: bool = False,
    mesh: Mesh | None = None,
) -> list[RegionTimes]:
    """Seconds and bytes of every region, in the order of `program.regions`.

    Those that `hardware.measured` has go before the model. zero, ranks: see `RegionCost.state_of`; with zero=3
    `gathered` is what they make whole where the region computes. fuse: seconds are those of functions that Inductor
    compiled. mesh: over which collectives within a stage meet, and which components' ranks work for several replicas:
    theirs are seconds and activations of a microbatch of each; None: collectives take no time.
    """
    stored = stored_dtypes(program)
    of_variant = {name: variant_cost(variant, False, stored[name]) for name, variant in program.variants.items()}
    seen = shares(program)
    wires = {} if mesh is None else wires_between(mesh, hardware)
    component_wires: dict[str, Wires] = {}
    if mesh is not None:
        component_wires |= {one: wires_between(mesh, hardware, one) for one in mesh.in_front}
        component_wires |= {
            component: within_division(wires_between(mesh, hardware, component)) for component in mesh.held_in_copies
        }
    sharers = {} if mesh is None else {one: mesh.dp // extent.replicas for one, extent in mesh.in_front.items()}
    timed: dict[tuple[str, tuple[str, ...], str], Seconds] = {}
    costs = []
    for region in program.regions:
        variant, cost = program.variants[region.variant], of_variant[region.variant]
        key = (region.variant, tuple(region.shared), region.component if region.component in component_wires else "")
        if key not in timed:
            visible = named(region, program.templates[variant.template].shared, seen)
            works = works_of(variant, fuse)
            measured = hardware.measured.get(variant_key(variant, fuse)) if hardware.measured else None
            timed[key] = measured or _seconds(works, hardware, visible, component_wires.get(region.component, wires))
        several, (forward, backward_input, backward_weight) = sharers.get(region.component, 1), timed[key]
        costs.append(
            RegionTimes(
                name=region.name,
                component=region.component,
                forward=several * forward,
                backward_input=several * backward_input,
                backward_weight=several * backward_weight,
                has_b=cost.has_b,
                has_w=cost.has_w,
                saved=cost.saved * several,
                stashed=cost.stashed * several,
                state=cost.state_of(zero, ranks // several),
                gathered=cost.computed if zero >= 3 and ranks > several else 0,
            )
        )
    return costs


def basis(program: Program, hardware: Hardware, fuse: bool = False) -> str:
    """Where the seconds of `region_costs` come from: "measured on ..." or "model of a100"."""
    keys = {variant_key(variant, fuse) for variant in program.variants.values()}
    model, measured = f"model of {hardware.name}", len(keys & hardware.measured.keys())
    if not measured:
        return model
    text = f"measured on {hardware.measured_on or hardware.name}"
    return text if measured == len(keys) else f"{text}, {model} for {len(keys) - measured} of {len(keys)} variants"


def value_bytes(program: Program) -> dict[str, tuple[int, int]]:
    """For every value between regions: its bytes, and those of its gradient if any reader gives one (else 0)."""
    sizes = {}
    for region in program.regions:
        for value, node in zip(region.outputs, values_of(program.variants[region.variant])):
            sizes[value] = dense_bytes(node)
    needed = {value for region in program.regions for value, dx in zip(region.activations, region.dx) if dx}
    return {value: (size, size if value in needed else 0) for value, size in sizes.items()}


def variant_key(variant: Variant, fuse: bool = False) -> str:
    """A name for what F, B and W of a variant compute, on which shapes, and how; stable from run to run."""
    parts = (variant.forward, variant.backward_input, variant.backward_weight)
    return g.digest(*(g.canonical(part) if part is not None else None for part in parts), *["fused"] * fuse)[:16]


def _seconds(works: Sequence[Kernels], hardware: Hardware, visible: Mapping[str, float], wires: Wires) -> Seconds:
    forward, backward, weight = (seconds(work, hardware, visible, wires) for work in works)
    return forward, backward, weight


def works_of(variant: Variant, fuse: bool = False) -> tuple[Kernels, Kernels, Kernels]:
    """F, B and W as they run."""
    forward, backward, weight = (
        fused(graph, list(_calls(graph))) if fuse and graph is not None else work_of(graph)
        for graph in (variant.forward, variant.backward_input, variant.backward_weight)
    )
    return forward, backward, weight


def seconds(
    work: Kernels,
    hardware: Hardware,
    visible: Mapping[str, float] = MappingProxyType({}),
    wires: Wires = MappingProxyType({}),
) -> float:
    """Roofline (Williams, Waterman, Patterson 2009) call by call, and the launch of each:
    sum of max(flops / reached rate, bytes / reached bandwidth) + launch. visible: by table, the share of its tiles that
    attention computes; 1 where it is not known. wires: see csc.analysis.costs; without them collectives take none.
    """
    total = 0.0
    for call in work.calls:
        compute = 0.0
        if call.flops:
            done = call.flops * visible.get(call.mask, 1.0)
            compute = done / hardware.rate(call.dtype, call.op, call.flops, call.compiled)
        takes = max(compute, call.bytes / hardware.reached_bandwidth)
        if call.meets is not None:
            met = wire_seconds(call.meets, wires)
            takes = max(takes, met) if call.meets.hidden else takes + met
        total += takes + hardware.launch
    return total


def stored_dtypes(program: Program) -> dict[str, tuple[torch.dtype, ...]]:
    """By variant, the dtypes in which its parameters are stored."""
    of_parameter = {p.name: p.dtype for p in program.parameters}
    return {region.variant: tuple(of_parameter[p] for p in region.parameters) for region in program.regions}


def variant_cost(variant: Variant, master: bool = False, stored: Sequence[torch.dtype] | None = None) -> RegionCost:
    """Work and bytes of a variant, linear in its nodes. The variant must have been divided by pass `split`.

    stored: dtypes of the parameters for their owner; None: those of the graph. One computed with in another dtype takes
    both.
    """
    has_b = variant.backward_input is not None
    saved = stashed = rematerialised = 0
    if variant.backward_input is not None:
        saved = held_bytes(g.outputs(variant.forward)[1])  # type: ignore[arg-type]
        stashed = held_bytes(g.outputs(variant.backward_input)[1])
        rematerialised = _rematerialised(variant.backward_input)
    inputs = g.placeholders(variant.pruned)
    parameters = [node for node in inputs if node.meta["role"][0] == "parameter"]
    sizes = [parameter_bytes(n.meta["val"].numel(), n.meta["val"].dtype, stored[i] if stored else None, master)
             for i, n in enumerate(parameters)]  # fmt: skip
    trained = [size for size, trains in zip(sizes, variant.dw) if trains]
    values = values_of(variant)
    return RegionCost(
        forward=work_of(variant.forward),
        backward_input=work_of(variant.backward_input),
        backward_weight=work_of(variant.backward_weight),
        has_b=has_b,
        has_w=variant.backward_weight is not None,
        saved=saved,
        stashed=stashed,
        rematerialised=rematerialised,
        parameters=sum(size[0] for size in sizes),
        gradients=sum(size[1] for size in trained),
        optimizer=sum(size[2] for size in trained),
        outputs=tuple(map(dense_bytes, values)),
        output_gradients=tuple(dense_bytes(v) if comes else 0 for v, comes in zip(values, variant.tangents)),
        computed=sum(max(1, dense_bytes(node)) for node in parameters if node.meta["val"].dim()),
    )


def values_of(variant: Variant) -> tuple[fx.Node, ...]:
    """The nodes of F that are the region's outputs."""
    assert variant.forward is not None, f"{variant.name} has not been divided"
    results = g.outputs(variant.forward)
    return tuple(results[0]) if variant.backward_input is not None else results


def parameter_bytes(
    numel: int, computed: torch.dtype, stored: torch.dtype | None = None, master: bool = False
) -> tuple[int, int, int]:
    """(parameter, gradient, optimizer): as stored and, if it differs, as computed with; the gradient as stored; AdamW's
    two moments, or with `master`, of a parameter narrower than float32, those and a copy, in float32.
    """
    stored = computed if stored is None else stored
    size = stored.itemsize
    held = numel * (size if stored is computed else size + computed.itemsize)
    return held, numel * size, 3 * 4 * numel if master and size < 4 else 2 * size * numel


def work_of(graph: fx.Graph | None) -> Kernels:
    """The kernels of one run of the graph; none for None."""
    return Kernels(tuple(call for _, call in _calls(graph))) if graph is not None else Kernels()


def _calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, KernelCall]]:
    for node in g.calls(graph):
        call = call_of(node)
        if call is not None:
            yield node, call


def call_of(node: fx.Node) -> KernelCall | None:
    """The kernel that a node runs; None if it runs none."""
    if node.target is operator.getitem or is_view(node):  # items of a tuple were written by its maker
        return None
    name = g.op_name(node)
    written = list(tensors_in(node.meta["val"]))
    if not written:
        return None  # a number, not a tensor: nothing on the device
    inputs = [t for used in node.all_input_nodes for t in tensors_in(used.meta.get("val"))]
    moved = sum(map(_bytes, written))
    if name in LOOK_UPS:  # the rows, not the table, and the indices
        moved += moved + sum(map(_bytes, inputs[1:]))
    else:
        moved += sum(map(_bytes, inputs))
    if name in g.HEADS:
        moved += traffic(node)
    moved += 2 * made_dense(node)
    operands = [t for t in inputs if t.dtype.is_floating_point] or inputs or written
    dtype = str(operands[0].dtype).removeprefix("torch.")
    return KernelCall(name, dtype, call_flops(node), moved, mask_of(node), exchange(node))


def made_dense(node: fx.Node) -> int:
    """Bytes of the dense weight that a product with a quantised one makes, and that is gone behind it; 0 of others."""
    if g.op_name(node) not in QUANTISED:
        return 0
    rows, columns = (g.bind(node)[name] for name in ("rows", "columns"))
    return int(rows * columns * node.meta["val"].itemsize)


def tensors_in(val: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's value: itself, or those in a tuple."""
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (tuple, list)):
        for item in val:
            yield from tensors_in(item)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that the elements lie in: a dimension of stride 0 (an expanded one) repeats the same ones."""
    count = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride or not size else 1
    return count


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last: a gradient may be a slice of a larger one, with gaps between rows."""
    if not tensor.numel():
        return 0
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())))


def dense_bytes(node: fx.Node) -> int:
    """Bytes of a value that fills its memory, as parameters and messages do."""
    val = node.meta["val"]
    return val.numel() * val.itemsize


def _rematerialised(backward: fx.Graph) -> int:
    """Bytes that B makes again for its own work and for W: those of marked calls that others than such calls read."""
    read = (u for n in backward.nodes if not n.meta.get("rematerialised") for u in n.all_input_nodes)
    return held_bytes(dict.fromkeys(used for used in read if used.meta.get("rematerialised")), without="saved")


def held_bytes(nodes: Iterable[Any], without: str = "") -> int:
    """Bytes that keeping these values keeps alive, each block once; parameters and tables are there anyway, and so are
    placeholders of the kind `without`.
    """
    blocks: dict[fx.Node, int] = {}
    for node in nodes:
        held = base(node)
        if held.op != "placeholder" or held.meta["role"][0] not in ("parameter", "shared", without):
            blocks[held] = extent(held.meta["val"])
    return sum(blocks.values())


# --- Bytes that a region works with: what is alive at once while its F, B or W runs, and is gone or counted after ----
#
# Terms: a *block* is memory that a call allocates; views of it keep it alive. Emitted code deletes each value after
# its last use (codegen.python), so what is alive where follows from the graph. What enters F or B stays until its end:
# the executor holds it. What an operation takes for itself while it runs is not seen, but for the dense weight of a
# product with a quantised one.
#
# fuse: for functions that Inductor compiles, whose values within a kernel are in no memory.


ENTERING = ("activation", "tangent")  # held by the executor until the end
COUNTED = (*ENTERING, "saved")


def working(variant: Variant, saved: int | None = None, fuse: bool = False) -> int:
    """The most of F (what it saves is counted with it), of B (what F saved, or it stashes) and of W (what was stashed).

    saved: bytes that are counted between F and B; None: those that F leaves.
    """
    backward = variant.backward_input
    stashed = held_bytes(g.outputs(backward)[1]) if backward is not None else 0
    if saved is None:
        saved = held_bytes(g.outputs(variant.forward)[1]) if backward is not None else 0  # type: ignore[arg-type]
    over = [peak(variant.forward, fuse) - saved] if variant.forward is not None else []
    if backward is not None:
        over.append(peak(backward, fuse) - max(saved, stashed))
    if variant.backward_weight is not None:
        sizes = [_size(maker(gradient)) for gradient in variant.backward_weight.output_node().all_input_nodes]
        added = sum(sizes) + max(sizes, default=0)  # the first sum of two is a third tensor; what was stashed is gone
        over += [peak(variant.backward_weight, fuse) - stashed, added - stashed]
        if variant.backward is not None:
            over.append(peak(variant.backward, fuse) - max(saved, stashed))
    return max(0, *over) if over else 0


def peak(graph: fx.Graph, fuse: bool = False) -> int:
    """Bytes of blocks alive at once. Parameters and shared tables are not among them."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    hidden = within_kernels(graph) if fuse else frozenset()
    ends: dict[fx.Node, int] = {}
    for node in reversed(nodes):  # what a call within a kernel reads is read where the kernel ends
        base = block(node)
        last = max((ends[user] if user in hidden else position[user] for user in node.users), default=position[node])
        ends[base] = max(ends.get(base, 0), last)
    sizes = {base: _size(base) for base in ends if _counted(base) and base not in hidden}
    for base in sizes:
        if base.op == "placeholder" and base.meta["role"][0] in ENTERING:
            ends[base] = len(nodes)
    dying: dict[int, list[fx.Node]] = {}
    for base in sizes:
        dying.setdefault(ends[base], []).append(base)
    alive = sum(size for base, size in sizes.items() if base.op == "placeholder")
    most = alive
    for i, node in enumerate(nodes):
        if node in sizes and node.op != "placeholder":
            alive += sizes[node]
            most = max(most, alive + made_dense(node))
        alive -= sum(sizes[base] for base in dying.get(i, ()))
    return most


def _counted(base: fx.Node) -> bool:
    if base.op == "placeholder":
        return base.meta["role"][0] in COUNTED
    return base.op == "call_function"


def _size(base: fx.Node) -> int:
    return sum(map(extent, tensors_in(base.meta.get("val"))))


# --- What a region's stage holds besides where its parts are recorded (csc.runtime.graphed_stage) --------------------
#
# Its gradients have places of their own, from which they are taken; a parameter that is computed with in another dtype
# is there once more. What F works with is there for each microbatch in flight, not once: that is not counted.


def recorded_bytes(variant: Variant, stored: Sequence[torch.dtype]) -> int:
    """Returns how many bytes the recordings of a variant hold: its gradients, and copies of parameters that are
    computed with in another dtype. stored: the dtypes of its parameters.
    """
    read = [node for node in g.placeholders(variant.pruned) if node.meta["role"][0] == "parameter"]
    copies = sum(dense_bytes(node) for node, dtype in zip(read, stored) if node.meta["val"].dtype != dtype)
    return variant_cost(variant, False, stored).gradients + copies
