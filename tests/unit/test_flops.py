"""FLOPs and matmuls of graphs against torch.utils.flop_counter on the real modules."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from csc.analysis.costs import count
from csc.ir import graph as g
from csc.torch_private.traces import FakeTensorMode, make_fx
from tests.models import plain


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


MODULES = {
    "linear": (nn.Linear(32, 48), (3, 5, 32), 1),
    "linear without bias": (nn.Linear(32, 48, bias=False), (7, 32), 1),
    "mlp": (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)), (2, 9, 32), 2),
    "convolution": (nn.Conv2d(3, 8, kernel_size=4, stride=2), (2, 3, 16, 16), 0),
    "attention": (Attention(), (2, 12, 32), 0),
    "block": (plain.Block(causal=True), (2, 6, 32), 6),
}


def joint(module: nn.Module, shape: tuple[int, ...], backward: bool) -> fx.Graph:
    """The graph of the module's forward, and of its backward if asked for."""

    def step(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names = [name for name, _ in module.named_parameters()]
        y = torch.func.functional_call(module, dict(zip(names, parameters)), (x,))
        return (y, *torch.autograd.grad(y.sum(), [x, *parameters])) if backward else (y,)

    mode = FakeTensorMode()
    with mode:
        values = [torch.empty(shape), *(torch.empty(p.shape) for p in module.parameters())]
        values = [v.requires_grad_(backward) for v in values]
        return make_fx(step, tracing_mode="real")(*values).graph


def counted(module: nn.Module, shape: tuple[int, ...], backward: bool) -> int:
    x = torch.randn(shape, requires_grad=backward)
    with FlopCounterMode(display=False) as counter:
        y = module(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("attention", "block")])
def test_flops_are_those_of_torch(name: str, backward: bool) -> None:
    module, shape, _ = MODULES[name]
    found = count(joint(module, shape, backward)).flops
    assert found == counted(module, shape, backward) > 0


def test_attention_is_counted_where_torch_counts_nothing() -> None:
    """PyTorch has no formula for its CPU flash kernel: 4 B H S S D forward, 5 / 2 of that backward."""
    module, shape, _ = MODULES["attention"]
    products = 4 * 2 * 4 * 12 * 12 * 8
    assert count(joint(module, shape, False)).flops == products
    assert count(joint(module, shape, True)).flops == products + products * 5 // 2


def test_a_block_is_the_sum_of_its_parts() -> None:
    module, shape, _ = MODULES["block"]
    batch, length, width = shape
    linears = 2 * batch * length * (4 * width * width + 2 * width * 2 * width)
    attention = 4 * batch * length * length * width
    assert count(joint(module, shape, False)).flops == linears + attention


@pytest.mark.parametrize("name", MODULES)
def test_matmuls(name: str) -> None:
    """Each linear layer is one matmul forward and two backward."""
    module, shape, linears = MODULES[name]
    assert count(joint(module, shape, False)).matmuls == linears
    assert count(joint(module, shape, True)).matmuls == 3 * linears


def test_nothing_costs_nothing() -> None:
    assert count(None) == (0, 0)
    assert count(fx.Graph()) == (0, 0)
    graph = joint(nn.GELU(), (3, 4), True)
    assert len(g.calls(graph)) > 1
    assert count(graph) == (0, 0)
