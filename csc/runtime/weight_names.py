"""The parameters of one region, by the names that its layer file uses.

w = under(weights, "model.layers.3.");  w["mlp.up_proj.weight"] is
weights["model.layers.3.mlp.up_proj.weight"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from csc.runtime.rank import Ranges


@dataclass(frozen=True, slots=True)
class Under:
    """A view of `weights` below a prefix. A name that is not there is looked up as a full one (a tied
    parameter).
    """

    weights: Mapping[str, torch.Tensor]
    prefix: str

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self.weights.get(self.prefix + name)
        return self.weights[name] if weight is None else weight

    def several(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Those of these names: each call of a compiled function asks."""
        prefix, weights = self.prefix, self.weights
        try:
            return [weights[prefix + name] for name in names]
        except KeyError:
            return [self[name] for name in names]

    def full_names(self, gradients: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the model, gradient) pairs."""
        prefix, weights = self.prefix, self.weights
        for name, gradient in gradients.items():
            full = prefix + name
            yield (full if full in weights else name), gradient


def under(weights: Mapping[str, torch.Tensor], prefix: str) -> Under:
    """The parameters below a prefix such as "model.layers.3.". Under a profiler that region's range begins."""
    if isinstance(weights, Ranges):
        weights.enters(prefix.rstrip("."))
    return Under(weights, prefix)
