"""What moves of rows do with the numbers of rows (see csc.capture.values.row_index for the words).

    moved.finer()                              with one more dimension numbered
    reshaped(moved, like), turned(moved, call), indexed(moved, key), expanded(moved, like)      -> MovedUnits
    joined(several, dim) -> MovedUnits              concatenated
    finest(move, moved) -> MovedUnits               of what the move makes, with as few dimensions numbered as it can

A move raises LooksInside where it would take units apart, and TooFine where there would be too many numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

LARGEST = 1 << 24  # numbers of one stand-in


class LooksInside(Exception):
    """A move would take the units of a stand-in apart."""


class TooFine(Exception):
    """More than LARGEST numbers."""


@dataclass(frozen=True)
class MovedUnits:
    """numbers: of the first element of each unit, among the elements of all tables; units: its dimensions that belong
    to them, in a table's order, of size 1 in numbers; like: of the shape that it has, without data.
    """

    tables: frozenset[int]
    numbers: torch.Tensor
    units: tuple[int, ...]
    like: torch.Tensor

    @property
    def unit(self) -> list[int]:
        """The sizes of a unit."""
        return [self.like.shape[place] for place in self.units]

    def finer(self) -> MovedUnits:
        """With the first dimension of its units numbered. Raises TooFine."""
        place, *units = self.units
        if self.numbers.numel() * self.like.shape[place] > LARGEST:
            raise TooFine
        steps = torch.arange(self.like.shape[place]) * math.prod(self.like.shape[one] for one in units)
        shape = [1] * self.like.dim()
        shape[place] = -1
        return replace(self, numbers=self.numbers + steps.view(shape), units=tuple(units))

    def without_units(self) -> torch.Tensor:
        """The numbers alone, without the dimensions of units."""
        return self.numbers.reshape([n for place, n in enumerate(self.numbers.shape) if place not in self.units])

    def _with_ones(self, shape: Sequence[int], units: Sequence[int]) -> list[int]:
        return [1 if place in units else size for place, size in enumerate(shape)]

    # --- one stand-in --------------------------------------------------------------------------------------------

    def reshaped(self, like: torch.Tensor) -> MovedUnits:
        """Of another shape, elements in order."""
        before, after = list(self.like.shape), list(like.shape)
        units: list[int] = []
        for place in self.units:
            ahead = math.prod(before[:place])
            fit = [
                one for one, size in enumerate(after)
                if size == before[place] and math.prod(after[:one]) == ahead and one not in units
            ]  # fmt: skip
            if not fit:
                raise LooksInside
            units.append(fit[0])
        return MovedUnits(self.tables, self.numbers.reshape(self._with_ones(after, units)), tuple(units), like)

    def turned(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> MovedUnits:
        """With its dimensions in another order."""
        order = turn(torch.empty(tuple(range(2, 2 + self.like.dim())), device="meta")).shape
        units = tuple(list(order).index(2 + place) for place in self.units)
        return MovedUnits(self.tables, turn(self.numbers), units, turn(self.like))

    def indexed(self, key: Sequence[Any]) -> MovedUnits:
        """By whole numbers, slices and None, one for each dimension."""
        units: dict[int, int] = {}
        dim = place = 0
        for one in key:
            if one is None:
                place += 1
                continue
            if dim in self.units:
                if one != slice(None):
                    raise LooksInside
                units[dim] = place
            place += isinstance(one, slice)
            dim += 1
        moved = tuple(units[dim] for dim in self.units)
        return MovedUnits(self.tables, self.numbers[tuple(key)], moved, self.like[tuple(key)])

    def expanded(self, like: torch.Tensor) -> MovedUnits:
        """With dimensions of 1 repeated, and others in front."""
        more = like.dim() - self.like.dim()
        units = tuple(place + more for place in self.units)
        if [like.shape[place] for place in units] != self.unit:
            raise LooksInside
        return MovedUnits(self.tables, self.numbers.expand(self._with_ones(like.shape, units)), units, like)


def finest(move: Callable[[MovedUnits], MovedUnits], moved: MovedUnits) -> MovedUnits:
    """What a move makes of a stand-in, with as few of its dimensions numbered as it can."""
    while True:
        try:
            return move(moved)
        except LooksInside:
            moved = moved.finer()


def joined(several: Sequence[MovedUnits], dim: int) -> MovedUnits:
    """Concatenated along a dimension."""
    parts = list(several)
    while len({(part.units, *part.unit) for part in parts}) > 1 or dim in parts[0].units:
        most = max(len(part.units) for part in parts)
        parts = [part.finer() if len(part.units) == most else part for part in parts]
    tables = frozenset[int]().union(*(part.tables for part in parts))
    numbers = torch.cat([part.numbers for part in parts], dim)
    return MovedUnits(tables, numbers, parts[0].units, torch.cat([part.like for part in parts], dim))


def key_of(name: str, like: torch.Tensor, given: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
    """Of a call that takes a part: a whole number, slice or None for each dimension; None if it indexes otherwise."""
    if name == "__getitem__":
        key = given[0] if isinstance(given[0], tuple) else (given[0],)
        if any(isinstance(one, bool) or not isinstance(one, (int, slice, type(None), type(...))) for one in key):
            return None
        count = sum(one is not None and one is not ... for one in key)
        rest = (slice(None),) * (like.dim() - count)
        if ... not in key:
            return (*key, *rest)
        at = key.index(...)
        return (*key[:at], *rest, *key[at + 1 :])
    if name == "narrow":
        dim, start, length = (*given, *named.values())
        return _along(like, dim, slice(start, start + length))
    if name == "select":
        dim, index = (*given, *named.values())
        return _along(like, dim, index)
    return None


def _along(like: torch.Tensor, dim: int, one: Any) -> tuple[Any, ...]:
    key: list[Any] = [slice(None)] * like.dim()
    key[dim] = one
    return tuple(key)


def keys_of_parts(like: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> list[tuple[Any, ...]]:
    """Of the parts that a stand-in is taken apart into, slices or (of one dimension less) items."""
    keys, begin = [], 0
    for place, part in enumerate(parts):
        items = part.dim() < like.dim()
        end = begin + (1 if items else part.shape[dim])
        keys.append(_along(like, dim, place if items else slice(begin, end)))
        begin = end
    return keys
