"""Mixtures of experts written as loops: each looks up the tokens that chose it, and adds what it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from tests.compiler.eager import WIDTH, Stack, assert_as_eager, batch
from tests.tiers import long

EXPERTS, CHOSEN = 4, 2


class Experts(nn.Module):
    def __init__(self, loop: Callable[..., Any]) -> None:
        super().__init__()
        self.loop = loop
        self.gate, self.weight = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, WIDTH)
        shares, chosen = torch.topk(self.gate(hidden).softmax(-1), CHOSEN, -1)
        return x + self.loop(self, hidden, shares, chosen).view(x.shape)


def added(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    seen = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for expert in range(EXPERTS):
        place, token = torch.where(seen[expert])
        made = torch.tanh(hidden[token] @ self.weight[expert]) * shares[token, place, None]
        out.index_add_(0, token, made)
    return out


def by_rows(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """As many do who write one themselves."""
    out = torch.zeros_like(hidden)
    for expert in range(EXPERTS):
        token, place = torch.where(chosen == expert)
        out = out.index_add(0, token, (hidden[token] @ self.weight[expert]) * shares[token, place].unsqueeze(-1))
    return out


def first_alone(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    out = hidden.clone()
    (token,) = torch.where(chosen[:, 0] == 1)
    return out.index_add(0, token, hidden.index_select(0, token) * self.weight[0, 0])


def stacked(loop: Callable[..., Any]) -> Stack:
    torch.manual_seed(0)
    return Stack([Experts(loop), Experts(loop)])


def hit(seen: torch.Tensor) -> torch.Tensor:
    return torch.greater(seen.sum(dim=(-1, -2)), 0).nonzero()


def those_hit(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """As transformers writes it (Step-3.7). One expert more than there are is never hit."""
    out = torch.zeros_like(hidden)
    with torch.no_grad():
        seen = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        found = hit(seen)
    for expert in found:
        expert = expert[0]
        if expert == EXPERTS:
            continue
        with torch.no_grad():
            place, token = torch.where(seen[expert])
        made = torch.tanh(hidden[token] @ self.weight[expert])
        out.index_add_(0, token, made * shares[token, place, None])
    return out


def one_is_never_hit(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What a turn does besides adding rows is done for those that were hit alone."""
    out = torch.zeros_like(hidden)
    seen = F.one_hot(chosen % 2, EXPERTS).permute(2, 1, 0)
    for expert in hit(seen):
        token = torch.where(seen[expert].squeeze(0))[1]
        out.index_add_(0, token, hidden[token] @ self.weight[int(expert)])
        out += 0.1 * self.weight[expert[0]].sum()
        out[0] = out[0] * 1.5
    return out


@pytest.mark.parametrize("loop", [long(added), by_rows, long(first_alone), those_hit, one_is_never_hit])
@pytest.mark.long_cases("one_is_never_hit", "those_hit")
def test_gradients_are_those_of_eager(loop: Callable[..., Any]) -> None:
    assert_as_eager(stacked(loop), batch(), meshes=("pp=2",))


def to_others(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows of one selection, added at the places of another."""
    one, other = torch.where(chosen[:, 0] < 2)[0], torch.where(chosen[:, 0] >= 2)[0]
    size = min(len(one), len(other))
    return hidden.index_add(0, other[:size], hidden[one][:size])


def counted(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    token = torch.where(chosen[:, 0] == 1)[0]
    return hidden.index_add(0, token, hidden[token] / len(token))


def summed(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return hidden + hidden[torch.where(chosen[:, 0] == 1)[0]].sum(0)


def along_features(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    feature = torch.where(hidden.sum(0) > 0)[0]
    return hidden.index_add(1, feature, hidden[:, feature])


def test_a_sum_of_rows_that_are_selected() -> None:
    assert_as_eager(stacked(summed), batch(), meshes=("pp=2",))


@pytest.mark.parametrize("loop", [to_others, counted, along_features])
def test_what_counts_rows_that_were_not_selected_is_refused(loop: Callable[..., Any]) -> None:
    with pytest.raises(csc.CscError):
        csc.compile(stacked(loop), mesh="pp=2", example=batch(), cache=False)


def kept_in_a_list(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    seen = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    return sum(self.weight[int(expert)].sum() * hidden for expert in hit(seen))


def rebound(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    out = hidden
    for expert in hit(F.one_hot(chosen, EXPERTS).permute(2, 1, 0)):
        out = out + self.weight[int(expert)].sum()
    return out


def counting(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    turns = 0
    for _ in hit(F.one_hot(chosen, EXPERTS).permute(2, 1, 0)):
        turns = turns + 1
    return hidden * turns


def left(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    out = hidden.clone()
    for expert in hit(F.one_hot(chosen, EXPERTS).permute(2, 1, 0)):
        out += self.weight[int(expert)].sum()
        break
    return out


def read_by_some(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    out = hidden.clone()
    for expert in hit(F.one_hot(chosen, EXPERTS).permute(2, 1, 0)):
        out += (self.weight[int(expert)] if int(expert) else self.gate.weight).sum()
    return out


def the_last(self: Experts, hidden: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    for expert in hit(F.one_hot(chosen, EXPERTS).permute(2, 1, 0)):
        row = self.weight[int(expert), 0]
    return hidden * row


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (kept_in_a_list, "reads outside of a turn|carries"),
        (rebound, "reads outside of a turn"),
        (counting, "carries turns from turn to turn"),
        (left, "leaves such a loop before its end"),
        (read_by_some, "for some alone"),
        (the_last, "reads outside of a turn"),
    ],
)
def test_what_a_turn_leaves_behind_is_refused(loop: Callable[..., Any], said: str) -> None:
    with pytest.raises(csc.CscError, match=said):
        csc.compile(stacked(loop), mesh="pp=2", example=batch(), cache=False)
