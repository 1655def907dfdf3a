"""Writes in place as operations that give new tensors: the graph's values and gradients are those of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from csc.capture.lower.flatten import inline_regions
from csc.capture.lower.writes import functional
from csc.ir import graph as g

Tensor = torch.Tensor


def stale(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    row, block = x[:, 1], x[:, 1:3]
    x[:, 1:] *= y[:, 1:]
    return row + block.sum(1)


def by_another_view(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    row = x[0]
    x.transpose(0, 1)[1].add_(y[:, 1])
    return x.sum(0) * row


def view_of_a_view(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:][:, 0][..., ::2] = y[:, 0, ::2]
    return x * x[:, 1:].sum(1, keepdim=True)


def flat(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x.view(-1)[3:9] = y.reshape(-1)[:6]
    return x


def lifted(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x.unsqueeze(1)[:, 0, 2] = y[:, 1]
    return x


def scan(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for place in range(x.shape[1]):
        out[:, place] = torch.tanh(out[:, place - 1] + y[:, place]) * x[:, place]
    return out


def triangular(x: Tensor, y: Tensor) -> Tensor:
    """The chunked delta rule of linear attention."""
    square = -(x @ y.transpose(1, 2)).tril(-1)
    for place in range(1, square.shape[-1]):
        row, before = square[..., place, :place].clone(), square[..., :place, :place].clone()
        square[..., place, :place] = row + (row.unsqueeze(-1) * before).sum(-2)
    return square + torch.eye(square.shape[-1])


def returned(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    z = x.mul_(y)
    z += 1
    return x + z.sin_() + x


def kinds(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.masked_fill_(y > 0.5, 2.0).clamp_(max=3.0)
    x[0].zero_()
    x[1, 2].fill_(4.0)
    x.index_add_(1, torch.tensor([0, 2]), y[:, :2])
    x.scatter_(2, torch.zeros(2, 4, 1, dtype=torch.long), y[..., :1])
    x[:, torch.tensor([1, 3])] = y[:, 2:]
    return F.relu(x, inplace=True)


def its_own_rows(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:] = x[:, :-1].clone() * y[:, 1:]
    x[:, 0] = x[:, 3]
    return x


def cast(x: Tensor, y: Tensor) -> Tensor:
    half = x.to(torch.bfloat16)
    half[:, 1] = y[:, 1]
    half += y.to(torch.bfloat16)
    return half.float()


def mask(x: Tensor, y: Tensor) -> Tensor:
    seen = torch.zeros(4, 4, dtype=torch.bool)
    seen[1:, :2] = True
    seen[:, 0].logical_or_(torch.ones(4, dtype=torch.bool))
    return (x @ y.transpose(1, 2)).masked_fill(seen, 0.0)


def copied_by_reshape(x: Tensor, y: Tensor) -> Tensor:
    """A reshape that has to copy is no view: the write does not reach x."""
    x = x.clone()
    x.transpose(0, 1).reshape(-1)[:5] = y.reshape(-1)[:5]
    x.contiguous()[0] *= 2
    return x


def largest(x: Tensor, y: Tensor) -> Tensor:
    values, places = (x * y).max(1)
    values.mul_(2)
    return values + places


def unseen(x: Tensor, y: Tensor) -> Tensor:
    """Nothing reads the view between two writes."""
    x = x.clone()
    half = x[:, :2]
    x.add_(y)
    half.mul_(3.0)
    return x - half.sum(1, keepdim=True)


HERE = [stale, by_another_view, view_of_a_view, flat, lifted, scan, triangular, returned, kinds, its_own_rows, cast,
        mask, copied_by_reshape, largest, unseen]  # fmt: skip


def pieces(x: Tensor, y: Tensor) -> Tensor:
    """Eager PyTorch lets nobody write to one of several views of what has a gradient."""
    copy = x.detach().clone()
    left, right = copy.chunk(2, 1)
    left.mul_(3.0)
    return (copy[:, :2] + right) * y[:, 2:]


def pieces_that_are_stale(x: Tensor, y: Tensor) -> Tensor:
    copy = x.detach().clone()
    left, right = copy.chunk(2, 1)
    copy.mul_(3.0)
    return (left + right) * y[:, 2:]


def turned(x: Tensor, y: Tensor) -> Tensor:
    """No write, though it is spelt like one."""
    square = (x @ y.transpose(1, 2))[0]
    other = square[0]
    square.t_()
    return square[1] * other


def permuted(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.permute(2, 0, 1)[1] = y[..., 0]
    return x


def given(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(2, 4, 3)
    torch.add(x.detach(), y.detach(), out=out)
    return out * x


def several(x: Tensor, y: Tensor) -> Tensor:
    parts = [x.clone(), y.clone()]
    torch._foreach_mul_(parts, 2.0)
    return parts[0] * parts[1]


LEFT = [pieces, turned, permuted, given, several]


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x.exp(), y.sin()).square().sum()


def values() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 24).view(2, 4, 3)
    return x.requires_grad_(), x.detach().flip(1).mul(3).requires_grad_()


def compared(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Loss and gradients of the functional graph, to the bit those of eager PyTorch."""
    x, y = values()
    expected = Calling(function)(x, y)
    wanted = torch.autograd.grad(expected, (x, y), allow_unused=True)
    exported = torch.export.export(Calling(function), values(), strict=False)
    inline_regions(exported.graph_module)
    graph, _ = functional(exported)
    assert not any(map(g.mutates, graph.nodes))
    constants = [tensor for name, tensor in exported.constants.items()]
    found = fx.GraphModule({}, graph)(*constants, x, y)[0]
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, (x, y), allow_unused=True), wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("function", [*HERE, pieces_that_are_stale])
def test_a_write_is_an_operation_that_gives_a_new_tensor(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with patch.object(ExportedProgram, "run_decompositions", side_effect=AssertionError("left to torch")):
        compared(function)


@pytest.mark.parametrize("function", LEFT)
def test_what_has_no_form_here_is_left_to_torch(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    to_torch = patch.object(ExportedProgram, "run_decompositions", side_effect=RuntimeError("torch's"))
    with to_torch, pytest.raises(RuntimeError, match="torch's"):
        compared(function)
    compared(function)
