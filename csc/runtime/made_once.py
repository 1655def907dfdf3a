"""What no batch changes (positions, rotary tables, causal masks) is made once, and what sizes alone change (windows of
images) while they are the same.

Terms: a *fixed function* is one of layers/tables.py that takes the constants alone, a *sized function* one that takes
entries of the batch which are sizes, or are made of sizes. What they return is *kept* beside the constants, for as long
as neither they nor it are written to; of a sized function what it returned last, while these entries are equal.

    @once
    def _fixed_1(constants): ...                     of a program's text: the function, called where it has to be

    @while_equal("get_vision_window_index_1")        the same, for a function that reads these entries of the batch
    def _sized_1(batch, constants): ...

    Constants(tensors)       the constants of a rank on its device, and what was made of them
    .lasting()               the constants, and what fixed functions made: the same tensors in each step
    .held()                  all tensors that outlive a step: these, and what sized functions made last
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Made = tuple[torch.Tensor, ...]
Tensors = Mapping[str, torch.Tensor]
Fixed = Callable[[Tensors], Made]
Sized = Callable[[Tensors, Tensors], Made]


@dataclass(frozen=True)
class _Latest:
    """What a sized function has made: of `entries`, copies of the batch's."""

    entries: Sequence[torch.Tensor]
    results: Made
    versions: tuple[int, ...]


class Constants(Mapping[str, torch.Tensor]):
    """Tensors by name, with what functions make of them."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = dict(tensors)
        self._kept: dict[Fixed, tuple[Made, tuple[int, ...]]] = {}
        self._latest: dict[Sized, _Latest] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def made(self, function: Fixed) -> Made:
        """What the function returns for these constants. Who writes to a constant or to a result gets it anew."""
        kept = self._kept.get(function)
        if kept is None or kept[1] != self._versions(kept[0]):
            with torch.no_grad():
                results = function(self)
            kept = self._kept[function] = (results, self._versions(results))
        return kept[0]

    def latest(self, function: Sized, names: Sequence[str], batch: Tensors) -> Made:
        """What the function returns for a batch with these entries. It is made of copies: a batch may be written to."""
        entries = [batch[name] for name in names]
        latest = self._latest.get(function)
        if latest is None or not _equal(latest.entries, entries) or latest.versions != self._versions(latest.results):
            copies = [entry.clone() for entry in entries]
            with torch.no_grad():
                results = function(dict(zip(names, copies)), self)
            latest = self._latest[function] = _Latest(copies, results, self._versions(results))
        return latest.results

    def lasting(self) -> Iterator[torch.Tensor]:
        """Yields the constants, and what fixed functions made of them: the same tensors in each step."""
        yield from self._tensors.values()
        for results, _ in self._kept.values():
            yield from results

    def held(self) -> Iterator[torch.Tensor]:
        """Yields all tensors that outlive a step: those of `lasting`, and what sized functions made last."""
        yield from self.lasting()
        for latest in self._latest.values():
            yield from latest.results

    def _versions(self, results: Made) -> tuple[int, ...]:
        return (*(t._version for t in self._tensors.values()), *(t._version for t in results))


def _equal(before: Sequence[torch.Tensor], entries: Sequence[torch.Tensor]) -> bool:
    """Whether these are the same values, laid out alike."""
    return all(
        old.dtype == other.dtype and old.stride() == other.stride() and torch.equal(old, other)
        for old, other in zip(before, entries)
    )


def once(function: Fixed) -> Fixed:
    """The function, made once for the constants of a program; for others each time."""

    @functools.wraps(function)
    def fixed(constants: Tensors) -> Made:
        return constants.made(function) if isinstance(constants, Constants) else function(constants)

    return fixed


def while_equal(*names: str) -> Callable[[Sized], Sized]:
    """The function, made anew where one of these entries of the batch differs from the last one's; each time for
    entries on a GPU, which would have to be waited for.
    """

    def decorated(function: Sized) -> Sized:
        @functools.wraps(function)
        def sized(batch: Tensors, constants: Tensors) -> Made:
            if isinstance(constants, Constants) and all(batch[name].device.type == "cpu" for name in names):
                return constants.latest(function, names, batch)
            return function(batch, constants)

        return sized

    return decorated
