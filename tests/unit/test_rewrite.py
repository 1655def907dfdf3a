"""The kit that passes change graphs with: calls with their values, parts that are taken out."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import Writer, add_call, extract, provenance, replace_call, values_of
from csc.torch_private.traces import FakeTensorMode
from tests.unit.test_imports import MODULES

aten = torch.ops.aten


def example() -> tuple[fx.Graph, FakeTensorMode]:
    """(relu(x + w), x * 2) of x: f32[3, 4] and a parameter w: f32[4]; the last call is read by nobody."""
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        x = g.add_placeholder(graph, "x", torch.empty(3, 4), ("input", "x"))
        w = g.add_placeholder(graph, "w", torch.empty(4), ("parameter", "layer.w"))
    writer = Writer(graph, mode)
    added = writer.named("added", None, aten.add.Tensor, x, w)
    added.meta.update(source="model.py:7", module="layer")
    shown = writer.named("relu", added, aten.relu.default, added)
    doubled = writer.named("mul", None, aten.mul.Tensor, x, 2)
    writer.call(None, aten.neg.default, doubled)
    graph.output((shown, doubled))
    return graph, mode


def run(graph: fx.Graph, **values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The graph's outputs, run by torch.fx."""
    found = fx.Interpreter(torch.nn.Module(), graph=graph).run(*[values[one.name] for one in g.placeholders(graph)])
    return tuple(found)


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def test_a_call_has_its_value_and_the_provenance_of_another() -> None:
    graph, mode = example()
    added = named(graph, "added")
    with graph.inserting_before(graph.output_node()):
        summed = Writer(graph, mode).call(added, aten.sum.dim_IntList, added, [1], keepdim=True, dtype=torch.float64)
    assert summed.meta["val"].shape == (3, 1) and summed.meta["val"].dtype is torch.float64
    assert (summed.meta["source"], summed.meta["module"]) == ("model.py:7", "layer")
    assert g.topological_error(graph) is None and summed.next is graph.output_node()


def test_arguments_of_any_name_and_nesting_are_taken() -> None:
    graph, mode = example()
    x, added = named(graph, "x"), named(graph, "added")
    writer = Writer(graph, mode)
    with graph.inserting_before(graph.output_node()):
        stacked = writer.named("both", None, aten.stack.default, [x, added], dim=-1)
        random = writer.call(None, aten.full_like.default, stacked, 1.0, dtype=torch.int32)
    assert stacked.meta["val"].shape == (3, 4, 2) and stacked.name == "both"
    assert random.meta["val"].dtype is torch.int32 and (random.meta["source"], random.meta["module"]) == ("", "")


def test_what_an_operation_refuses_is_raised() -> None:
    graph, mode = example()
    with pytest.raises(RuntimeError, match="reduction dim"):
        Writer(graph, mode).call(None, aten.mm.default, named(graph, "x"), named(graph, "x"))
    assert len(list(graph.nodes)) == 7


def test_a_call_whose_operands_changed_is_evaluated_again() -> None:
    graph, mode = example()
    shown = named(graph, "relu")
    with graph.inserting_before(shown):
        writer = Writer(graph, mode)
        lowered = writer.call(shown, aten._to_copy.default, shown.args[0], dtype=torch.bfloat16)
        shown.args = (lowered,)
        writer.evaluate(shown)
    assert shown.meta["val"].dtype is torch.bfloat16 and shown.meta["module"] == "layer"


def test_replacing_a_call_leaves_none_that_reads_it() -> None:
    graph, _ = example()
    added, x = named(graph, "added"), named(graph, "x")
    replace_call(added, x)
    values = torch.randn(3, 4)
    assert added not in graph.nodes
    assert torch.equal(run(graph, x=values, w=torch.ones(4))[0], values.relu())


def test_a_part_computes_the_same_and_holds_nothing_else() -> None:
    graph, _ = example()
    part = extract(graph, [named(graph, "mul"), None, named(graph, "x")])
    assert [node.name for node in part.nodes] == ["x", "mul", "output"]
    values = torch.randn(3, 4)
    doubled, nothing, same = run(part, x=values)
    assert torch.equal(doubled, values * 2) and nothing is None and torch.equal(same, values)
    assert len(list(graph.nodes)) == 7, "the graph it is taken from is as it was"


def test_a_part_keeps_roles_values_and_provenance() -> None:
    graph, _ = example()
    part = extract(graph, [named(graph, "relu")], lambda node: f"own_{node.name}")
    assert [node.name for node in part.nodes] == ["x", "w", "own_added", "own_relu", "output"]
    for copied, source in zip(part.nodes, [named(graph, name) for name in ("x", "w", "added", "relu")]):
        assert copied.meta["val"] is source.meta["val"] and copied.meta.get("role") == source.meta.get("role")
        assert provenance(copied) == provenance(source)


def test_a_part_asked_for_twice_gives_its_result_twice() -> None:
    graph, _ = example()
    shown = named(graph, "relu")
    first, second = g.outputs(extract(graph, [shown, shown]))
    assert first is second


def test_values_stand_in_for_nodes_at_any_depth() -> None:
    graph, _ = example()
    x = named(graph, "x")
    args, kwargs = values_of((([x, 1], None), {"like": x}))
    assert args[0][0] is x.meta["val"] and args[0][1] == 1 and args[1] is None and kwargs["like"] is x.meta["val"]


def test_a_call_whose_value_is_known_takes_it_as_it_is() -> None:
    graph, _ = example()
    added = named(graph, "added")
    with graph.inserting_before(graph.output_node()):
        item = add_call(graph, aten.alias.default, (added,), val="anything", like=added, name="same")
    assert item.meta["val"] == "anything" and provenance(item) == {"source": "model.py:7", "module": "layer"}


def test_what_depends_on_a_parameter_is_found_and_where_it_stands() -> None:
    graph, _ = example()
    assert g.reads_parameters([named(graph, "relu"), None]) and not g.reads_parameters([named(graph, "mul"), None])
    assert g.line(named(graph, "relu")) == "model.py:7" and g.place(named(graph, "relu")) == "layer, model.py:7"
    assert g.line(named(graph, "mul")) == "model" == g.place(named(graph, "mul"))


def test_a_part_takes_what_it_is_given() -> None:
    graph, _ = example()
    added, shown, doubled = (named(graph, name) for name in ("added", "relu", "mul"))
    part = extract(graph, [shown, doubled], given=[added])
    assert [(node.name, node.op) for node in part.nodes][:3] == [
        ("x", "placeholder"), ("added", "placeholder"), ("relu", "call_function"),
    ]  # fmt: skip
    values = torch.randn(3, 4)
    found, twice = run(part, x=values, added=-values)
    assert torch.equal(found, (-values).relu()) and torch.equal(twice, values * 2)
    assert named(part, "added").meta["role"] == ("activation", "added")
    assert named(part, "added").meta["val"] is added.meta["val"]


def test_no_other_file_makes_calls_by_hand() -> None:
    makers = ("create_node", "call_function")
    found = {
        name
        for name, file in MODULES.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
    }
    assert found == {"csc.ir.graph", "csc.ir.stored"}
