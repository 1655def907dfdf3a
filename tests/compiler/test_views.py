"""Pass `views` against the graphs that it is given: the same bits in the same layout, with fewer calls."""

from __future__ import annotations

from typing import Any

import torch
from csc.passes.runner import after
from csc.passes.views import fewer
from hypothesis import given, settings
from torch import fx, nn

import csc
from csc.analysis.operators.execution import VIEWS, base
from csc.ir import graph as g
from csc.ir.program import Program, Template
from tests.compiler.random_graphs import graphs, results, tensors

RESHAPES = ("aten::view", "aten::_unsafe_view")


def _repeats(graph: fx.Graph) -> list[Any]:
    """Views that are another call, but for results."""
    kept = graph.output_node().all_input_nodes
    told = [
        (str(n.target), str(n.args), str(n.kwargs)) for n in g.calls(graph) if g.op_name(n) in VIEWS and n not in kept
    ]
    return [one for one in told if told.count(one) > 1]


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_any_graph(graph: fx.Graph) -> None:
    """Results are tensors of their own, of the same values, layout and name, and nothing is viewed twice."""
    expected = results(graph)
    short = fewer(Template("one", graph, ("x",), (), ("w",), (), (), (), (), graph)).joint
    assert short is not None and not _repeats(short)
    assert [n.name for n in short.output_node().all_input_nodes] == [
        n.name for n in graph.output_node().all_input_nodes
    ]
    assert [n.name for n in g.placeholders(short)] == [n.name for n in g.placeholders(graph)]
    assert len(g.calls(short)) <= len(g.calls(graph))
    for node in g.calls(short):
        assert g.op_name(node) in {g.op_name(n) for n in g.calls(graph)} | {"aten::view"}
    found = fx.Interpreter(fx.GraphModule(nn.Module(), short)).run(*tensors(graph))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        assert one.stride() == other.stride()


class Layer(nn.Module):
    """Heads are views of what a projection gives; queries, keys and values project the same."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for project in (self.q, self.k, self.v))
        heads = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        return x + self.o(heads.transpose(1, 2).reshape(x.shape))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).view(-1, 16), labels.view(-1))


def history() -> list[Program]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 5, 8), "labels": torch.randint(0, 16, (3, 5))}
    return list(csc.compile(Layers(), example=batch, check=False).history())


def test_what_is_left_of_a_layer() -> None:
    before, now = ([one.joint for one in after(HISTORY, name).templates.values()] for name in ("simplify", "views"))
    chained = [
        n
        for graph in now
        if graph is not None
        for n in g.calls(graph)
        if g.op_name(n) in RESHAPES and g.op_name(n.args[0]) in RESHAPES  # type: ignore[arg-type]
    ]
    assert not [n for n in chained if n not in n.graph.output_node().all_input_nodes]
    counts = [
        sum(g.op_name(n) in VIEWS for one in some if one is not None for n in g.calls(one)) for some in (before, now)
    ]
    assert counts[1] < 0.85 * counts[0]


def test_w_is_given_the_views_that_it_reads() -> None:
    """The products of a layer's weights: what they multiply was viewed before, whole, but for what B was given."""
    program = HISTORY[-1]
    variant = next(v for v in program.variants.values() if sum(v.dw) == 4 and any(v.dx))
    assert variant.backward_weight is not None
    names = [g.op_name(n) for n in g.calls(variant.backward_weight)]
    assert sorted(names) == ["aten::mm"] * 4 + ["aten::t"] * 4 + ["aten::view"] * 2


def test_no_part_keeps_views_of_what_it_was_given() -> None:
    """Where it is compiled, what such a view is of would have to be found around each call."""
    kept = [
        node
        for variant in HISTORY[-1].variants.values()
        for graph in (variant.forward, variant.backward_input)
        if graph is not None
        for node in g.outputs(graph)[1]
    ]
    assert any(node.op == "placeholder" for node in kept)
    assert not [node for node in kept if node.op == "call_function" and base(node).op == "placeholder"]


HISTORY = history()
