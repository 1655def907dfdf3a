"""Modules that are kept as they are: one operator of the graph, run eagerly inside its stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.errors import CscError
from csc.torch_private.autograd import under_autograd
from csc.torch_private.traces import pytree

# --- What the forward of an opaque module begins with, as bytes ------------------------------------------------------
#
# Its backward begins its own run of it with the same.
#
# Terms: *state* is a uint8 tensor of three parts: the random generator, the module's buffers in their order, and what
# tells two results apart (the sum of a result, and of its absolute values, as float64).


TELLING = 16  # bytes


def size(module: nn.Module) -> int:
    """Bytes of a state of this module."""
    return len(devices.generator(torch.device("cpu"))) + sum(map(_bytes_of, module.buffers())) + TELLING


def begun(module: nn.Module, device: torch.device) -> torch.Tensor:
    """Generator and buffers as they are."""
    buffers = [_bytes(buffer.detach()).to(device) for buffer in module.buffers()]
    return torch.cat([devices.generator(device).to(device), *buffers])


def ended(state: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """With what tells the result from another."""
    return torch.cat([state, _bytes(_telling(result))])


def restored(state: torch.Tensor, module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """The buffers, by name, that forward began with; torch's generator is set to what it was."""
    named = dict(module.named_buffers())
    sizes = list(map(_bytes_of, named.values()))
    generator, *parts, _ = state.split([len(state) - TELLING - sum(sizes), *sizes, TELLING])
    devices.set_generator(device, generator.clone())
    return {
        name: part.clone().view(buffer.dtype).view(buffer.shape).to(buffer.device)
        for part, (name, buffer) in zip(parts, named.items(), strict=True)
    }


def is_same(state: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether this is what the forward with this state gave, but for rounding: without gradients PyTorch has other
    kernels for some modules (LSTM, TransformerEncoderLayer), and on an accelerator sums come in any order.
    """
    was, now = state[-TELLING:].clone().view(torch.float64).cpu(), _telling(result).cpu()
    inexact = result.is_floating_point() or result.is_complex()
    room = torch.finfo(result.dtype).eps ** 0.5 * float(was[1].abs()) if inexact else 0.0
    return torch.allclose(was, now, rtol=0.0, atol=room, equal_nan=True)


def _telling(result: torch.Tensor) -> torch.Tensor:
    wide = torch.view_as_real(result) if result.is_complex() else result
    return torch.stack([wide.detach().double().sum(), wide.detach().double().abs().sum()])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- Modules that are kept as they are: one operator of the graph, run eagerly inside its stage ----------------------
#
# A `call` names a module and what it was called with besides tensors. It is the key of a table, the one thing that a
# graph cannot hold: an entry lives as long as its module does, in the process that made it.


Like = int | Callable[..., torch.Tensor]


@dataclass(frozen=True)
class _PlainLeaves:
    """plain: the leaves of (args, kwargs), None where a tensor stands; places: of the tensors among them."""

    module: weakref.ref[nn.Module]
    forward: Callable[..., Any]
    structure: Any
    plain: tuple[Any, ...]
    places: tuple[int, ...]
    like: Like

    def arguments(self, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these tensors in them."""
        leaves = list(self.plain)
        for place, tensor in zip(self.places, inputs, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


_CALLS: dict[str, _PlainLeaves] = {}


def opaque(module: nn.Module, like: Like = 0) -> nn.Module:
    """Keep a module out of the trace: csc runs it eagerly inside its stage, and autograd computes its gradients.

    This is for modules that decide by values. The module must return one tensor, and depend on its arguments,
    parameters and buffers alone; it may write its buffers. Its backward runs the forward again with the same random
    numbers and buffers, and restores both. In eager mode nothing changes.

    Args:
        module: The module to keep.
        like: The position of the argument (among tensors) whose shape and dtype the result has; or a function of the
            module's arguments that returns a tensor of the result's shape and dtype, from shapes alone.

    Returns:
        The module itself, with its forward replaced.

    Raises:
        TypeError: When the module runs: it returned something other than one tensor.
        CscError: In its backward: run again, it returned other values.
    """
    name = type(module).__name__
    number = sum(key.startswith(f"{name}.") for key in _CALLS)
    module.forward = _KeptForward(module, module.forward, like, f"{name}.{number}")
    return module


@dataclass(frozen=True)
class _KeptForward:
    """The forward of an opaque module. A copy of the module gets a copy, which runs that one: `forward` is a method,
    and methods are copied with what they are bound to.
    """

    module: nn.Module
    forward: Callable[..., Any]
    like: Like
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        plain = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
        call = _PlainLeaves(weakref.ref(self.module), self.forward, structure, plain, places, self.like)
        key = self.name
        while key in _CALLS and _CALLS[key] != call:
            key += "'"
        if key not in _CALLS:
            _CALLS[key] = call
            weakref.finalize(self.module, _CALLS.pop, key, None)
        inputs = [leaves[i] for i in places]
        return torch.ops.csc.opaque(inputs, list(self.module.parameters()), key)[0]


def is_opaque(module: nn.Module) -> bool:
    """Whether `opaque` was called of it."""
    return isinstance(vars(module).get("forward"), _KeptForward)


def _called(key: str) -> tuple[_PlainLeaves, nn.Module]:
    call = _CALLS.get(key)
    module = call.module() if call is not None else None
    if call is None or module is None:
        raise RuntimeError(
            f"the program holds the opaque module {key!r}, which exists only in the process that compiled it: run it "
            "through csc.compile, not from its directory"
        )
    return call, module


def _run(
    key: str, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """buffers: instead of the module's own, which stay as they are; none: its own, which it may change."""
    call, module = _called(key)
    args, kwargs = call.arguments(inputs)
    named = dict(zip([name for name, _ in module.named_parameters()], parameters, strict=True))
    replaced, module.forward = module.forward, call.forward
    try:
        result = torch.func.functional_call(module, {**named, **buffers}, args, kwargs)
    finally:
        module.forward = replaced
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"the opaque module {key!r} returned a {type(result).__name__}, not one tensor")
    return result


@torch.library.custom_op("csc::opaque", mutates_args=())
def _forward(
    inputs: list[torch.Tensor], parameters: list[torch.Tensor], call: str
) -> tuple[torch.Tensor, torch.Tensor]:
    state = begun(_called(call)[1], inputs[0].device)
    with torch.no_grad():
        result = _run(call, inputs, parameters, {})
    return result.clone(memory_format=torch.contiguous_format), ended(state, result)


@_forward.register_fake
def _(inputs: Any, parameters: Any, call: str) -> Any:
    known, module = _called(call)
    if isinstance(known.like, int):
        example = inputs[known.like]
    else:
        args, kwargs = known.arguments(inputs)
        example = known.like(*args, **kwargs)
    state = inputs[0].new_empty(size(module), dtype=torch.uint8)
    return torch.empty_like(example, memory_format=torch.contiguous_format), state


@torch.library.custom_op("csc::opaque_backward", mutates_args=())
def _backward(
    d_result: torch.Tensor,
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    state: torch.Tensor,
    call: str,
) -> list[torch.Tensor]:
    floating = [x.is_floating_point() for x in inputs]
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, floating)]
    weights = [p.detach().requires_grad_(p.is_floating_point()) for p in parameters]
    device = inputs[0].device
    with devices.forked(device), under_autograd():
        buffers = restored(state, _called(call)[1], device)
        result = _run(call, leaves, weights, buffers)
        if not is_same(state, result):
            raise CscError(
                f"the opaque module {call!r} gives something else when it is run again for its backward: it computes "
                "with what its forward changes, or with random numbers of its own",
                type(_called(call)[1]).__name__,
                "keep what forward changes in buffers (register_buffer), and draw from torch's default generator",
            )
        wanted = [x for x in (*leaves, *weights) if x.requires_grad]
        gradients = torch.autograd.grad(result, wanted, d_result, allow_unused=True)
    return [
        torch.zeros_like(x) if gradient is None else gradient.clone(memory_format=torch.contiguous_format)
        for x, gradient in zip(wanted, gradients)
    ]


@_backward.register_fake
def _(d_result: Any, inputs: Any, parameters: Any, state: Any, call: str) -> Any:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (*inputs, *parameters)
        if x.is_floating_point()
    ]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors, parameters, ctx.call = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *parameters, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, d_result: torch.Tensor, _: Any) -> tuple[Any, ...]:
    *saved, state = ctx.saved_tensors
    tensors, parameters = saved[: ctx.count], saved[ctx.count :]
    gradients = iter(torch.ops.csc.opaque_backward(d_result, tensors, parameters, state, ctx.call))
    by_place = [next(gradients) if x.is_floating_point() else None for x in saved]
    return by_place[: ctx.count], by_place[ctx.count :], None


_forward.register_autograd(_gradients, setup_context=_remember)
