"""Pass `attention_order`: who chooses the order in which attention adds."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from csc.ir import graph as g
from csc.ir.program import Options, Program, Variant

NAMES = frozenset({"csc::attention", "csc::attention_backward"})


def attention_order(program: Program, options: Options) -> Program:
    """Let the CPU's attention add in the order that takes least time, where bits may differ.

    Requires  pass `split`.
    Ensures   without `fuse` nothing changes. Else attention on CPUs is `reordered` in F, B and W: causal queries go in
              blocks that leave out the keys that none of them sees, where eager PyTorch has one call of its kernel, and
              the kernel adds the gradients of query heads that share a key head, which eager PyTorch repeats.
    Before    %dq, %dk, %dv = csc.attention_backward(%d_out, %q[2, 8, 64, 32], %k[2, 2, 64, 32], ..)
    After     %dq, %dk, %dv = csc.attention_backward(%d_out, %q[2, 8, 64, 32], %k[2, 2, 64, 32], .., reordered=True)
    """
    if not options.fuse:
        return program
    return replace(program, variants={name: _reordered(one) for name, one in program.variants.items()})


def _reordered(variant: Variant) -> Variant:
    return replace(
        variant, forward=_of_graph(variant.forward), backward_input=_of_graph(variant.backward_input),
        backward_weight=_of_graph(variant.backward_weight),
    )  # fmt: skip


def _of_graph(graph: fx.Graph | None) -> fx.Graph | None:
    """The same one where no order is to choose."""
    if graph is None or not any(map(_has_order, g.calls(graph))):
        return graph
    copy, _ = g.copy_graph(graph)
    for node in filter(_has_order, g.calls(copy)):
        node.kwargs = {**node.kwargs, "reordered": True}
    return copy


def _has_order(node: fx.Node) -> bool:
    """On a CPU, under a mask or over key heads that query heads share."""
    if g.op_name(node) not in NAMES:
        return False
    given = g.bind(node)
    q, k = given["q"].meta["val"], given["k"].meta["val"]
    return q.device.type == "cpu" and (given["mask"] is not None or k.shape[1] < q.shape[1])
