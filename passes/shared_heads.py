"""Pass `shared_heads`: who adds the gradients of query heads that share a key head."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from csc.ir import graph as g
from csc.ir.program import Options, Program

BACKWARD = "csc::attention_backward"


def shared_heads(program: Program, options: Options) -> Program:
    """Let the kernel of attention add the gradients of query heads that share a key head, where bits may differ.

    Requires  pass `split`.
    Ensures   without `fuse` nothing changes: gradients have the bits of eager PyTorch, which repeats key heads. Else
              attention over fewer key heads than query heads is `grouped` in B and W.
    Before    %dq, %dk, %dv = csc.attention_backward(%d_out, %q[2, 8, 64, 32], %k[2, 2, 64, 32], ..)
    After     %dq, %dk, %dv = csc.attention_backward(%d_out, %q[2, 8, 64, 32], %k[2, 2, 64, 32], .., grouped=True)
    """
    if not options.fuse:
        return program
    done = {
        name: replace(
            one, backward_input=_grouped(one.backward_input), backward_weight=_grouped(one.backward_weight)
        )
        for name, one in program.variants.items()
    }  # fmt: skip
    return replace(program, variants=done)


def _grouped(graph: fx.Graph | None) -> fx.Graph | None:
    """The same one where no heads are shared."""
    if graph is None or not any(map(_shares, g.calls(graph))):
        return graph
    copy, _ = g.copy_graph(graph)
    for node in filter(_shares, g.calls(copy)):
        node.kwargs = {**node.kwargs, "grouped": True}
    return copy


def _shares(node: fx.Node) -> bool:
    if g.op_name(node) != BACKWARD:
        return False
    given = g.bind(node)
    return bool(given["k"].meta["val"].shape[1] < given["q"].meta["val"].shape[1])
