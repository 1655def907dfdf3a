"""Writes into detached tensors: the gradient of what is written is eager's, and what shares the memory is not lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import csc
from csc.errors import InputError

Tensor = torch.Tensor
Write = Callable[[Tensor, Tensor, Tensor], Tensor]
IDS = torch.tensor([[0, 7, 3, 9, 1, 5], [2, 4, 8, 6, 10, 0]])


def to_a_buffer_s_copy(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    positions = table.index_select(0, torch.arange(6)).view(1, 6, 8).expand(2, 6, 8).contiguous().detach()
    positions += added
    return hidden + positions


def to_hidden(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    copy = (hidden * 2).detach()
    copy += added
    return hidden + copy


def to_a_view(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    copy = (hidden * 2).detach()
    rows = copy.view(-1, 8)
    rows.mul_(added.view(-1, 8))
    return hidden + copy


def to_a_part(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    copy = (hidden * 2).detach()
    copy[:, 0] = added[:, 0]
    behind = copy[:, 3:]
    behind -= added[:, 3:]
    return hidden + copy * copy[:, :3].repeat(1, 2, 1)


def to_what_no_grad_made(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    with torch.no_grad():
        copy = hidden * 2
    copy += added
    return hidden + copy


def to_data(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    copy = (hidden * 2).data.to(torch.float32)
    copy += added
    return hidden + copy


def to_another_dtype(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    twice = hidden * 2
    wide = twice.detach().to(torch.float64)  # memory of its own
    wide += added
    return twice + wide.float()


WRITES = (
    to_a_buffer_s_copy, to_hidden, to_a_view, to_a_part, to_what_no_grad_made, to_data, to_another_dtype,
)  # fmt: skip


class Model(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.kind = nn.Embedding(11, 8), nn.Embedding(2, 8)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(6, 8))
        self.write = write

    def forward(self, ids: Tensor) -> Tensor:
        written = self.write(self.first(self.embed(ids)), self.kind((ids > 5).long()), self.table)
        return self.last(written).square().mean()


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_gradients_are_eager_s(write: Write) -> None:
    model = Model(write)
    right = model(IDS)
    right.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    found = csc.compile(model, example={"ids": IDS}, check=False).train_step({"ids": IDS})
    torch.testing.assert_close(found, right.detach())
    assert gradients["kind.weight"] is not None
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def read_by_another_name(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    twice = hidden * 2
    copy = twice.detach()
    copy += added
    return twice + copy


def read_by_a_view(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    twice = hidden * 2
    rows = twice.view(-1, 8)
    twice.detach().mul_(added)
    return hidden + rows.view_as(hidden)


def read_by_another_detach(hidden: Tensor, added: Tensor, table: Tensor) -> Tensor:
    twice = hidden * 2
    one, other = twice.detach(), twice.detach()
    one += added
    return hidden + one * other


@pytest.mark.parametrize("write", [read_by_another_name, read_by_a_view, read_by_another_detach])
def test_what_shares_the_memory_and_is_read_afterwards_is_refused(write: Write) -> None:
    with pytest.raises(InputError, match=r"test_detached_writes.py:\d+: .*write to a copy: x.detach\(\).clone\(\)"):
        csc.compile(Model(write), example={"ids": IDS}, check=False).train_step({"ids": IDS})


def test_a_parameter_is_not_written_to_in_secret() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.layer.weight.detach().clamp_(-1, 1)
            return self.layer(x).square().mean()

    batch = {"x": torch.randn(2, 4)}
    with pytest.raises(csc.CscError, match="the model changes a parameter while it runs"):
        csc.compile(Clamped(), example=batch, check=False).train_step(batch)
