"""What a model asks of autograd in its forward: the gradients are eager's, or a sentence names the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import csc
from csc.errors import CscError
from tests.compiler.eager import WIDTH, Applying, Stack, assert_as_eager, batch, stack, together
from tests.tiers import BEFORE_2_13

Function = Callable[[torch.Tensor, Applying], torch.Tensor]


def no_grad(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    with torch.no_grad():
        y = x * layer.scale
    with torch.set_grad_enabled(False):
        z = x.exp()
    return y * layer.scale * z + x


def same_under_no_grad(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """Operations that change nothing return their operand, whose gradient no_grad does not take."""
    with torch.no_grad():
        cast, near, held, plus = x.to(x.dtype), x.contiguous(), F.dropout(x, 0.5, training=False), +x
        float_of, twice = x.float(), x.to(torch.float32).contiguous().type_as(x)
        made = x.tanh().to(x.dtype).contiguous()
    return (x * cast + near.sin() + held * 2 + plus.exp() + float_of * 3 + twice.cos()) * layer.scale * made


def copied_under_no_grad(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    turned = x.transpose(-1, -2)
    with torch.no_grad():
        near, wide, fresh = turned.contiguous(), x.double(), x.to(x.dtype, copy=True)
        seen, dropped = x.view(x.shape), F.dropout(x, 0.0, training=True)
    return near.transpose(-1, -2) * layer.scale + wide.float() * x + fresh * seen + dropped * x


def inference(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    with torch.inference_mode():
        y = x * layer.scale
    return x * layer.scale + y * 2


@torch.no_grad()
def fixed(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


def enabled_within(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    with torch.no_grad():
        with torch.enable_grad():
            y = x.tanh() * layer.scale
        z = x.exp()
    return y * z


def data(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return x * layer.scale.data + x.data * layer.scale


def first_gradient(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """Without create_graph it is a constant."""
    (found,) = torch.autograd.grad((x.sin() * layer.scale).sum(), x)
    return found * layer.scale


def penalty(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    (found,) = torch.autograd.grad((x.sin() * layer.scale).sum(), x, create_graph=True)
    return found.square()


def of_a_leaf(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    own = x.detach().requires_grad_(True)
    return torch.autograd.grad(own.sin().sum(), own)[0] * layer.scale + x


def kept_gradient(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    y.retain_grad()
    return y


def asked(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return x.detach().requires_grad_() * layer.scale + x


def on_the_host(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.sin() * layer.scale


def autocast_off(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return layer.linear(x) * layer.scale


def written(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """Writes that autograd sees, or that concern no value with a gradient."""
    y = torch.zeros_like(x)
    y[..., 0] = x[..., 0]
    y.add_(x)
    with torch.no_grad():
        z = x.clone()
        z.mul_(2)
    w = x.detach().clone()
    w += 1
    return y * layer.scale + z * w


CASES: dict[str, Function] = {
    "no_grad": no_grad,
    "what changes nothing under no_grad": same_under_no_grad,
    "copies under no_grad": copied_under_no_grad,
    "inference mode": inference,
    "a function without gradients": lambda x, layer: fixed(x) * layer.scale,
    "enabled within": enabled_within,
    "detach": lambda x, layer: x.detach() * layer.scale + x,
    "data": data,
    "a gradient": first_gradient,
    "a gradient penalty": penalty,
    "a gradient of a leaf": of_a_leaf,
    "retain_grad": kept_gradient,
    "requires_grad_": asked,
    "save_on_cpu": on_the_host,
    "autocast off": autocast_off,
    "vmap": lambda x, layer: torch.vmap(lambda row: row.sin() * layer.scale)(x),
    "jvp": lambda x, layer: torch.func.jvp(lambda y: y.sin() * layer.scale, (x,), (x.detach(),))[1],
    "writes": written,
}
if BEFORE_2_13:
    del CASES["jvp"]


@pytest.mark.parametrize("names", together(CASES, 3))
def test_gradients_are_eager_s(names: list[str]) -> None:
    assert_as_eager(stack(*(CASES[name] for name in names)), batch(), meshes=["pp=2"])


class Normalised(nn.Module):
    def __init__(self, normalised: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear = normalised(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrizations(kind: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    assert_as_eager(Stack([Normalised(kind) for _ in range(2)]), batch(), meshes=["pp=2"])


def detached_in_place(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return (x * 1).detach_() * layer.scale + x


def clamped(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    with torch.no_grad():
        y.clamp_(max=0.1)
    return y * 2


def through_detach(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    y.detach().mul_(2)
    return y * y.sin()


def through_data(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    y.data[..., 0] = 0
    return y + 1


def backward(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    own = x.detach().requires_grad_(True)
    own.sin().sum().backward()
    return x * layer.scale


def backward_by_the_function(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    own = x.detach().requires_grad_(True)
    torch.autograd.backward([own.sin().sum()])
    return x * layer.scale


def halved_when_saved(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
        return x.sin() * layer.scale


def of_a_result(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return torch.autograd.grad(x.tanh().sum(), x, create_graph=True)[0] * layer.scale


REFUSED: dict[str, tuple[Function, str]] = {
    "detach_": (detached_in_place, "detaches a tensor in place"),
    "a write under no_grad": (clamped, "where autograd does not see it"),
    "a write through detach": (through_detach, "where autograd does not see it"),
    "a write through data": (through_data, "where autograd does not see it"),
    "backward": (backward, "runs a backward in its forward"),
    "autograd.backward": (backward_by_the_function, "runs a backward in its forward"),
    "hooks on saved tensors": (halved_when_saved, "hooks on the tensors that autograd saves"),
    "a gradient of a kept result": (of_a_result, "asks for gradients in its forward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, sentence = REFUSED[name]
    with pytest.raises(csc.CscError, match=sentence) as caught:
        csc.compile(stack(function), example=batch(), cache=False)
    assert "test_autograd_calls.py" in caught.value.where and caught.value.remedy


class Penalised(Stack):
    """The loss has the gradient of the layers' result."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = self.embed(x).detach().requires_grad_(True)
        hidden = own
        for layer in self.layers:
            hidden = layer(hidden)
        (gradient,) = torch.autograd.grad(hidden.pow(2).sum(), own, create_graph=True)
        loss = F.cross_entropy(self.head(hidden + self.embed(x)).flatten(0, 1), labels.flatten())
        return loss + gradient.pow(2).mean()


def test_a_gradient_through_equal_layers_is_refused_as_one_through_others() -> None:
    """These are traced one by one then: what stands for an equal layer has no backward."""
    layers = stack(lambda x, layer: torch.sin(x) * layer.scale, layers=3).layers
    with pytest.raises(CscError, match="asks for gradients in its forward"):
        _ = csc.compile(Penalised(list(layers)), example=batch(), cache=False).program


@pytest.mark.skipif(BEFORE_2_13, reason="it is refused as what cannot be traced: torch itself fails first")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, layer: torch.func.grad(lambda own: own.pow(2).sum())(x) * layer.scale,
        lambda x, layer: torch.func.vjp(torch.tanh, x * layer.scale)[1](torch.ones_like(x))[0],
        lambda x, layer: torch.func.grad(lambda own: (own * layer.scale).pow(2).sum())(x),  # fails behind the trace
    ],
)
def test_a_function_that_is_differentiated_is_refused_by_that_word(function: Function) -> None:
    words = r"test_autograd_calls\.py:\d+.*differentiates a function in its forward.*ask torch\.autograd\.grad"
    with pytest.raises(CscError, match=words):
        _ = csc.compile(stack(function), example=batch(), cache=False).program


class Halving(Stack):
    """Writes to its batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5), labels)


def test_a_write_to_the_batch_is_named() -> None:
    with pytest.raises(CscError, match=r"writes to 'x', an entry of its batch.*not x\.mul_"):
        _ = csc.compile(Halving([]), example=batch(), cache=False).program


def test_a_function_of_torch_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that calls the one before would run more than once; another is taken as it is."""
    before = F.cross_entropy
    model = stack(lambda x, layer: x.sin() * layer.scale)
    monkeypatch.setattr(F, "cross_entropy", lambda *given, **named: before(*given, **named) * 2)
    with pytest.raises(CscError, match="in place of a function of its own that this one calls"):
        _ = csc.compile(model, example=batch(), cache=False).program
    monkeypatch.setattr(F, "cross_entropy", lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels) * 2)
    assert_as_eager(model, batch(), meshes=["pp=2"])
