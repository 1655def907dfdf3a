"""A traced graph in operations that neither write nor leave open whether they make a view: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import module_from_spec

import pytest
import torch
from torch import fx, nn

from csc.capture.capture import capture
from csc.capture.lower import writes
from csc.capture.lower.writes import functional
from csc.ir import graph as g
from csc.torch_private.exported import OpOverload, is_taken_apart


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def written_view(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:].t()[0].mul_(2)
    return y.reshape(-1)


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.masked_fill_(x > 0, 1.5)
    y += x
    return y


def several(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    rows = torch.tensor_split(x.contiguous(), 2, dim=-1)
    return first.flatten() * second.reshape(-1) + rows[0].ravel()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to the same": lambda x: x.to(torch.float32).to("cpu") * 2,
    "to another": lambda x: x.to(torch.float64).float(),
    "a view": lambda x: x.reshape(-1, 2).flatten(),
    "a copy": lambda x: x.t().reshape(-1).contiguous(),
    "sizes of results": lambda x: torch.cat([x, x]).reshape(-1, x.shape[0] * 2),
    "several": several,
    "another name": lambda x: torch.concat([x, x]),
    "no dropout": lambda x: torch.nn.functional.dropout(x, 0.0),
    "a written view": written_view,
    "written in place": written_in_place,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_values_are_those_of_the_function(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rows = {0: torch.export.Dim.AUTO}
    exported = torch.export.export(Calls(function), (torch.ones(6, 4),), dynamic_shapes=(rows,), strict=False)
    graph, signature = functional(exported)
    g.erase_dead(graph)
    for node in g.calls(graph):
        assert not g.mutates(node) and g.op_name(node) != "aten::concat"
        assert not isinstance(node.target, OpOverload) or not is_taken_apart(node.target), node.format_node()
        assert "val" in node.meta
    assert [spec.kind.name for spec in signature.output_specs] == ["USER_OUTPUT"]
    for rows_now in (6, 8):
        x = torch.sin(torch.arange(rows_now * 4.0)).view(rows_now, 4)
        (result,) = fx.Interpreter(nn.Module(), graph=graph).run(x)
        assert torch.equal(result, function(x))


def test_one_node_gives_each_size() -> None:
    """What operations are made of asks for sizes again: those that a node before gives are taken from it."""

    class Repeats(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.sin(x).reshape(-1) + torch.cos(x).reshape(-1) + x.new_zeros(x.shape[0] * 4)
            return rows.view(x.shape[0], -1).mean()

    graph = capture(Repeats(), {"x": torch.ones(6, 4)}).graph
    sizes = [node.meta["val"].node.expr for node in g.calls(graph) if isinstance(node.meta["val"], torch.SymInt)]
    assert len(sizes) == len(set(sizes)) > 0


def test_what_is_written_to_an_input_is_in_the_signature() -> None:
    exported = torch.export.export(Calls(lambda x: x.add_(1).sum()), (torch.ones(6, 4),), strict=False)
    _, signature = functional(exported)
    assert {spec.kind.name for spec in signature.output_specs} == {"USER_INPUT_MUTATION", "USER_OUTPUT"}


def test_operations_that_others_know_stay_the_ones_they_know() -> None:
    """Inductor's tables, which other libraries import before csc, name operations by their objects."""
    packets = [one for one in vars(torch.ops.aten).values() if hasattr(one, "overloads")]
    before = [(packet, dict(vars(packet))) for packet in packets]
    assert writes.__spec__ is not None and writes.__spec__.loader is not None
    writes.__spec__.loader.exec_module(module_from_spec(writes.__spec__))  # as in a process that knew them before
    for packet, operations in before:
        assert getattr(torch.ops.aten, packet.__name__) is packet
        assert all(vars(packet)[name] is one for name, one in operations.items()), packet
