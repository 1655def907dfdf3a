"""Pass `simplify` against the graphs that it is given: the same bits in the same layout, with fewer calls."""

from __future__ import annotations

import pytest
import torch
from csc.passes.runner import after
from torch import fx, nn

import csc
from csc.ir import graph as g
from csc.ir.program import Program

ODD = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-42, 3e38)


class Norms(nn.Module):
    """Norms that are written out, identities, an expanded value that something other than arithmetic reads, and halves
    that change places, and parts that overlap.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.weight = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            x = x * self.weight + torch.cat([-x[..., 4:], x[..., :4]], -1) * self.weight
        x = torch.tanh(x)
        x = (x[:, :2] * 2).mean(1, keepdim=True) + (x[:, 1:] * 3).mean(1, keepdim=True) + torch.ones(3, 5, 8)
        x = x.transpose(0, 1) * 1.0 / 1 + x.mean(-1, keepdim=True).transpose(0, 1).expand(-1, -1, 8) / 3
        x = (x.mean(-1, keepdim=True).expand(-1, -1, 8) * 0.5).cumsum(-1) + x + 0.0
        return nn.functional.cross_entropy(self.head(x.transpose(0, 1)).flatten(0, 1), labels.flatten())


def joints(program: Program) -> dict[str, fx.Graph]:
    return {name: one.joint for name, one in program.templates.items() if one.joint is not None}


def results(graph: fx.Graph, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    found = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*given)
    return list(found)


@pytest.fixture(scope="module")
def history() -> list[Program]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 5, 8), "labels": torch.randint(0, 4, (3, 5))}
    return list(csc.compile(Norms(), example=batch, check=False).history())


@pytest.mark.parametrize("odd", [False, True])
def test_results_keep_their_bits(history: list[Program], odd: bool) -> None:
    before, short = joints(after(history, "differentiate")), joints(after(history, "simplify"))
    assert before.keys() == short.keys()
    for name, graph in before.items():
        torch.manual_seed(1)
        given = []
        for node in g.placeholders(graph):
            val = node.meta["val"]
            tensor = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
            with torch.no_grad():
                values = torch.randn(val.shape) if val.is_floating_point() else torch.randint(0, 4, val.shape)
                if odd and val.is_floating_point():
                    values.view(-1)[: len(ODD)] = torch.tensor(ODD)[: values.numel()]
                tensor.copy_(values)
            given.append(tensor)
        for ours, theirs in zip(results(short[name], given), results(graph, given), strict=True):
            if theirs is None or ours is None:
                assert ours is theirs
                continue
            assert (ours.stride(), ours.dtype) == (theirs.stride(), theirs.dtype)
            assert torch.equal(torch.signbit(ours + 0.0), torch.signbit(theirs + 0.0)), "-0.0 + 0.0 is 0.0"
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_what_is_left_out(history: list[Program]) -> None:
    def calls(name: str) -> list[fx.Node]:
        return [node for graph in joints(after(history, name)).values() for node in g.calls(graph)]

    def by_one(nodes: list[fx.Node]) -> list[fx.Node]:
        names = ("aten::pow", "aten::mul", "aten::div")
        return [n for n in nodes if g.op_name(n) in names and len(n.args) > 1 and n.args[1] in (1, 1.0)]

    def of_expanded(nodes: list[fx.Node]) -> list[fx.Node]:
        return [n for n in nodes if g.op_name(n) == "aten::div" and g.op_name(n.args[0]) == "aten::expand"]  # type: ignore[arg-type]

    assert by_one(calls("differentiate")) and not by_one(calls("simplify"))
    assert len(of_expanded(calls("differentiate"))) > len(of_expanded(calls("simplify")))
    read_by_cumsum = [n for n in calls("simplify") if g.op_name(n) == "aten::cumsum"]
    assert read_by_cumsum and all(not _is_expand(n.args[0]) for n in read_by_cumsum)
    apart = [sum(g.op_name(n) == "aten::slice_backward" for n in calls(name)) for name in ("differentiate", "simplify")]
    assert apart[0] - apart[1] == 4, "halves are joined; parts that overlap are not"
    doubled = [[n for n in calls(name) if n.args[1:] == (2.0,)] for name in ("differentiate", "simplify")]
    sizes = [sorted(n.meta["val"].numel() for n in nodes if g.op_name(n) == "aten::mul") for nodes in doubled]
    assert sizes[0].count(120) - sizes[1].count(120) == sizes[1].count(15) - sizes[0].count(15) > 0, "the smaller value"
    assert len(calls("simplify")) < len(calls("differentiate"))


def _is_expand(node: object) -> bool:
    return isinstance(node, fx.Node) and g.op_name(node) == "aten::expand"
