"""How far gradients are from others.

Terms: a gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise in both runs. One
smaller than NOISE of its module's whole gradient is taken for that: its difference is measured against the module's.

    relative(right, found) -> {parameter: |found - right|_2 / |right|_2}       of those that both have
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

NOISE = 1e-4
CHUNK = 1 << 24  # elements

Gradients = Mapping[str, torch.Tensor]


def relative(right: Gradients, found: Gradients) -> dict[str, float]:
    """By parameter, how far gradients are from the right ones; NaN where one of both is no number."""
    norms = {name: _norm(gradient) for name, gradient in right.items()}
    of_module: dict[str, float] = {}
    for name, norm in norms.items():
        of_module[_module(name)] = math.hypot(of_module.get(_module(name), 0.0), norm)
    differences = {}
    for name in right.keys() & found.keys():
        whole = of_module[_module(name)]
        scale = norms[name] if norms[name] >= NOISE * whole else whole
        difference = _norm(found[name].to(right[name].device), right[name])
        differences[name] = difference / scale if scale else difference
    return differences


def _norm(tensor: torch.Tensor, minus: torch.Tensor | None = None) -> float:
    """In float64, a chunk at a time: the whole of a large embedding would take several times its memory."""
    chunks = _chunks(tensor)
    if minus is not None:
        chunks = (one - other for one, other in zip(chunks, _chunks(minus), strict=True))
    return math.hypot(*(float(torch.linalg.vector_norm(chunk)) for chunk in chunks))


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    wide = torch.complex128 if dense.is_complex() else torch.float64
    return (chunk.to(wide) for chunk in dense.reshape(-1).split(CHUNK))


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
