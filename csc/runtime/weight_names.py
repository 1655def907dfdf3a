"""The parameters of one region, by the names that its layer file uses.

w = under(weights, "model.layers.3.");  w["mlp.up_proj.weight"] is
weights["model.layers.3.mlp.up_proj.weight"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from csc.runtime.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Under:
    """A view of `weights` below a prefix. A name that is not there is looked up as a full one (a tied
    parameter).
    """

    weights: Mapping[str, torch.Tensor]
    prefix: str

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[self.full_name(name)]

    def full_name(self, name: str) -> str:
        """The parameter's name in the model."""
        full = self.prefix + name
        return full if full in self.weights else name

    def full_names(self, gradients: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the model, gradient) pairs."""
        return ((self.full_name(name), gradient) for name, gradient in gradients.items())


def under(weights: Mapping[str, torch.Tensor], prefix: str) -> Under:
    """The parameters below a prefix such as "model.layers.3.". Under a profiler that region's range begins."""
    if isinstance(weights, Ranges):
        weights.enters(prefix.rstrip("."))
    return Under(weights, prefix)
