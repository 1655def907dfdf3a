"""Hooks: on tensors they change gradients as in eager mode; those that csc cannot run are refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import csc
from tests.compiler.eager import Applying, assert_as_eager, batch, stack

Change = Callable[[torch.Tensor], Any]


def hooked(*hooks: Change) -> Callable[[torch.Tensor, Applying], torch.Tensor]:
    """A function with hooks on its first value, which several operations read."""

    def function(x: torch.Tensor, layer: Applying) -> torch.Tensor:
        y = x * layer.scale
        for hook in hooks:
            y.register_hook(hook)
        return torch.tanh(y) + y * x + y.detach()

    return function


def by_a_value(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    gate = torch.sigmoid(x)
    y = torch.tanh(x)
    y.register_hook(lambda d_y: d_y * gate.detach())
    return y * gate


def on_the_input(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """A value that another module made, and that is read outside too."""
    x.register_hook(lambda d_x: d_x.clamp(-1e-3, 1e-3))
    return x.sin() * layer.scale


def in_place(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    """The hook is on what y was before it was written to."""
    y = x * layer.scale
    y.register_hook(lambda d_y: d_y * 3)
    y += x
    return y * y


CASES = {
    "scaled": hooked(lambda d_y: d_y * 2),
    "two, in order": hooked(lambda d_y: d_y + 1e-2, lambda d_y: d_y * 3),
    "sign": hooked(torch.sign),
    "by a value": by_a_value,
    "on the input": on_the_input,
    "before it is written to": in_place,
}


@pytest.mark.parametrize("name", CASES)
def test_on_tensors(name: str) -> None:
    assert_as_eager(stack(CASES[name]), batch())


def test_forward_hooks_are_traced() -> None:
    model = stack(lambda x, layer: x * layer.scale)
    model.layers[1].linear.register_forward_hook(lambda module, given, result: result * 2)
    model.layers[0].register_forward_pre_hook(lambda module, given: (given[0].tanh(),))
    model.head.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    assert_as_eager(model, batch())


def where_it_can(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    if y.requires_grad:
        y.register_hook(lambda d_y: d_y * 2)
    return y


def test_a_hook_on_what_nothing_trains_before() -> None:
    """Frozen before: a forward that asks for requires_grad is captured for the flags that it then has."""
    for frozen in ("layers.0.", "layers."):
        model = stack(where_it_can)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(("embed.", frozen)))
        assert_as_eager(model, batch(), meshes=["pp=2"])


def _on_parameter(model: nn.Module) -> None:
    model.get_parameter("layers.1.scale").register_hook(lambda gradient: gradient * 2)


def _accumulated(model: nn.Module) -> None:
    model.get_parameter("layers.1.scale").register_post_accumulate_grad_hook(lambda parameter: None)


def _multi(model: nn.Module) -> None:
    torch.autograd.graph.register_multi_grad_hook([model.get_parameter("layers.1.scale")], lambda gradients: None)


def _full(model: nn.Module) -> None:
    model.get_submodule("layers.1").register_full_backward_hook(lambda module, d_in, d_out: None)


def _full_pre(model: nn.Module) -> None:
    model.get_submodule("layers.1").register_full_backward_pre_hook(lambda module, d_out: None)


@pytest.mark.parametrize("register", [_on_parameter, _accumulated, _multi, _full, _full_pre])
def test_refused_before_anything_is_traced(register: Callable[[nn.Module], None]) -> None:
    model = stack(hooked())
    register(model)
    with pytest.raises(csc.InputError, match="which csc would not call") as caught:
        csc.compile(model, example=batch(), cache=False)
    assert caught.value.where in ("layers.1", "layers.1.scale")


def test_a_global_one_is_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, d_in, d_out: None)
    try:
        with pytest.raises(csc.InputError, match="every module: it has a backward hook"):
            csc.compile(stack(hooked()), example=batch(), cache=False)
    finally:
        handle.remove()


def late(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    z = y.tanh()
    y.register_hook(lambda d_y: d_y * 2)
    return z + y


def removed(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    y.register_hook(lambda d_y: d_y * 2).remove()
    return y


def of_a_parameter(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    layer.scale.register_hook(lambda gradient: gradient * 2)
    return x * layer.scale


def of_several(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y, z = x.sin(), x.cos()
    torch.autograd.graph.register_multi_grad_hook([y, z], lambda gradients: None)
    return y * z


def of_a_grad_fn(x: torch.Tensor, layer: Applying) -> torch.Tensor:
    y = x * layer.scale
    assert y.grad_fn is not None and y.grad_fn.next_functions
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return y


REFUSED = {
    "returns nothing": (hooked(lambda d_y: None), "returns no gradient of its own"),
    "returns the same": (hooked(lambda d_y: d_y), "returns no gradient of its own"),
    "in place": (hooked(lambda d_y: d_y.mul_(2)), "returns no gradient of its own"),
    "late": (late, "read before"),
    "removed": (removed, "removed in forward"),
    "of a parameter": (of_a_parameter, "hook on a parameter, put on it in forward"),
    "of a grad_fn": (of_a_grad_fn, "a hook on a grad_fn"),
    "of several": (of_several, "one hook on several tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, sentence = REFUSED[name]
    with pytest.raises(csc.CscError, match=sentence) as caught:
        csc.compile(stack(function), example=batch(), cache=False)
    assert caught.value.remedy
