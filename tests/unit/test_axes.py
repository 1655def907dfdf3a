"""Which dimension counts tokens is followed through operations, whatever else has the same size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from csc.kernels import attention as _operators  # noqa: F401  registers csc::attention
from torch import fx, nn

from csc.analysis.tokens import Axis, apart, axes
from csc.ir import graph as g
from csc.torch_private.traces import FakeTensorMode, make_fx

T = 8  # tokens; also samples, heads and features, so that nothing can be told from sizes


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.csc.attention(q, k, v, None, 0, False, 0, 0, 1.0, 0.0)[0]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 2, 4).transpose(1, 2)


def traced(forward: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> fx.Graph:
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(shape) for shape in shapes]
        return make_fx(forward, tracing_mode="real")(*given).graph


def found(forward: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> tuple[list[Axis | None], dict[str, bool]]:
    """The axes of the arguments, and of each call whether it keeps tokens apart, by the op's name."""
    graph = traced(forward, *shapes)
    calls = g.calls(graph)
    attentions = [node for node in calls if g.op_name(node) == "csc::attention"]
    of = axes(calls, attentions, T)
    return [of.get(node) for node in g.placeholders(graph)], {g.short_op(n): apart(n, of, T) for n in calls}


def encoder(x: torch.Tensor) -> torch.Tensor:
    return attend(heads(x), heads(x), heads(x))


@pytest.mark.parametrize(
    ("forward", "shapes", "expected"),
    [
        (encoder, [(T, T, T)], [(1, 1)]),
        (lambda x: encoder(x.transpose(0, 1)), [(T, T, T)], [(0, 1)]),
        (lambda x: encoder(x.flatten(2).transpose(1, 2)), [(T, T, 1, T)], [(3, 1)]),
        (lambda x, w: encoder(nn.functional.linear(x, w)), [(T, T, T), (T, T)], [(1, 1), None]),
        (lambda x, w: encoder((x.view(-1, T) @ w).view(T, T, T)), [(T, T, T), (T, T)], [(1, 1), None]),
        (lambda x: encoder(x.view(2, T, T)), [(2 * T, T)], [(0, 1)]),  # samples joined in front
        (lambda x: encoder(x.view(T, T, 2, T)[:, :, 0]), [(T, 2 * T, T)], [(1, 2)]),  # two places each
        (lambda x, place: encoder(x + place), [(T, T, T), (T, T)], [(1, 1), (0, 1)]),
        (lambda x, scale: encoder(x * scale[:, None]), [(T, T, T), (T, T)], [(1, 1), None]),
        (lambda x, gate: encoder(x * gate), [(T, T, T), (T, T, 1)], [(1, 1), (1, 1)]),
        (lambda x: encoder(torch.stack([x, x], 1).sum(1)), [(T, T, T)], [(1, 1)]),
        (lambda x: encoder(x.unflatten(1, (2, T // 2)).transpose(1, 2).flatten(1, 2)), [(T, T, T)], [None]),
    ],
)  # fmt: skip
def test_axes_lead_back_to_what_enters(
    forward: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], expected: list[Axis | None]
) -> None:
    of_arguments, kept = found(forward, *shapes)
    assert of_arguments == expected
    assert kept["attention"] and kept["transpose"]


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (lambda x: x @ x, "bmm"),
        (lambda x: x - x.mean(1, keepdim=True), "mean"),
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: torch.softmax(x, 1), "_softmax"),
        (lambda x: x.roll(1, 1), "roll"),
        (lambda x: x + x.transpose(1, 2), "add"),
        (lambda x: torch.cat([x[:, 4:], x[:, :4]], 1), "cat"),
        (lambda x: nn.functional.layer_norm(x, (T, T)), "native_layer_norm"),
        (lambda x: nn.functional.conv1d(x, torch.ones(T, T, 1)), "convolution"),
    ],
)
def test_what_sees_other_tokens_is_not_apart(between: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    _, kept = found(lambda x: encoder(between(encoder(x).transpose(1, 2).flatten(2))), (T, T, T))
    assert not kept[name]
    assert kept["attention"]


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (lambda x: x.cumsum(2), "cumsum"),
        (lambda x: torch.softmax(x, -1), "_softmax"),
        (lambda x: x + x.mean(-1, keepdim=True), "mean"),
        (lambda x: nn.functional.layer_norm(x, (T,)), "native_layer_norm"),
        (lambda x: torch.cat([x[:, :, 4:], x[:, :, :4]], 2), "cat"),
        (lambda x: x.split(4, 2)[0].repeat(1, 1, 2), "split"),
        (lambda x: (x.view(-1, T) @ torch.ones(T, T)).view(T, T, T), "mm"),
    ],
)
def test_what_looks_at_one_token_is_apart(between: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    _, kept = found(lambda x: encoder(between(encoder(x).transpose(1, 2).flatten(2))), (T, T, T))
    assert kept[name]


def test_queries_of_another_sequence_are_not_apart() -> None:
    """A resampler sees all tokens; keys of another sequence are whole on every rank."""
    _, kept = found(lambda x, latents: attend(latents, heads(x), heads(x)), (T, T, T), (T, 2, 3, 4))
    assert not kept["attention"]
    of_arguments, kept = found(lambda x, y: attend(heads(x), y, y), (T, T, T), (T, 2, 3, 4))
    assert of_arguments == [(1, 1), None] and kept["attention"]
