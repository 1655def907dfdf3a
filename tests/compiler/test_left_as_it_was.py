"""A model that csc refuses, or that fails while it is traced, leaves torch and itself as they were: whatever the trace
had switched on and its forward had set. The process trains other models right afterwards.

tests/conftest.py looks after each test of the suite whether the process is as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import csc
from csc.errors import CscError
from csc.torch_private.process_state import process_state
from tests.compiler.eager import Applying, assert_as_eager, batch, stack, together

Function = Callable[[torch.Tensor, Applying], torch.Tensor]


class Backward(torch.autograd.Function):
    """Asks in its backward for a number that a trace has not, with gradients off."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return gradient * float(context.saved_tensors[0].sum())


def jvp(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return sum(torch.func.jvp(lambda one: torch.tanh(one @ layer.linear.weight), (x,), (torch.ones_like(x),)))


def hessian(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    return torch.func.hessian(lambda one: (one * layer.scale).sum())(x[0, 0]).sum() + x


def of_a_generator(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """A block of autocast in a generator that is never resumed."""

    def entered() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            yield

    layer.suspended = entered()
    next(layer.suspended)
    return asked(x, layer)


def asked(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """A decision by a value."""
    return x if x.sum() > 0 else -x


def after(change: Callable[[Any], Any]) -> Function:
    """What is refused once the forward has changed something."""

    def forward(x: torch.Tensor, layer: Applying) -> torch.Tensor:
        change(layer)
        return asked(x, layer)

    return forward


def interrupted(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    torch.set_grad_enabled(False)
    raise KeyboardInterrupt


def draws(layer: Applying) -> None:
    random.random(), numpy.random.rand(), torch.rand(1)


def hooked(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    return asked(x, layer)


REFUSED: dict[str, Function] = {
    "jvp": jvp,
    "hessian": hessian,
    "a decision": asked,
    "a backward that asks": lambda x, layer: Backward.apply(x),
    "gradients off": after(lambda layer: torch.set_grad_enabled(False)),
    "inference mode": after(lambda layer: torch.inference_mode().__enter__()),
    "autocast": after(lambda layer: torch.autocast("cpu", torch.bfloat16).__enter__()),
    "a suspended block": of_a_generator,
    "default dtype": after(lambda layer: torch.set_default_dtype(torch.float64)),
    "default device": after(lambda layer: torch.set_default_device("meta")),
    "deterministic": after(lambda layer: torch.use_deterministic_algorithms(True)),
    "anomalies": after(lambda layer: torch.autograd.set_detect_anomaly(True)),
    "saved tensors": after(lambda layer: torch.autograd.graph.saved_tensors_hooks(id, id).__enter__()),
    "hooks of all modules": hooked,
    "eval mode": after(lambda layer: layer.eval()),
    "frozen": after(lambda layer: layer.linear.weight.requires_grad_(False)),
    "a hook": after(lambda layer: layer.linear.register_forward_hook(lambda *_: None)),
    "an attribute": after(lambda layer: setattr(layer, "factor", 3)),
    "random numbers": after(draws),
    "a seed": lambda x, layer: x + torch.manual_seed(3).initial_seed(),
    "an exception": lambda x, layer: x.no_such_method(),
    "interrupted": interrupted,
}


def numbers() -> Any:
    """What the generators will give next."""
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def of(model: nn.Module) -> Any:
    """What a model is, beside the numbers in its parameters."""
    parameters = [(name, one, one.requires_grad, one._version, one.grad) for name, one in model.named_parameters()]
    hooks = {name: list(one._forward_hooks) for name, one in model.named_modules()}
    attributes = {name: {key: id(one) for key, one in vars(part).items()} for name, part in model.named_modules()}
    return [(name, id(one), *rest) for name, one, *rest in parameters], hooks, attributes


@pytest.mark.parametrize("names", together(REFUSED, 8))
def test_refused(names: list[str]) -> None:
    """One after the other, in one process, which then trains another model."""
    for name in names:
        model = stack(REFUSED[name], layers=1)
        before = process_state(), of(model), numbers()
        with pytest.raises((CscError, KeyboardInterrupt)):
            csc.compile(model, mesh="pp=1", example=batch(), cache=False)
        for old, new in zip(before, (process_state(), of(model), numbers())):
            assert new == old, name
    with torch.autograd.forward_ad.dual_level():  # torch refuses a second one, and says of none whether it is on
        pass
    assert_as_eager(stack(lambda x, layer: torch.tanh(x) * layer.scale), batch(), meshes=("pp=1",))
