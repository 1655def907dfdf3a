"""Random weights, for trying a program out before there are real ones.

Terms: the *seed* and a parameter's name alone decide its values, so every rank draws the same ones.

    random_weights(parameters, seed) -> {name: tensor}        normal with standard deviation 0.02
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from csc.runtime.specs import ParameterSpec

STD = 0.02


def random_weights(parameters: Iterable[ParameterSpec], seed: int) -> dict[str, torch.Tensor]:
    """CPU tensors. Each depends on the seed and its name alone, so holders and replicas agree without a
    message.
    """
    found = {}
    for spec in parameters:
        digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        found[spec.name] = torch.randn(spec.shape, generator=generator).mul_(STD).to(spec.dtype)
    return found
