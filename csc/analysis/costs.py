"""What F, B and W of every region cost: FLOPs, bytes moved, bytes held, seconds; from the nodes of their graphs.

Terms
  call      one node that runs a kernel. It reads its inputs and writes its outputs, once: no fusion is assumed, since
            the emitted programs call ATen op by op. Views move nothing; a lookup reads the rows that it takes
  work      the calls of F, B or W. Attention's products have two activation operands: their backward costs twice the
            forward, whatever is frozen (five halves in a fused kernel, which makes QK^T again). That of a linear layer
            costs once the forward in B and once in W
  saved     bytes that F leaves for B, parameters and shared tables apart, each block of memory once; stashed: B for W
  state     bytes of parameters, gradients and AdamW's two moments (all in the parameter's dtype); `master` adds a
            float32 copy of trained parameters of a narrower dtype, and moments in float32
  rematerialised  bytes of what B makes again of F, all of it there when B starts on its own work (pass `recompute`)

    variant_cost(variant, master) -> RegionCost                       pure integers, one per variant
    seconds(work, hardware) -> float                                  roofline per call
    region_costs(program, hardware, ..) -> [RegionTimes]              in the order of program.regions
    value_bytes(program) -> {value: (bytes, bytes of its gradient)}

They need a Program after pass `split`. A parameter or value that several regions hold counts in each: they may end up
on different ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from csc.analysis import exchanges, head_costs
from csc.analysis.flops import call_flops
from csc.analysis.fused_work import fused
from csc.analysis.hardware import Hardware, Seconds
from csc.analysis.kernel_calls import KernelCall, Kernels
from csc.analysis.operators.execution import LOOK_UPS, base, is_view
from csc.analysis.visible import mask_of, named, shares
from csc.ir import graph as g
from csc.ir.mesh import Mesh
from csc.ir.program import Program, Variant


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
    rematerialised: int
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
    wires = {} if mesh is None else exchanges.wires(mesh, hardware)
    others: dict[str, exchanges.Wires] = {}
    if mesh is not None:
        others |= {one: exchanges.wires(mesh, hardware, one) for one, _ in mesh.own_ranks}
        others |= {one: exchanges.within(exchanges.wires(mesh, hardware, one)) for one in mesh.held_in_copies}
    sharers = {} if mesh is None else {one: mesh.dp // replicas for one, replicas in mesh.own_replicas}
    timed: dict[tuple[str, tuple[str, ...], str], Seconds] = {}
    found = []
    for region in program.regions:
        variant, cost = program.variants[region.variant], of_variant[region.variant]
        key = (region.variant, tuple(region.shared), region.component if region.component in others else "")
        if key not in timed:
            visible = named(region, program.templates[variant.template].shared, seen)
            works = works_of(variant, fuse)
            measured = hardware.measured.get(variant_key(variant, fuse)) if hardware.measured else None
            timed[key] = measured or _seconds(works, hardware, visible, others.get(region.component, wires))
        several, (forward, backward_input, backward_weight) = sharers.get(region.component, 1), timed[key]
        found.append(
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
                rematerialised=cost.rematerialised,
                state=cost.state_of(zero, ranks // several),
                gathered=cost.computed if zero >= 3 and ranks > several else 0,
            )
        )
    return found


def basis(program: Program, hardware: Hardware, fuse: bool = False) -> str:
    """Where the seconds of `region_costs` come from: "measured on ..." or "model of a100"."""
    keys = {variant_key(variant, fuse) for variant in program.variants.values()}
    model, found = f"model of {hardware.name}", len(keys & hardware.measured.keys())
    if not found:
        return model
    text = f"measured on {hardware.measured_on or hardware.name}"
    return text if found == len(keys) else f"{text}, {model} for {len(keys) - found} of {len(keys)} variants"


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


def _seconds(
    works: Sequence[Kernels], hardware: Hardware, visible: Mapping[str, float], wires: exchanges.Wires
) -> Seconds:
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
    wires: exchanges.Wires = MappingProxyType({}),
) -> float:
    """Roofline (Williams, Waterman, Patterson 2009) call by call, and the launch of each:
    sum of max(flops / reached rate, bytes / reached bandwidth) + launch. visible: by table, the share of its tiles that
    attention computes; 1 where it is not known. wires: see csc.analysis.exchanges; without them collectives take none.
    """
    total = 0.0
    for call in work.calls:
        compute = 0.0
        if call.flops:
            done = call.flops * visible.get(call.mask, 1.0)
            compute = done / hardware.rate(call.dtype, call.op, call.flops, call.compiled)
        takes = max(compute, call.bytes / hardware.reached_bandwidth)
        if call.meets is not None:
            met = exchanges.seconds(call.meets, wires)
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
        moved += head_costs.traffic(node)
    operands = [t for t in inputs if t.dtype.is_floating_point] or inputs or written
    dtype = str(operands[0].dtype).removeprefix("torch.")
    return KernelCall(name, dtype, call_flops(node), moved, mask_of(node), exchanges.exchange(node))


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
