"""What no batch changes (positions, rotary tables, causal masks) is made once, not in every step.

Terms: a *fixed function* is one of layers/tables.py that takes the constants alone; what it returns is *kept* beside
them, for as long as neither they nor it are written to.

    @once
    def _fixed_1(constants): ...                     of a program's text: the function, called where it has to be

    Constants(tensors)       the constants of a rank on its device, and what fixed functions made of them
    .lasting()               all tensors that outlive a step: the constants, and what is kept
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch

Made = tuple[torch.Tensor, ...]
Fixed = Callable[[Mapping[str, torch.Tensor]], Made]


class Constants(Mapping[str, torch.Tensor]):
    """Tensors by name, with what fixed functions make of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._kept: dict[Fixed, tuple[Made, tuple[int, ...]]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def made(self, function: Fixed) -> Made:
        """What the function returns for these constants. Who writes to a constant or to a result gets it anew."""
        found = self._kept.get(function)
        if found is None or found[1] != self._versions(found[0]):
            with torch.no_grad():
                results = function(self)
            found = self._kept[function] = (results, self._versions(results))
        return found[0]

    def lasting(self) -> Iterator[torch.Tensor]:
        """The constants, and what is kept."""
        yield from self._tensors.values()
        for results, _ in self._kept.values():
            yield from results

    def _versions(self, results: Made) -> tuple[int, ...]:
        return (*(t._version for t in self._tensors.values()), *(t._version for t in results))


def once(function: Fixed) -> Fixed:
    """The function, made once for the constants of a program; for others each time."""

    @functools.wraps(function)
    def fixed(constants: Mapping[str, torch.Tensor]) -> Made:
        return constants.made(function) if isinstance(constants, Constants) else function(constants)

    return fixed
