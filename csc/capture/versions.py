"""Mappings whose writes Python counts: one number says that nothing was written, whatever they hold.

    Versioned([(mapping, holds), ...]).hold() -> bool      whether all hold; asked of those that were written to alone
    counted(mapping) -> dict | None                        whose number is that of the mapping; None: nobody counts
    members_hold(mapping, keys, values) -> bool            whether it has these very ones, in this order

A number says nothing of the order in an OrderedDict, which has one of its own. Nor, from Python 3.12 on, does it count
that an empty dict became a copy of another one (`update`): whether those are empty still is asked each time.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any

from csc.torch_private.fast_guards import dict_version

Holds = Callable[[], bool]


class Versioned:
    """held: (mapping, whether it holds what it did), as it is now."""

    def __init__(self, held: Iterable[tuple[dict[Any, Any], Holds]]) -> None:
        pairs = list(held)
        self._mappings, self._asked = [mapping for mapping, _ in pairs], [holds for _, holds in pairs]
        versions = list(map(dict_version, self._mappings))
        self._versions: list[int | None] = [number if holds() else None for number, holds in zip(versions, self._asked)]
        self._empty = self._empty_ones()

    def hold(self) -> bool:
        """Whether each holds what it did."""
        now: list[int | None] = list(map(dict_version, self._mappings))
        filled = any(map(dict.__len__, self._empty))
        if now == self._versions and not filled:
            return True
        written = (holds for holds, old, new in zip(self._asked, self._versions, now) if filled or old != new)
        if not all(holds() for holds in written):
            return False
        self._versions, self._empty = now, self._empty_ones()
        return True

    def _empty_ones(self) -> list[dict[Any, Any]]:
        return [mapping for mapping in self._mappings if not dict.__len__(mapping)]


def counted(mapping: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """The dict that counts the writes of a mapping: itself, or that of a class, which Python shows through a proxy."""
    one = gc.get_referents(mapping)[0] if isinstance(mapping, MappingProxyType) else mapping
    return one if isinstance(one, dict) and not isinstance(one, OrderedDict) else None


def kind_of(mapping: Mapping[Any, Any]) -> Any:
    """The class of Python whose methods read a mapping as it is: its own may make values on demand."""
    return next((kind for kind in (OrderedDict, dict) if isinstance(mapping, kind)), type(mapping))


def members_hold(mapping: Mapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> bool:
    """See above."""
    kind = kind_of(mapping)
    size = dict.__len__(mapping) if isinstance(mapping, dict) else len(mapping)
    if not size == len(keys) == len(values):
        return False
    return all(map(is_, kind.__iter__(mapping), keys)) and all(map(is_, kind.values(mapping), values))
