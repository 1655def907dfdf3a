"""A stage's F without what it makes of the batch alone: masks, position tables, labels come from outside.

Terms: *tables* are what functions of layers/tables.py return. They are made as they are, outside of what a device
records: packing a mask waits for values. A recording reads them where it reads the batch.

    Asked(forward, batch, received, weights, constants)      runs F as it is, and notes what it asks for
    .sent, .saved           what F returns                   .tables {function: results}, .entries: names of the batch
    handed(forward, tables) -> a forward that gets these from the functions of layers/tables.py, whatever they are given
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

Forward = Callable[..., Any]
LAYERS = "layers"  # the name by which a rank's file has its layer files


class Asked:
    """See the module."""

    def __init__(
        self, forward: Forward, batch: Mapping[str, Any], received: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self.tables: dict[str, tuple[torch.Tensor, ...]] = {}
        noting = _Noting(batch)

        def make(name: str) -> tuple[torch.Tensor, ...]:
            self.tables[name] = table(forward, name)(batch, constants)
            return self.tables[name]

        self.sent, self.saved = _with(forward, make)(noting, received, weights, constants)
        self.entries = list(noting.read)


def table(forward: Forward, name: str) -> Callable[..., Any]:
    """A function of layers/tables.py."""
    found: Callable[..., Any] = getattr(_tables_of(forward), name)
    return found


def handed(forward: Forward, tables: Mapping[str, tuple[torch.Tensor, ...]]) -> Forward:
    """See the module."""
    return _with(forward, tables.__getitem__)


def _tables_of(forward: Forward) -> Any:
    return getattr(_globals(forward).get(LAYERS), "tables", None)


def _globals(forward: Forward) -> dict[str, Any]:
    return forward.__globals__ if isinstance(forward, FunctionType) else {}


def _with(forward: Forward, make: Callable[[str], tuple[torch.Tensor, ...]]) -> Forward:
    """The same code, over `layers` whose tables are made so: other ranks of this process share the module itself."""
    if LAYERS not in _globals(forward):
        return forward
    assert isinstance(forward, FunctionType)
    own = {**forward.__globals__, LAYERS: _Layers(forward.__globals__[LAYERS], make)}
    made = FunctionType(forward.__code__, own, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


class _Layers:
    """The layer files, but for the tables."""

    def __init__(self, layers: Any, make: Callable[[str], tuple[torch.Tensor, ...]]) -> None:
        self._layers, self.tables = layers, _Tables(make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)


class _Tables:
    """Functions that are made so."""

    def __init__(self, make: Callable[[str], tuple[torch.Tensor, ...]]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda batch, constants: self._make(name)


class _Noting(Mapping[str, Any]):
    """The batch, and the names of what was read of it."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._batch, self.read = batch, dict[str, None]()

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)
