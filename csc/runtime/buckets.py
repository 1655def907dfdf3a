"""Buckets: tensors that travel together, so that few, large messages go.

filled(items, kind, size) -> [(kind, items), ...]      the same on every rank that has the same items
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

BYTES = 25 * 2**20

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=Hashable)


def filled(
    items: Iterable[Item], kind: Callable[[Item], Kind], size: Callable[[Item], int], limit: int | None = None
) -> list[tuple[Kind, list[Item]]]:
    """Items of one kind together, in their order, up to `limit` bytes (None: BYTES). Kinds come in the order of their
    first items.

    size: bytes of an item. One that is larger than the limit has a bucket of its own.
    """
    limit = BYTES if limit is None else limit
    kinds: dict[Kind, list[list[Item]]] = {}
    room: dict[Kind, int] = {}
    for item in items:
        own, bytes_ = kind(item), size(item)
        if own not in kinds or room[own] < bytes_:
            kinds.setdefault(own, []).append([])
            room[own] = limit
        kinds[own][-1].append(item)
        room[own] -= bytes_
    return [(own, bucket) for own, buckets in kinds.items() for bucket in buckets]
