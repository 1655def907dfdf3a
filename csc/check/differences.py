"""How far gradients are from others.

Terms: a gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise in both runs. One
smaller than NOISE of its module's whole gradient is taken for that: its difference is measured against the module's.

    relative(right, found) -> {parameter: |found - right|_2 / |right|_2}       of those that both have
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from csc.torch_private.fast_guards import norms, norms_of_differences

NOISE = 1e-4
# Elements: on a CPU what lies in a cache, and few enough that float32 adds up their squares to 1e-6.
CHUNK, LARGE_CHUNK = 1 << 16, 1 << 24
LEAST, MOST = 1e-6, 1e15  # norms between which squares of what counts in float32 neither vanish nor overflow

Gradients = Mapping[str, torch.Tensor]


def relative(right: Gradients, found: Gradients) -> dict[str, float]:
    """By parameter, how far gradients are from the right ones; NaN where one of both is no number."""
    differences = dict.fromkeys(right.keys() & found.keys(), 0.0)
    pairs = {name: (found[name].to(right[name].device), right[name]) for name in differences}
    unequal = {name: pair for name, pair in pairs.items() if not _equal(*pair)}
    modules = set(map(_module, unequal))
    own = _norms({name: gradient for name, gradient in right.items() if _module(name) in modules})
    of_module: dict[str, float] = {}
    for name, norm in own.items():
        of_module[_module(name)] = math.hypot(of_module.get(_module(name), 0.0), norm)
    scales = {}
    for name in unequal:
        whole = of_module[_module(name)]
        scales[name] = own[name] if own[name] >= NOISE * whole else whole
    for name, difference in _norms_of_differences(unequal, scales).items():
        differences[name] = difference / scales[name] if scales[name] else difference
    return differences


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, and without NaN: most gradients are, and need no norm."""
    return one.layout == other.layout and torch.equal(one, other)


def _norms(gradients: Gradients) -> dict[str, float]:
    together = [name for name, gradient in gradients.items() if _is_small(gradient)]
    found = dict(zip(together, norms([gradients[name] for name in together]), strict=True))
    kept = {name: norm for name, norm in found.items() if LEAST <= norm <= MOST}
    return {name: kept[name] if name in kept else _norm(gradient) for name, gradient in gradients.items()}


def _norms_of_differences(
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scales: Mapping[str, float]
) -> dict[str, float]:
    """scales: what each is to be divided by."""
    together = [n for n, pair in pairs.items() if all(map(_is_small, pair)) and LEAST <= scales[n] <= MOST]
    ones, others = ([pairs[name][place] for name in together] for place in (0, 1))
    found = dict(zip(together, norms_of_differences(ones, others), strict=True))
    return {
        name: found[name] if name in found else _norm_of_difference(*pair, scales[name]) for name, pair in pairs.items()
    }


def _is_small(gradient: torch.Tensor) -> bool:
    """Whether its norm is taken together with others', in float32."""
    return gradient.dtype is torch.float32 and gradient.layout is torch.strided and gradient.numel() <= CHUNK


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
