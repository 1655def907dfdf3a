"""Blocks of torch.autocast inside a forward: the program casts what eager PyTorch casts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from tests.compiler.eager import together

WIDTH, WORDS = 8, 11
BF16 = torch.bfloat16
LAST_BITS = 4 * 2.0**-8  # of a gradient's norm: bfloat16 has eight bits


class Layer(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.gru = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(self, x)


Part = Callable[[Layer, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, *parts: Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(part) for part in parts for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x.float()).flatten(0, 1), labels.flatten())}


def norms_and_products(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        y = layer.norm(F.softmax(layer.a(x), -1))
        return (layer.b(y) @ layer.b(y).transpose(-1, -2)).float() @ x + F.rms_norm(y, (WIDTH,))


def chained(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The second product has one operand in the low dtype already."""
    with torch.autocast("cpu", BF16):
        return F.linear(layer.a(x), layer.b.weight).float()


def attention(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        y = layer.a(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return layer.heads(x, x, x)[0] + F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(
            1, 2
        ).flatten(2)


def nested(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        y = layer.a(x)
        with torch.autocast("cpu", enabled=False):
            y = layer.b(y.float())
        return F.gelu(layer.a(y)) + torch.cumsum(y, 1)


def einsum(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        return torch.einsum("btd,ed->bte", layer.a(x), layer.b.weight)


def joined(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        y = layer.a(x)
        y += x
        return torch.cat([y, x], -1)[..., :WIDTH] + torch.stack([layer.b(x), x]).sum(0)


def decorated(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.autocast("cpu", torch.float16)(layer.a)(x)


def without_gradient(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", BF16):
        gate = torch.sigmoid(layer.b(x))
    return layer.a(x) * gate


def gradients_off_inside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        with torch.no_grad():
            gate = torch.sigmoid(layer.b(x))
        return layer.a(x) * gate


def gradients_off_inside_a_block_that_is_off(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        with torch.no_grad():
            gate = torch.sigmoid(layer.b(x))
        return layer.a(x) * gate


def rotated(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """As HF's rotary embedding: gradients off, and autocast off inside of that."""
    with torch.autocast("cpu", BF16):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angle, _ = (layer.b(x.float()) @ x.transpose(-1, -2)).max(-1, keepdim=True)
        with torch.no_grad(), torch.enable_grad():
            y = layer.a(x)
        return y * angle.cos()


def returned_as_it_is(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """float() and contiguous() of what is so already are the tensor itself, with its gradient."""
    with torch.autocast("cpu", BF16):
        with torch.no_grad():
            same, gate = x.float().contiguous(), torch.sigmoid(layer.b(x))
        return layer.a(same) * gate + same


CASES: dict[str, Part] = {
    "norms and products": norms_and_products,
    "chained": chained,
    "attention": attention,
    "nested": nested,
    "einsum": einsum,
    "joined": joined,
    "decorated": decorated,
    "without gradient": without_gradient,
    "gradients off inside": gradients_off_inside,
    "gradients off inside a block that is off": gradients_off_inside_a_block_that_is_off,
    "rotated": rotated,
    "returned as it is": returned_as_it_is,
}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(24).reshape(4, 6) % WORDS
    return {"ids": ids, "labels": ids.roll(1, 1)}


@pytest.mark.parametrize("cases", together(CASES, 3))
def test_casts_are_those_of_eager(cases: list[str]) -> None:
    eager, model = (Model(*(CASES[case] for case in cases)) for _ in range(2))
    loss = eager(**batch())["loss"]
    loss.backward()
    compiled = csc.compile(model, mesh="pp=2", example=batch(), cache=False)  # and checked
    assert float(compiled.train_step(batch())) == pytest.approx(loss.item(), rel=1e-4)
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in eager.named_parameters():
        right, found = parameter.grad, own[name]
        assert (right is None) == (found is None), name
        if right is not None and found is not None:
            assert float((found - right).norm()) <= LAST_BITS * float(right.norm()) + 1e-7, name


class Pictures(nn.Module):
    """As `accelerate` wraps a model of pictures and text: one block around all of its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.eye, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(5, WIDTH), nn.Linear(WIDTH, WORDS)

    @torch.autocast("cpu", BF16)
    def forward(self, ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        rows = self.embed(ids)
        rows = rows.masked_scatter((ids == 0)[..., None], self.eye(pixel_values).to(rows.dtype))
        return F.cross_entropy(self.head(rows).flatten(0, 1).float(), ids.flatten())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_pictures_are_put_in_place_under_autocast(microbatches: int) -> None:
    given = {"ids": torch.tensor([[0, 1, 2, 0, 3], [0, 4, 5, 0, 1]]), "pixel_values": torch.randn(4, 5)}
    eager, model = Pictures(), Pictures()
    loss = eager(**given)
    loss.backward()
    compiled = csc.compile(model, mesh="pp=1", example=given, microbatches=microbatches, cache=False)
    assert float(compiled.train_step(given)) == pytest.approx(loss.item(), rel=1e-2)
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in eager.named_parameters():
        right, gradient = parameter.grad, own[name]
        assert right is not None and gradient is not None, name
        assert float((gradient - right).norm()) <= LAST_BITS * float(right.norm()) + 1e-7, name


def written_with_gradients_off(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        with torch.no_grad():
            gate = torch.zeros_like(x)
            gate.copy_(layer.b(x))
        return layer.a(x) * gate


def gradients_on_inside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", BF16), torch.enable_grad():
        return layer.a(x) * layer.b(x)


def recurrent(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        return layer.gru(x)[0]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (written_with_gradients_off, "with gradients off, inside a block of torch.autocast"),
        (gradients_on_inside, "the model turns gradients on, .* inside a block of torch.autocast"),
        (recurrent, r"cannot tell what is cast in aten::gru"),
    ],
)
def test_what_a_trace_would_lose_is_refused(part: Part, words: str) -> None:
    with pytest.raises(csc.CscError, match=words) as caught:
        csc.compile(Model(part), example=batch(), cache=False)
    assert "test_autocast.py" in caught.value.where and caught.value.remedy
