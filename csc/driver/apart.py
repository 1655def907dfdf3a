"""Whether the parts of a batch (its images) do not meet each other in a function, tried on noise.

Terms
  cut        how many rows of each entry and of each result are each part's, along the first dimension; an entry that is
             not named stays as it is
  probe      what the function makes of noise that is the same in all parts with as many rows

    equal_cuts(entries, results) -> [Cut]            into as many equal parts as all sizes allow, down to one
    are_apart(encode, entries, cut) -> bool
    probes(encode, entries, cut) -> [{result: rows}]       of each part
    close(one, other) -> bool                        to rounding

An encoder is a flat graph without branches, so what it does with rows shows on any numbers. If all other parts are
changed and a part's results keep every bit, nothing of them reaches it, however small. If the probes of parts are
those of parts elsewhere, to rounding, neither a part's place nor what lies beside it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import torch

Entries = Mapping[str, torch.Tensor]
Encode = Callable[[Entries], Mapping[str, torch.Tensor]]
ROUNDING = 1e-3  # of the largest number of a result; in types of 16 bits more
ROUNDING_HALF = 5e-2


@dataclass(frozen=True)
class Cut:
    """Rows of each part, by entry and by result: equally many parts of all; () where a single part is no rows."""

    entries: Mapping[str, tuple[int, ...]]
    results: Mapping[str, tuple[int, ...]]

    @property
    def count(self) -> int:
        return max(1, len(next(iter(self.results.values()))))

    def parts(self, results: Entries) -> list[dict[str, torch.Tensor]]:
        """The results of each part."""
        split = {name: results[name].split(rows) if rows else [results[name]] for name, rows in self.results.items()}
        return [{name: each[number] for name, each in split.items()} for number in range(self.count)]


def equal_cuts(entries: Mapping[str, Sequence[int]], results: Mapping[str, Sequence[int]]) -> list[Cut]:
    """Of tensors of these shapes; none where one has no rows."""
    shapes = [*entries.values(), *results.values()]
    most = gcd(*(shape[0] for shape in shapes)) if all(shapes) else 0
    return [equal_cut(entries, results, count) for count in range(most, 0, -1) if most % count == 0]


def equal_cut(entries: Mapping[str, Sequence[int]], results: Mapping[str, Sequence[int]], count: int) -> Cut:
    """Into so many parts, which all sizes allow."""

    def rows(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        return {name: (shape[0] // count,) * count for name, shape in shapes.items()}

    return Cut(rows(entries), rows(results))


@torch.no_grad()
def are_apart(encode: Encode, entries: Entries, cut: Cut) -> bool:
    """Whether no part's results depend on the rows of others. Whole numbers but bytes stay as they are: False if parts
    differ in them.
    """
    for name, rows in cut.entries.items():
        parts = entries[name].split(rows)
        if not _is_noisy(entries[name]) and any(not torch.equal(part, parts[0]) for part in parts):
            return False
    generator = torch.Generator().manual_seed(0)
    first, other = _noise(entries, cut, generator), _noise(entries, cut, generator)
    made = cut.parts(encode(first))
    for kept in (0, 1):
        found = cut.parts(encode({**first, **_mixed(first, other, cut, kept)}))
        for number, (before, after) in enumerate(zip(made, found, strict=True)):
            if any(torch.equal(before[name], after[name]) != (number % 2 == kept) for name in before):
                return False
    return True


@torch.no_grad()
def probes(encode: Encode, entries: Entries, cut: Cut) -> list[dict[str, torch.Tensor]]:
    """Of each part."""

    def noise(rows: int, like: torch.Tensor) -> torch.Tensor:
        return _random((rows, *like.shape[1:]), like, torch.Generator().manual_seed(0))

    given = {
        name: torch.cat([noise(each, entries[name]) for each in rows])
        for name, rows in cut.entries.items() if _is_noisy(entries[name])
    }  # fmt: skip
    return cut.parts(encode({**entries, **given}))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    within = ROUNDING if one.dtype.itemsize >= 4 else ROUNDING_HALF
    apart, most = (one.double() - other.double()).abs().max(), one.double().abs().max()
    return bool(apart <= within * most)


def _mixed(one: Entries, other: Entries, cut: Cut, kept: int) -> dict[str, torch.Tensor]:
    """Every second part, from `kept` on, of the one, and the others of the other."""
    mixed = {}
    for name, rows in cut.entries.items():
        pairs = enumerate(zip(one[name].split(rows), other[name].split(rows), strict=True))
        mixed[name] = torch.cat([own if number % 2 == kept else new for number, (own, new) in pairs])
    return mixed


def _noise(entries: Entries, cut: Cut, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: _random(one.shape, one, generator) if name in cut.entries and _is_noisy(one) else one
        for name, one in entries.items()
    }


def _is_noisy(entry: torch.Tensor) -> bool:
    """Whether noise may stand for an entry: pixels, also those that are bytes, and sounds."""
    return entry.is_floating_point() or entry.dtype is torch.uint8


def _random(shape: Sequence[int], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(tuple(shape), generator=generator).to(like)
    return torch.randint(256, tuple(shape), generator=generator).to(like)
