"""Bytes that a region works with: what is alive at once while its F, B or W runs, and is gone or counted after.

Terms: a *block* is memory that a call allocates; views of it keep it alive. Emitted code deletes each value after its
last use (codegen.python), so what is alive where follows from the graph. What enters F or B stays until its end: the
executor holds it. What an operation takes for itself while it runs is not seen.

    peak(graph, fuse) -> bytes                  the most that is alive at once, of what is made and what enters
    working(variant, saved, fuse) -> bytes      on top of `saved` and `stashed` as the memory of a plan counts them

fuse: for functions that Inductor compiles, whose values within a kernel are in no memory.
"""

from __future__ import annotations

from torch import fx

from csc.analysis.costs import extent, held_bytes, tensors_in
from csc.analysis.fused_work import within
from csc.analysis.operators.execution import block, maker
from csc.ir import graph as g
from csc.ir.program import Variant

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
        made = [_size(maker(one)) for one in variant.backward_weight.output_node().all_input_nodes]
        added = sum(made) + max(made, default=0)  # the first sum of two is a third tensor; what was stashed is gone
        over += [peak(variant.backward_weight, fuse) - stashed, added - stashed]
        if variant.backward is not None:
            over.append(peak(variant.backward, fuse) - max(saved, stashed))
    return max(0, *over) if over else 0


def peak(graph: fx.Graph, fuse: bool = False) -> int:
    """Bytes of blocks alive at once. Parameters and shared tables are not among them."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    hidden = within(graph) if fuse else frozenset()
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
            most = max(most, alive)
        alive -= sum(sizes[base] for base in dying.get(i, ()))
    return most


def _counted(base: fx.Node) -> bool:
    if base.op == "placeholder":
        return base.meta["role"][0] in COUNTED
    return base.op == "call_function"


def _size(base: fx.Node) -> int:
    return sum(map(extent, tensors_in(base.meta.get("val"))))
