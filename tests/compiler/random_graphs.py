"""Graphs of a few dozen calls, drawn at random: products, entries, views of all kinds, values that are read again."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from csc.ir import graph as g
from csc.ir.graph import Writer

aten = torch.ops.aten
SIZES = ([4, 4], [16], [2, 8], [2, 2, 4], [1, 4, 4], [4, 1, 4], [-1, 2])
ONE: dict[str, Any] = {
    "neg": lambda a: (aten.neg.default, a),
    "tanh": lambda a: (aten.tanh.default, a),
    "sigmoid": lambda a: (aten.sigmoid.default, a),
    "half": lambda a: (aten.mul.Tensor, a, 0.5),
    "more": lambda a: (aten.add.Tensor, a, 1e-3),
    "third": lambda a: (aten.div.Tensor, a, 3.0),
    "square": lambda a: (aten.pow.Tensor_Scalar, a, 2),
    "clone": lambda a: (aten.clone.default, a),
    "log_softmax": lambda a: (aten._log_softmax.default, a, 0, False),
    "mean": lambda a: (aten.mean.dim, a, [-1], True),
    "t": lambda a: (aten.t.default, a),
    "transpose": lambda a: (aten.transpose.int, a, 0, 1),
    "unsqueeze": lambda a: (aten.unsqueeze.default, a, 0),
    "low": lambda a: (aten.slice.Tensor, a, 0, 0, 2),
    "high": lambda a: (aten.slice.Tensor, a, -1, 2, 2**63 - 1),
    "expand": lambda a: (aten.expand.default, a, [4, 4]),
    **{f"view {sizes}": lambda a, sizes=sizes: (aten.view.default, a, sizes) for sizes in SIZES},
    **{f"unsafe {sizes}": lambda a, sizes=sizes: (aten._unsafe_view.default, a, sizes) for sizes in SIZES[:4]},
}
TWO: dict[str, Any] = {
    "add": lambda a, b: (aten.add.Tensor, a, b),
    "mul": lambda a, b: (aten.mul.Tensor, a, b),
    "sub": lambda a, b: (aten.sub.Tensor, a, b),
    "div": lambda a, b: (aten.div.Tensor, a, b),
    "mm": lambda a, b: (aten.mm.default, a, b),
    "cat": lambda a, b: (aten.cat.default, [a, b], 0),
    "silu_backward": lambda a, b: (aten.silu_backward.default, a, b),
    "gelu_backward": lambda a, b: (aten.gelu_backward.default, a, b),
    "tanh_backward": lambda a, b: (aten.tanh_backward.default, a, b),
    "sigmoid_backward": lambda a, b: (aten.sigmoid_backward.default, a, b),
    "log_softmax_backward": lambda a, b: (aten._log_softmax_backward_data.default, a, b, 0, torch.float32),
}
OF_EQUAL_SIZES = {"log_softmax_backward"}  # which ATen does not ask: it reads what lies behind the smaller one


@st.composite
def graphs(draw: st.DrawFn, calls: int = 24) -> fx.Graph:
    """A graph with values of float32, of which the last ones and some others are results."""
    mode, graph = FakeTensorMode(), fx.Graph()
    writer = Writer(graph, mode)
    with mode:
        values = [
            g.add_placeholder(graph, "x", torch.empty(4, 4), ("activation", "x")),
            g.add_placeholder(graph, "y", torch.empty(2, 2, 4), ("saved", "y")),
            g.add_placeholder(graph, "w", torch.empty(4, 4).t(), ("parameter", "w")),
        ]
    for _ in range(draw(st.integers(1, calls))):
        recent = st.integers(max(0, len(values) - 6), len(values) - 1)
        kind = draw(st.sampled_from([*ONE, *TWO, *TWO]))
        operands = [values[draw(recent)] for _ in range(1 if kind in ONE else 2)]
        if kind in OF_EQUAL_SIZES and operands[0].meta["val"].shape != operands[1].meta["val"].shape:
            continue
        target, *args = (ONE | TWO)[kind](*operands)
        try:
            made = writer.call(None, target, *args)
        except (RuntimeError, IndexError, ValueError):
            continue  # these sizes or layouts do not go together
        if 0 < made.meta["val"].numel() <= 64:
            values.append(made)
    calls_made = g.calls(graph) or values[:1]
    chosen = draw(st.lists(st.sampled_from(calls_made), max_size=3, unique=True))
    graph.output(tuple(dict.fromkeys([*chosen, calls_made[-1]])))
    g.erase_dead(graph)
    return graph


class _Laid(fx.Interpreter):
    """Refuses graphs of which a value lies otherwise than its type says: not all kernels do as they are traced."""

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, torch.Tensor) and found.stride() != n.meta["val"].stride():
            reject()
        return found


def results(graph: fx.Graph) -> list[torch.Tensor]:
    """Of `tensors`, operator by operator. No example if one does not take these, or gives another layout."""
    try:
        return list(_Laid(fx.GraphModule(nn.Module(), graph)).run(*tensors(graph)))
    except RuntimeError:
        reject()  # oneDNN does not take every layout


def tensors(graph: fx.Graph) -> list[torch.Tensor]:
    """For its placeholders, laid out as these are."""
    generator, made = torch.Generator().manual_seed(0), []
    for node in g.placeholders(graph):
        val = node.meta["val"]
        made.append(torch.empty_strided(val.shape, val.stride()).copy_(torch.randn(val.shape, generator=generator)))
    return made
