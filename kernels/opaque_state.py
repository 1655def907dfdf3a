"""What the forward of an opaque module begins with, as bytes: its backward begins its own run of it with the same.

Terms: *state* is a uint8 tensor of three parts: the random generator, the module's buffers in their order, and what
tells two results apart (the sum of a result, and of its absolute values, as float64).

    begun(module, device) -> state                      before forward; ended(state, result) -> state   after it
    size(module) -> bytes of a state
    restored(state, module, device) -> buffers          sets the generator, too
    is_same(state, result) -> bool                      whether the run gave what forward gave
"""

from __future__ import annotations

import torch
from torch import nn

from csc import devices

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
