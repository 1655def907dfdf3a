"""How far gradients are from others.

Terms: a gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise in both runs. One
smaller than NOISE of its module's whole gradient is taken for that: its difference is measured against the module's.

    relative(right, found) -> {parameter: |found - right|_2 / |right|_2}       of those that both have
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

NOISE = 1e-4
# Elements: on a CPU what lies in a cache, and few enough that float32 adds up their squares to 1e-6.
CHUNK, LARGE_CHUNK = 1 << 16, 1 << 24
LEAST, MOST = 1e-6, 1e15  # norms between which squares of what counts in float32 neither vanish nor overflow

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
        difference = _norm_of_difference(found[name].to(right[name].device), right[name], scale)
        differences[name] = difference / scale if scale else difference
    return differences


def _norm(tensor: torch.Tensor) -> float:
    """In float64 where float32 might not do: that takes thirty times as long."""
    flat = _flat(tensor)
    if flat.dtype is torch.float32:
        norm = _hypot(_chunks(flat))
        if LEAST <= norm <= MOST:
            return norm
    return _hypot(chunk.to(_wide(chunk)) for chunk in _chunks(flat))


def _norm_of_difference(one: torch.Tensor, other: torch.Tensor, scale: float) -> float:
    """scale: what it is to be divided by."""
    if one.layout == other.layout and torch.equal(one, other):  # not so where one is NaN
        return 0.0
    pairs = zip(_chunks(_flat(one)), _chunks(_flat(other)), strict=True)
    if one.dtype is other.dtype is torch.float32 and LEAST <= scale <= MOST:
        return _hypot(a - b for a, b in pairs)
    return _hypot(a.to(_wide(a)) - b.to(_wide(b)) for a, b in pairs)


def _hypot(chunks: Iterable[torch.Tensor]) -> float:
    """The norm of all chunks together."""
    norms = [torch.linalg.vector_norm(chunk) for chunk in chunks]
    if len(norms) == 1:
        return float(norms[0])
    return float(torch.linalg.vector_norm(torch.stack(norms).double())) if norms else 0.0


def _chunks(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    most = CHUNK if flat.device.type == "cpu" else LARGE_CHUNK
    return (flat,) if flat.numel() <= most else flat.split(most)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.detach().reshape(-1)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
