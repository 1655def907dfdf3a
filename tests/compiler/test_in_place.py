"""Pass `in_place`: emitted code that writes over its operands gives the bits of the graph, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from csc.codegen.python import body
from csc.kernels.collectives import APART
from csc.passes.in_place import marked
from csc.passes.runner import after
from hypothesis import given, settings
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import csc
from csc.analysis.costs import peak
from csc.analysis.operators.execution import WAYS, block
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.printer import program_text
from tests.compiler.random_graphs import graphs, results, tensors

aten = torch.ops.aten


def emitted(graph: fx.Graph) -> tuple[Callable[..., Any], str]:
    """The function that the graph is written as."""
    names = {node: node.name for node in g.placeholders(graph)}
    lines = body(graph, names)
    result = ", ".join(names[node] for node in g.outputs(graph))
    text = "\n".join(
        [f"def written({', '.join(n.name for n in g.placeholders(graph))}):", *lines, f"    return ({result},)"]
    )
    space: dict[str, Any] = {"torch": torch, "aten": aten}
    exec(text, space)
    return space["written"], text


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.stride() == other.stride() and torch.equal(one.view(torch.int32), other.view(torch.int32))


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_any_graph(graph: fx.Graph) -> None:
    expected = results(graph)
    done = marked(graph)
    assert done is not None and [n.name for n in done.nodes] == [n.name for n in graph.nodes]
    function, text = emitted(done)
    entering = tensors(graph)
    before = [one.clone() for one in entering]
    found = function(*entering)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and one.stride() == other.stride(), text
    assert all(map(torch.equal, entering, before)), text
    assert peak(done) <= peak(graph)


def _graph(make: Callable[[Writer, fx.Node, fx.Node], Any]) -> fx.Graph:
    """What `make` writes of two activations [4, 4], with its results."""
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        x, y = (g.add_placeholder(graph, name, torch.empty(4, 4), ("activation", name)) for name in "xy")
    results = make(Writer(graph, mode), x, y)
    graph.output(results if isinstance(results, tuple) else (results,))
    return graph


def _written(make: Callable[[Writer, fx.Node, fx.Node], Any]) -> list[str]:
    """The operators that write over an operand."""
    done = marked(_graph(make))
    assert done is not None
    return [g.short_op(node) for node in done.nodes if node.meta.get("in_place")]


def test_what_is_written_over() -> None:
    assert _written(lambda w, x, y: w.call(None, aten.neg.default, w.call(None, aten.mm.default, x, y))) == ["neg"]

    def second(w: Writer, x: fx.Node, y: fx.Node) -> fx.Node:
        return w.call(None, aten.add.Tensor, x, w.call(None, aten.mm.default, x, y))

    done = marked(_graph(second))
    assert done is not None
    sum_of = g.calls(done)[-1]
    assert sum_of.meta["in_place"] and g.op_name(sum_of.args[0]) == "aten::mm"  # type: ignore[arg-type]
    assert block(sum_of) is sum_of.args[0]
    assert "mm_default.add_(x)" in emitted(done)[1]


REFUSED: dict[str, Callable[[Writer, fx.Node, fx.Node], Any]] = {
    "what enters": lambda w, x, y: w.call(None, aten.neg.default, x),
    "a view of what enters": lambda w, x, y: w.call(None, aten.neg.default, w.call(None, aten.t.default, x)),
    "a result": lambda w, x, y: (made := w.call(None, aten.mm.default, x, y), w.call(None, aten.neg.default, made)),
    "a view is a result": lambda w, x, y: (
        w.call(None, aten.t.default, made := w.call(None, aten.mm.default, x, y)), w.call(None, aten.neg.default, made)
    ),
    "both operands": lambda w, x, y: w.call(
        None, aten.mul.Tensor, made := w.call(None, aten.mm.default, x, y), w.call(None, aten.t.default, made)
    ),
    "the second of a difference": lambda w, x, y: w.call(None, aten.sub.Tensor, x, w.call(None, aten.mm.default, x, y)),
    "a part": lambda w, x, y: w.call(
        None, aten.neg.default, w.call(None, aten.slice.Tensor, w.call(None, aten.mm.default, x, y), 0, 0, 2)
    ),
    "a smaller one": lambda w, x, y: w.call(
        None, aten.add.Tensor, w.call(None, aten.mean.dim, w.call(None, aten.mm.default, x, y), [1], True), x
    ),
    "read later": lambda w, x, y: w.call(
        None, aten.mm.default, w.call(None, aten.neg.default, made := w.call(None, aten.mm.default, x, y)), made
    ),
    "another dtype": lambda w, x, y: w.call(
        None, aten.add.Tensor, w.call(None, aten.mm.default, x, y),
        w.call(None, aten._to_copy.default, x, dtype=torch.float64),
    ),
    "laid out otherwise": lambda w, x, y: w.call(
        None, aten.add.Tensor, x, w.call(None, aten.t.default, w.call(None, aten.mm.default, x, y))
    ),
    "along columns": lambda w, x, y: w.call(
        None, aten._log_softmax.default, w.call(None, aten.mm.default, x, y), 0, False
    ),
    "not row by row": lambda w, x, y: w.call(  # whose kernel writes rows, wherever they are to be
        None, aten._log_softmax_backward_data.default,
        w.call(None, aten.t.default, w.call(None, aten.mm.default, x, y)), w.call(None, aten.t.default, y), 1,
        torch.float32,
    ),
    "a view that is no one of the table": lambda w, x, y: (
        w.call(
            None, aten.add.Tensor, w.call(None, aten.view_as_complex.default, made := w.call(
                None, aten.mm.default, w.call(None, aten.mm.default, x, y),
                w.call(None, aten.slice.Tensor, y, 1, 0, 2),
            )), 1.0,
        ),
        w.call(None, aten.neg.default, made),
    )[::-1],
    "what may be the operand itself": lambda w, x, y: (
        w.call(None, aten.type_as.default, made := w.call(None, aten.mm.default, x, y), y),
        w.call(None, aten.neg.default, made),
    ),
    "with another factor": lambda w, x, y: w.call(
        None, aten.add.Tensor, w.call(None, aten.mm.default, x, y), x, alpha=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not(what: str) -> None:
    assert _written(REFUSED[what]) == []


def test_softmaxes_of_other_devices_are_left() -> None:
    """Their kernels go through a row several times, and nobody has tried them in place."""
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        x, y = (g.add_placeholder(graph, n, torch.empty(4, 4, device="meta"), ("activation", n)) for n in "xy")
    writer = Writer(graph, mode)
    made = writer.call(None, aten.mm.default, x, y)
    graph.output((writer.call(None, aten._log_softmax.default, writer.call(None, aten.neg.default, made), 1, False),))
    done = marked(graph)
    assert done is not None
    assert [g.short_op(node) for node in done.nodes if node.meta.get("in_place")] == ["neg"]


def test_an_exchange_may_still_read() -> None:
    """What is not aten's may return before it has read all, or return an operand."""

    start, _ = APART[torch.ops.csc.all_reduce.default]

    def exchanged(w: Writer, x: fx.Node, y: fx.Node) -> Any:
        made = w.call(None, aten.mm.default, x, y)
        begun = w.call(None, start, made, y)
        return w.call(None, aten.neg.default, made), begun

    assert _written(exchanged) == []


@pytest.mark.parametrize("name", sorted(WAYS))
def test_an_operator_writes_the_same_bits(name: str) -> None:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    rest: dict[str, tuple[Any, ...]] = {
        "aten::_log_softmax": (1, False), "aten::_log_softmax_backward_data": (torch.rand(64, 33), 1, torch.float32),
        "aten::div.Scalar": (3,), "aten::mul.Scalar": (0.3,), "aten::pow.Tensor_Scalar": (3,),
    }  # fmt: skip
    binary = name.endswith((".Tensor", "_backward")) and name not in rest
    others = rest.get(name, (torch.rand(64, 33) - 0.5,) if binary else ())
    tensors_given = [one for one in others if isinstance(one, torch.Tensor)]
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        entering = [
            g.add_placeholder(graph, f"p{place}", torch.empty(64, 33), ("activation", f"p{place}"))
            for place in range(1 + len(tensors_given))
        ]
    writer, operands = Writer(graph, mode), iter(entering[1:])
    made = writer.call(None, aten.clone.default, entering[0])
    call = writer.call(None, operator, made, *(next(operands) if isinstance(o, torch.Tensor) else o for o in others))
    graph.output((call,))
    done = marked(graph)
    assert done is not None and g.calls(done)[-1].meta.get("in_place")
    function, text = emitted(done)
    x = torch.randn(64, 33) * 3
    expected = operator(x.clone(), *others)
    (found,) = function(x.clone(), *tensors_given)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), text


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_compiler_does_it_itself(fuse: bool) -> None:
    batch = {"x": torch.randn(6, 8), "labels": torch.randint(0, 32, (6,))}
    history = csc.compile(Gated(), example=batch, check=False, fuse=fuse).history()
    graphs_of = [
        graph
        for one in after(history, "in_place").variants.values()
        for graph in (one.forward, one.backward_input, one.backward_weight)
        if graph is not None
    ]
    written = [g.short_op(n) for graph in graphs_of for n in g.calls(graph) if n.meta.get("in_place")]
    assert bool(written) is not fuse
    if not fuse:
        assert {"_log_softmax", "_log_softmax_backward_data", "silu_backward"} <= set(written)
    told = program_text(after(history, "in_place"))
    assert told.count(" in place") == len(written) and " in place" not in program_text(after(history, "overlap"))
