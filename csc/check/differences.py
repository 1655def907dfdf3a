"""How far gradients are from others.

Terms: a gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise in both runs. One
smaller than NOISE of its module's whole gradient is taken for that: its difference is measured against the module's.

    relative(right, found) -> {parameter: |found - right|_2 / |right|_2}       of those that both have
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

NOISE = 1e-4

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
        difference = _norm(_wide(found[name]).to(right[name].device) - _wide(right[name]))
        differences[name] = difference / scale if scale else difference
    return differences


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, complex where it is."""
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
