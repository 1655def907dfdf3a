"""A gradient that a model's own backward takes from what it was given does not become that: `.grad` is summed into."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import csc


class _Other(torch.autograd.Function):
    """w * other, whose gradient of w is `other`, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return w * other

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (other,) = ctx.saved_tensors
        return other.detach(), None


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_buffer, self.of_batch = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
        self.buffer = nn.Buffer(torch.randn(3, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(_Other.apply(self.of_buffer, self.buffer) + _Other.apply(self.of_batch, x)).sum()


def test_sums_over_steps_leave_buffers_and_batches_alone() -> None:
    model, batch = Given(), {"x": torch.randn(3, 4)}
    before = batch["x"].clone(), model.buffer.clone()
    model(**batch).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = csc.compile(model, example=batch, cache=False)
    for _ in range(3):
        compiled.train_step(batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * expected[name])
    compiled.clip_grad_norm_(1e-3)
    assert torch.equal(batch["x"], before[0]) and torch.equal(model.buffer, before[1])
    compiled.zero_grad()
    compiled.train_step(batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
