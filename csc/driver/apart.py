"""Into how many parts a batch can be divided that do not meet each other in a function, tried on noise.

    divisions(entries, values) -> [int]            numbers of equal parts that all sizes allow, most parts first
    are_apart(encode, entries, parts) -> bool

An encoder is a flat graph without branches, so what it does with rows shows on any numbers. If all other parts are
changed and a part's result keeps every bit, nothing of them reaches it, however small. If parts change places and the
results do, to rounding, a part's place does not count either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd

import torch

Entries = Mapping[str, torch.Tensor]
ROUNDING = 1e-3  # of the largest number of a result; in types of 16 bits more
ROUNDING_HALF = 5e-2


def divisions(entries: Sequence[Sequence[int]], values: Sequence[Sequence[int]]) -> list[int]:
    """Of tensors of these shapes, along their first dimensions."""
    shapes = [*entries, *values]
    most = gcd(*(shape[0] for shape in shapes)) if all(shapes) else 1
    return [parts for parts in range(most, 1, -1) if most % parts == 0]


@torch.no_grad()
def are_apart(encode: Callable[[Entries], Mapping[str, torch.Tensor]], entries: Entries, parts: int) -> bool:
    """Whether so many equal parts do not meet each other. Whole numbers stay as they are: False if parts differ in
    them.
    """
    for one in entries.values():
        if not one.is_floating_point() and any(not torch.equal(part, one.chunk(parts)[0]) for part in one.chunk(parts)):
            return False
    generator = torch.Generator().manual_seed(0)
    first, other = _noise(entries, generator), _noise(entries, generator)
    made = encode(first)
    for kept in (0, 1):
        changed = {name: _mixed(one, other[name], parts, kept) for name, one in first.items()}
        for name, found in encode(changed).items():
            before, after = made[name].reshape(parts, -1), found.reshape(parts, -1)
            same, moved = slice(kept, None, 2), slice(1 - kept, None, 2)
            if not torch.equal(before[same], after[same]) or torch.equal(before[moved], after[moved]):
                return False
    rolled = encode({name: one.roll(one.shape[0] // parts, 0) for name, one in first.items()})
    return all(
        _close(value.reshape(parts, -1).roll(1, 0), rolled[name].reshape(parts, -1)) for name, value in made.items()
    )


def _mixed(one: torch.Tensor, other: torch.Tensor, parts: int, kept: int) -> torch.Tensor:
    """Every second part, from `kept` on, as it is, and the others of the other tensor."""
    mixed = other.clone()
    mixed.unflatten(0, (parts, -1))[kept::2] = one.unflatten(0, (parts, -1))[kept::2]
    return mixed


def _noise(entries: Entries, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(one.shape, generator=generator).to(one) if one.is_floating_point() else one
        for name, one in entries.items()
    }


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    within = ROUNDING if one.dtype.itemsize >= 4 else ROUNDING_HALF
    apart, most = (one.double() - other.double()).abs().max(), one.double().abs().max()
    return bool(apart <= within * most)
