"""A head and its loss by whole logits, for kernels that make them in chunks or of some words alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

IGNORED = -7
MULTIPLE = 3.5  # of the loss, whose gradients are compared


def operands(tokens: int, classes: int, width: int, dtype: torch.dtype, biased: bool, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(True)

    labels = torch.randint(0, classes, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = IGNORED
    return {"x": tensor(tokens, width), "weight": tensor(classes, width), "labels": labels,
            "bias": tensor(classes) if biased else None}  # fmt: skip


def dense(x, weight, labels, bias, scale: float = 1.0, softcap: float = 0.0, mean: bool = True) -> torch.Tensor:
    """As models write it: what bends the logits in their dtype, the loss in at least float32."""
    logits = F.linear(x, weight, bias) * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="mean" if mean else "sum")


def results(loss: torch.Tensor, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The loss and the gradients of a multiple of it, in float64."""
    leaves = {name: given[name] for name in ("x", "weight", "bias") if given[name] is not None}
    found = torch.autograd.grad(MULTIPLE * loss, list(leaves.values()))
    assert all(one.dtype is leaf.dtype for one, leaf in zip(found, leaves.values(), strict=True))
    return {"loss": loss.detach().double(), **{n: one.double() for n, one in zip(leaves, found, strict=True)}}


def sizes(given: dict[str, Any], scale: float, softcap: float, mean: bool) -> dict[str, torch.Tensor]:
    """Of the terms that results are sums of: a sure token's p - 1 and its loss are far smaller than those."""
    x, weight, bias, labels = (given[name] for name in ("x", "weight", "bias", "labels"))
    with torch.no_grad():
        logits = F.linear(x, weight, bias) * scale
        logits = torch.tanh(logits / softcap) * softcap if softcap else logits
        counts = (labels != IGNORED)[:, None]
        share = MULTIPLE * counts / (counts.sum() if mean else 1)
        d_logits = (logits.softmax(1) + F.one_hot(labels.clamp(min=0), len(weight))) * share * abs(scale)
        found = {"x": d_logits @ weight.abs(), "weight": d_logits.t() @ x.abs(), "bias": d_logits.sum(0)}
        return {"loss": (logits.abs().amax(1) * share[:, 0]).sum(), **{name: one.norm() for name, one in found.items()}}


def in_float64(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: one.detach().double().requires_grad_(True) if one is not None and one.is_floating_point() else one
        for name, one in given.items()
    }
