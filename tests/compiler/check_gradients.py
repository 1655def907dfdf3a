"""csc beside eager PyTorch, by parameters, with nothing of csc.reports.verification."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import csc

TOLERANCE = 1e-5


def differing(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> dict[str, str]:
    """What differs in loss and gradients of one step, by name; a gradient that one of the two lacks too."""
    right = _step(model, batch, lambda given: _loss(model(**given)))
    compiled = csc.compile(model, example=batch, cache=False, check=False, **options)
    own = _step(model, batch, compiled.train_step)
    assert right.keys() == own.keys()
    floor = 1e-4 * max(float(value.norm()) for value in right.values() if value is not None)
    found = {}
    for name, value in right.items():
        other = own[name]
        if value is None or other is None:
            if value is not other:
                found[name] = f"eager has {'no' if value is None else 'a'} gradient"
        elif not float((value - other).norm()) <= TOLERANCE * max(float(value.norm()), floor):
            found[name] = f"{float((value - other).norm()):.2e} of {float(value.norm()):.2e}"
    return found


def _step(model: nn.Module, batch: dict[str, torch.Tensor], loss_of: Any) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss = loss_of(batch)
    if loss.requires_grad:
        loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach().reshape(()), **found}


def _loss(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.loss
