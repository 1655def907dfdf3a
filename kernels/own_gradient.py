"""Values whose gradient is not that of the operations that made them: what `torch.autograd.Function` says of itself.

In a graph, the backward of a function stands beside its forward. It starts at calls of `incoming`, which stand for the
gradients of its outputs, and ends at a call of `own_gradient`, whose results are the outputs, and the gradients of its
inputs those that were computed. Pass `differentiate` runs what lies between only when gradients flow; in emitted
programs neither operator is left.

place: which of the outputs. everywhere: a hook on a tensor; whatever reads its one input is to read its output. Nothing
does in a trace, and `with_hooks` keeps it there until then. checkpointed: what a reentrant checkpoint was given and
gave; without outputs, a tensor that was told to ask for a gradient.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("csc::incoming", mutates_args=())
def _incoming(like: torch.Tensor, place: int) -> torch.Tensor:
    return torch.zeros_like(like)


@_incoming.register_fake
def _(like: torch.Tensor, place: int) -> torch.Tensor:
    return torch.empty_like(like)


@torch.library.custom_op("csc::own_gradient", mutates_args=())
def _own_gradient(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], gradients: list[torch.Tensor], everywhere: bool
) -> list[torch.Tensor]:
    return [output.clone() for output in outputs]


@_own_gradient.register_fake
def _(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], gradients: list[torch.Tensor], everywhere: bool
) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in outputs]


@torch.library.custom_op("csc::with_hooks", mutates_args=())
def _with_hooks(loss: torch.Tensor, hooked: list[torch.Tensor]) -> torch.Tensor:
    return loss.clone()


@_with_hooks.register_fake
def _(loss: torch.Tensor, hooked: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(loss)


@torch.library.custom_op("csc::checkpointed", mutates_args=())
def _checkpointed(inputs: list[torch.Tensor], outputs: list[torch.Tensor], where: str) -> torch.Tensor:
    return torch.empty(0)


@_checkpointed.register_fake
def _(inputs: list[torch.Tensor], outputs: list[torch.Tensor], where: str) -> torch.Tensor:
    return torch.empty(0)
