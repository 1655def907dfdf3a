"""Tensors that a model holds and a trace would take for others.

A trace puts plain tensors in place of parameters and buffers. So a class of tensors with code of its own
(__torch_function__, __torch_dispatch__) would compute as torch.Tensor does, in silence.

    refuse_tensors(model)        InputError that names the tensor
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from csc.errors import InputError

HANDLERS = ("__torch_function__", "__torch_dispatch__")
PLAIN = (torch.Tensor, nn.Parameter)


def refuse_tensors(model: nn.Module) -> None:
    """Raises InputError for a parameter or buffer without values yet, with code of its own, or made for inference."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                "it has no size yet: its module is a lazy one, which makes it at its first batch",
                name,
                "run model(**batch) once before you compile",
            )
        if tensor.is_floating_point() and _computes(type(tensor)):
            raise InputError(
                f"it is a {type(tensor).__name__}, a class of tensors that computes by code of its own, which csc "
                "would not run",
                name,
                "hold a plain tensor, and compute in the module's forward, or in a parametrization "
                "(torch.nn.utils.parametrize)",
            )
        if tensor.is_inference():
            raise InputError(
                "it was made in torch.inference_mode, and autograd cannot use it",
                name,
                "put a clone in its place (made outside of inference_mode)",
            )


def _computes(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors has code for what torch does with them."""
    return any(all(_code(kind, name) != _code(plain, name) for plain in PLAIN) for name in HANDLERS)


def _code(kind: type, name: str) -> object:
    """What is behind a class method."""
    handler = getattr(kind, name)
    return getattr(handler, "__func__", handler)
