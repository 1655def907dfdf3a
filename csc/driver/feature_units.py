"""Which rows of a microbatch are one unit of features: an image's, where images do not meet in the encoder.

Terms
  packed     images lie one behind the other as rows of patches, and a grid says how many each has
  label      what is known of a unit without its values: its sizes, and its row of the grid

    packed(given, entries, values) -> Units | None
    are_made_of_images(given, entries, made) -> bool
    equal(entries, values) -> [Units]       a unit has as many rows as every other; most units first, one last
    whole(entries, values) -> Units         the microbatch is one
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from csc.driver.apart import Cut, Entries, equal_cuts
from csc.driver.belonging import GRIDS, kind_of
from csc.runtime.specs import ValueSpec
from csc.runtime.weights import bytes_of


@dataclass(frozen=True)
class Units:
    """Of a microbatch. beside: of each its row of the grid, as text; () where it has none. context: what else its
    features depend on.
    """

    cut: Cut
    beside: tuple[str, ...] = ()
    context: str = ""

    @property
    def labels(self) -> list[str]:
        """Of each unit. Equal ones have equal sizes."""
        rows = dict((*self.cut.entries.items(), *self.cut.results.items()))
        own = [str({name: sizes[number] for name, sizes in sorted(rows.items())}) for number in range(self.cut.count)]
        return [f"{one} {beside}" for one, beside in zip(own, self.beside)] if self.beside else own

    def shape(self, value: ValueSpec, number: int) -> tuple[int, ...]:
        """Of a value of one unit."""
        rows = self.cut.results[value.name]
        return (rows[number], *value.shape[1:]) if rows else value.shape

    def keys(self, identity: str, entries: Entries) -> list[str]:
        """Of each unit, by its values."""
        digests = [hashlib.sha256(f"{identity}{self.context}".encode()) for _ in range(self.cut.count)]
        for name, rows in sorted(self.cut.entries.items()):
            for digest, part in zip(digests, entries[name].split(rows) if rows else [entries[name]], strict=True):
                digest.update(f"{name} {part.dtype} {list(part.shape)}\n".encode())
                digest.update(bytes_of(part.detach().cpu().contiguous()))
        for digest, beside in zip(digests, self.beside):
            digest.update(beside.encode())
        return [digest.hexdigest() for digest in digests]


def whole(entries: Entries, values: Sequence[ValueSpec]) -> Units:
    """A microbatch as one unit, whatever its rows have of each other: it is none among others."""
    rows = {name: _all(one.shape) for name, one in entries.items()}
    return Units(Cut(rows, {value.name: _all(value.shape) for value in values}), context="whole")


def equal(entries: Entries, values: Sequence[ValueSpec]) -> list[Units]:
    """The numbers of units with equally many rows that the sizes allow."""
    return [Units(cut) for cut in equal_cuts(*_shapes(entries, values))]


def packed(given: Mapping[str, object], entries: Entries, values: Sequence[ValueSpec]) -> Units | None:
    """The images of a microbatch, if they are packed and of one kind.

    given: the microbatch as the user gives it; entries: what the encoder takes.
    """
    own = {name: one for name, one in entries.items() if name in given and one.is_floating_point()}
    name = _grid(given, own)
    if name is None:
        return None
    grid = given[name]
    assert isinstance(grid, torch.Tensor)
    patches = tuple(grid.prod(1).tolist())
    if min(patches, default=0) < 1 or any(len(one) != sum(patches) for one in own.values()):
        return None
    results = {value.name: _in_proportion(patches, value) for value in values}
    if not all(results.values()):
        return None
    cut = Cut(dict.fromkeys(own, patches), {name: rows for name, rows in results.items() if rows is not None})
    return Units(cut, tuple(f"{name} {row}" for row in grid.tolist()))


def are_made_of_images(given: Mapping[str, object], entries: Entries, made: Callable[[Entries], Entries]) -> bool:
    """Whether what the encoder takes beside packed images is made of their rows and their grid alone. made: what the
    model's functions on the host make of entries.
    """
    images = {name: one for name, one in entries.items() if name in given and one.is_floating_point()}
    name = _grid(given, images)
    grid = given.get(name or "")
    alone = {**images, name: grid} if name is not None and isinstance(grid, torch.Tensor) else images
    others = entries.keys() - alone.keys()
    host = made(alone) if others else {}
    return all(one in host and torch.equal(host[one], entries[one]) for one in others)


def _grid(given: Mapping[str, object], images: Entries) -> str | None:
    """The entry that says how many rows each image has; None if images are of several kinds."""
    kinds = {kind_of(name) for name in images}
    grids = [
        name for name, one in given.items()
        if isinstance(one, torch.Tensor) and one.dim() == 2 and name.endswith(GRIDS) and kind_of(name) in kinds - {None}
    ]  # fmt: skip
    return grids[0] if len(kinds) == len(grids) == 1 else None


def _in_proportion(patches: Sequence[int], value: ValueSpec) -> tuple[int, ...] | None:
    """A value's rows of each image; None if that does not come out even."""
    rows = value.shape[0] if value.shape else 0
    if not rows or sum(patches) % rows:
        return None
    each = sum(patches) // rows
    return None if any(own % each for own in patches) else tuple(own // each for own in patches)


def _shapes(entries: Entries, values: Sequence[ValueSpec]) -> tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]]:
    return {name: one.shape for name, one in entries.items()}, {value.name: value.shape for value in values}


def _all(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0],) if shape else ()
