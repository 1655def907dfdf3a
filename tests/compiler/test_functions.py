"""torch.autograd.Function with a backward of its own: csc's gradients are those that it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import csc
from tests.compiler.eager import WIDTH, Applying, assert_as_eager, batch, stack, step, together


class Reverse(Function):
    """Gradient reversal: a plain argument, no saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        return -ctx.scale * d_out, None


reverse = Reverse.apply  # bound before anything is traced


class Straight(Function):
    """Straight-through estimator, its input given back as it is in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out


class Identity(Function):
    """Gives back the tensor that it is given; clips the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out.clamp(-1e-2, 1e-2)


class Swish(Function):
    """Saved tensors: input and output; the backward is only close to the derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x * torch.sigmoid(x)
        ctx.save_for_backward(x, None, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        x, nothing, out = ctx.saved_tensors
        assert nothing is None
        return d_out * (out + 0.5 * torch.sigmoid(x))


class Scaled(Function):
    """setup_context, a default argument, two inputs of which one is broadcast, needs_input_grad."""

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor, power: int = 2) -> torch.Tensor:
        return x * scale**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, scale, ctx.power = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        d_x = d_scale = None
        if ctx.needs_input_grad[0]:
            d_x = 2 * d_out * scale**ctx.power
        if ctx.needs_input_grad[1]:
            d_scale = 3 * d_out * x  # autograd adds up what was broadcast
        return d_x, d_scale, None


class Several(Function):
    """Three results, one of them not differentiable and one of whole numbers; no gradient for the second input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
        half, sign, place = x * scale / 2, x.sign(), x.argmax(-1)
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return half, x.exp(), sign, place, "text"

    @staticmethod
    def backward(ctx: Any, d_half: Any, d_exp: Any, d_sign: Any, d_place: Any, d_text: Any) -> Any:
        (sign,) = ctx.saved_tensors
        assert d_sign.shape == sign.shape and d_text is None
        return d_half + 0.1 * d_exp * sign, None


class OfVjp(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def vjp(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out * 0.25


class Linear(Function):
    """A linear layer by hand: the gradient of a weight, and of a tensor in a list that gets none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, more: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias) + more[0]

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return d_out @ weight, d_out.flatten(0, 1).t() @ x.flatten(0, 1), d_out.sum((0, 1)) * 2, None


class Outer(Function):
    """Calls another function in its forward, and in its backward asks autograd for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return Straight.apply(x) * x

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_(True)
            (found,) = torch.autograd.grad(own.sin(), own, d_out)
        return found * 0.5


def several(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    half, exp, sign, place, text = Several.apply(x, layer.scale)
    assert text == "text" and not sign.requires_grad
    return half + exp * sign + F.one_hot(place, WIDTH)


def one_of_several(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return Several.apply(x, layer.scale)[0]


def within_no_grad(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    with torch.no_grad():
        fixed = reverse(x, 3.0)
    return fixed * layer.scale


CASES: dict[str, Callable[[torch.Tensor, Applying], torch.Tensor]] = {
    "reverse": lambda x, layer: reverse(x.tanh(), 0.5),
    "reverse_of_a_parameter": lambda x, layer: x * reverse(layer.scale, 2.0),
    "straight": lambda x, layer: Straight.apply(x * layer.scale),
    "identity": lambda x, layer: Identity.apply(x) + x,
    "swish": lambda x, layer: Swish.apply(x),
    "scaled": lambda x, layer: Scaled.apply(x, layer.scale),
    "several": several,
    "one_of_several": one_of_several,
    "vjp": lambda x, layer: OfVjp.apply(x),
    "linear": lambda x, layer: Linear.apply(x, layer.linear.weight, layer.scale, [layer.scale.exp()]),
    "of_one_another": lambda x, layer: Swish.apply(Scaled.apply(reverse(x, 0.5), layer.scale, 1)),
    "outer": lambda x, layer: Outer.apply(x),
    "no_grad": within_no_grad,
    "twice": lambda x, layer: reverse(x, 0.5) * reverse(x, 0.25),
}


@pytest.mark.parametrize("names", together(CASES))
def test_gradients_are_those_of_the_functions(names: list[str]) -> None:
    assert_as_eager(stack(*(CASES[name] for name in names)), batch())


def test_under_options() -> None:
    """Recomputed, in microbatches, with interleaved forward and backward; the embedding frozen, then the layers."""
    model = stack(lambda x, layer: Swish.apply(Scaled.apply(reverse(x, 0.5), layer.scale)), layers=4)
    assert_as_eager(model, batch(4), meshes=["pp=2"], microbatches=2, recompute="full")
    assert_as_eager(model, batch(), frozen=["embed.", "layers.0.linear."], meshes=["pp=2"])
    assert_as_eager(model, batch(), frozen=["embed.", "layers.", "head.bias"], meshes=["pp=2"])


def test_in_bfloat16() -> None:
    model = stack(lambda x, layer: reverse(Swish.apply(layer.linear(x)), 0.5))
    assert_as_eager(model, batch(), meshes=["pp=2"], precision="bf16", tolerance=0.05)


def test_a_longer_batch_needs_no_other_trace() -> None:
    model = stack(CASES["linear"])
    compiled = assert_as_eager(model, batch(3, 4), meshes=["pp=2"])
    _, gradients = step(model, batch(3, 7))
    model.zero_grad()
    compiled.train_step(batch(3, 7))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)


def test_programs_have_no_trace_of_it(tmp_path: Path) -> None:
    written = csc.compile(stack(CASES["swish"]), example=batch(), cache=False).write(tmp_path / "program")
    text = "".join(path.read_text() for path in written.rglob("*.py"))
    assert "sigmoid" in text and "own_gradient" not in text and "incoming" not in text


class Writes(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out


class Short(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out


class Undefined(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, d_sin: Any, d_cos: Any) -> Any:
        return d_sin if d_cos is None else d_cos


class Deciding(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out / d_out.norm() if d_out.norm() > 1 else d_out


class Result(Function):
    """Asks autograd for the gradient of an operation that keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own = ctx.saved_tensors[0].detach().requires_grad_(True)
            return torch.autograd.grad(own.tanh(), own, d_out)[0]


REFUSED: dict[str, tuple[Callable[[torch.Tensor, Applying], torch.Tensor], str]] = {
    "mark_dirty": (lambda x, layer: Writes.apply(x * 2), "writes to a value that needs a gradient"),
    "too few": (lambda x, layer: Short.apply(x, layer.scale), "1 gradients for 2 arguments"),
    "undefined": (lambda x, layer: Undefined.apply(x)[0], "set_materialize_grads"),
    "values": (lambda x, layer: Deciding.apply(x), "decision that depends on the values"),
    "result": (lambda x, layer: Result.apply(x), "asks for gradients in its forward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, sentence = REFUSED[name]
    with pytest.raises(csc.CscError, match=sentence) as caught:
        csc.compile(stack(function), example=batch(), cache=False)
    assert "test_functions.py" in caught.value.where and caught.value.remedy
