"""The parameters of a stage as recordings read them: where they are, or in places of their own.

Terms: a parameter *lasts* if a step computes with its own memory; one that is computed with in another dtype is made
anew for each step, and *moves*: it has a place that is filled in each step.

    weights = GraphWeights(specs, given, copies)     specs: of the stage's parameters; given: what a step computes with;
                                               copies: the places of all stages, by name
    weights.values {name: tensor}              what recordings read
    weights.take(given) -> bool                before each F: copies moving ones; whether others are where they were
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch

from csc.runtime.graph_places import FixedPlaces
from csc.runtime.specs import ParameterSpec

Tensors = Mapping[str, torch.Tensor]


class GraphWeights:
    """See the module."""

    def __init__(self, specs: Iterable[ParameterSpec], given: Tensors, copies: dict[str, FixedPlaces]) -> None:
        there = [spec for spec in specs if spec.name in given]
        self._moving = [spec.name for spec in there if spec.compute not in (None, spec.dtype)]
        self._lasting = [spec.name for spec in there if spec.compute in (None, spec.dtype)]
        self._places = {name: copies.setdefault(name, FixedPlaces([given[name]])) for name in self._moving}
        self.values = {name: given[name] for name in self._lasting}
        self.values |= {name: place.tensors[0] for name, place in self._places.items()}
        self._step: weakref.ref[torch.Tensor] | None = None  # a tensor that each step has anew

    def take(self, given: Tensors) -> bool:
        """See the module."""
        first = next((given.get(name) for name in (*self._moving, *self._lasting)), None)
        if first is not None and self._step is not None and self._step() is first:
            return True
        if not all(name in given and _same_memory(given[name], self.values[name]) for name in self._lasting):
            return False
        if not all(name in given and place.fits([given[name]]) for name, place in self._places.items()):
            return False
        for name, place in self._places.items():
            place.fill([given[name]])
        self._step = weakref.ref(first) if first is not None else None
        return True


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
        and one.dtype == other.dtype and one.device == other.device
    )  # fmt: skip
