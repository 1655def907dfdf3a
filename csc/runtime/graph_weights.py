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
from typing import Any

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
        self._memory = [_memory(given[name]) for name in self._lasting]
        self._step: weakref.ref[torch.Tensor] | None = None  # a tensor that each step has anew

    def take(self, given: Tensors) -> bool:
        """See the module."""
        first = next((given.get(name) for name in (*self._moving, *self._lasting)), None)
        if first is not None and self._step is not None and self._step() is first:
            return True
        if not all(name in given for name in (*self._lasting, *self._moving)):
            return False
        if [_memory(given[name]) for name in self._lasting] != self._memory:
            return False
        if not all(place.fits([given[name]]) for name, place in self._places.items()):
            return False
        for name, place in self._places.items():
            place.fill([given[name]])
        self._step = weakref.ref(first) if first is not None else None
        return True


def _memory(one: torch.Tensor) -> tuple[Any, ...]:
    """Equal where two lie in the same memory in the same way."""
    return one.data_ptr(), one.stride(), one.shape, one.dtype, one.device
