"""Things that hold values, with the values that they had: lists, dicts, classes, objects with __slots__, names of a
namespace, environment variables.

Terms
  watch      (path, names, read, before): `read` is a partial of one of the functions here, `before` what it gave
  together   thousands of watches, asked in loops that Python does not see

    Together(watches).hold() -> bool               whether each holds the very values that it had, by the same names
    Codes(functions).hold() -> bool                whether each function has its code and its defaults
    without(watch, names) -> watch                 the same of all its values but some
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, TypeGuard

ABSENT = object()
Read = Callable[[], list[Any]]
Names = tuple[str, ...]
Watch = tuple[str, Names, Read, list[Any]]
CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def values(members: Mapping[str, Any], left_out: Set[str] = frozenset()) -> list[Any]:
    """As a dict, if it is one: the values of its class may be made on demand."""
    if left_out:
        return [value for name, value in items(members) if str(name) not in left_out]
    return list(dict.values(members) if isinstance(members, dict) else members.values())


def items(members: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """See `values`."""
    return list(dict.items(members) if isinstance(members, dict) else members.items())


def names_of(members: Mapping[Any, Any], left_out: Set[str] = frozenset()) -> Names:
    """Of `values`, in their order."""
    return tuple(name for name in (str(key) for key, _ in items(members)) if name not in left_out)


def elements(container: Iterable[Any]) -> list[Any]:
    """Of a list, a set, a deque."""
    return list(container)


def attributes(value: Any, names: Names) -> list[Any]:
    """Of an object, by these names."""
    return [getattr(value, name, ABSENT) for name in names]


def looked_up(space: Mapping[str, Any], names: Names) -> list[Any]:
    """Of a namespace, by these names."""
    return [space.get(name, ABSENT) for name in names]


def environment(names: Names) -> list[Any]:
    """Environment variables, equal ones as the same object each time."""
    return [sys.intern(os.environ[name]) if name in os.environ else ABSENT for name in names]


def _at(read: Read, places: list[int]) -> list[Any]:
    found = read()
    return [found[place] for place in places]


def identical(now: Any, before: Any) -> bool:
    """Whether two sequences have the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def without(watch: Watch, left_out: Set[str]) -> Watch:
    """The same of all its values but those of these names, which a mapping may get only later."""
    if not left_out:
        return watch
    path, names, read, _ = watch
    kept = tuple(name for name in names if name not in left_out)
    if isinstance(read, partial) and read.func is values:
        others: Read = partial(values, read.args[0], frozenset(left_out))
    else:
        places = [place for place, name in enumerate(names) if name not in left_out]
        others = partial(_at, read, places)
    return path, kept, others, others()


class Together:
    """Each kind of watch has one loop; what is of no kind is read as it is. Most mappings are empty, and stay so."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        kinds: dict[Any, list[Watch]] = defaultdict(list)
        for watch in watches:
            kinds[_kind(watch)].append(watch)
        others = kinds.pop(None, [])
        self._others = [(read, before) for _, _, read, before in others]
        self._named = [(read.args, names) for _, names, read, _ in others if is_of_members(read)]
        self._empty, self._dicts = _firsts(kinds.pop("empty", [])), _firsts(kinds[dict])
        self._classes, self._containers = _firsts(kinds[MappingProxyType]), _firsts(kinds[elements])
        sized = (kinds[dict], kinds[MappingProxyType], kinds[elements])
        self._sizes = [len(before) for kind in sized for _, _, _, before in kind]
        self._keys = list(self._keys_now())
        self._gets = [space.get for space in _firsts(kinds[looked_up])]
        self._looked_up = [names for _, names, _, _ in kinds[looked_up]]
        objects = kinds[attributes]
        self._objects = [one for one, (_, names, _, _) in zip(_firsts(objects), objects) for _ in names]
        self._attributes = [name for _, names, _, _ in objects for name in names]
        self._before = [
            value for kind in (*sized, kinds[looked_up], objects) for _, _, _, before in kind for value in before
        ]
        self._variables = dict(chain.from_iterable(zip(names, before) for _, names, _, before in kinds[environment]))

    def hold(self) -> bool:
        """Whether each holds the very values that it had."""
        now = chain(
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(map(MappingProxyType.values, self._classes)),
            chain.from_iterable(self._containers),
            chain.from_iterable(map(map, self._gets, self._looked_up, repeat(repeat(ABSENT)))),
            map(getattr, self._objects, self._attributes, repeat(ABSENT)),
        )
        return (
            not any(self._empty)
            and self._sizes_now() == self._sizes
            and all(map(is_, self._keys_now(), self._keys))
            and all(map(is_, now, self._before))
            and self._variables_hold()
            and all(names_of(*given) == names for given, names in self._named)
            and all(identical(read(), before) for read, before in self._others)
        )

    def _sizes_now(self) -> list[int]:
        return [*map(dict.__len__, self._dicts), *map(len, self._classes), *map(len, self._containers)]

    def _keys_now(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.__iter__, self._dicts)), chain.from_iterable(self._classes))

    def _variables_hold(self) -> bool:
        if not self._variables:
            return True
        now = dict(os.environ)  # one by one, each is encoded first
        return all(now.get(name, ABSENT) == before for name, before in self._variables.items())


class Codes:
    """Functions with their code and defaults."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions
        self._before = list(self._now())

    def hold(self) -> bool:
        """Whether each has the very ones that it had."""
        return all(map(is_, self._now(), self._before))

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(map(CODE, self._functions))


def is_of_members(read: Read) -> TypeGuard[partial[list[Any]]]:
    """Whether these are the values of a mapping, or of a class."""
    return isinstance(read, partial) and read.func is values


def _kind(watch: Watch) -> Any:
    """What the loop over watches of a kind goes by."""
    _, _, read, before = watch
    if not isinstance(read, partial) or (read.func is values and len(read.args) > 1):
        return None
    if read.func is not values:
        return read.func if read.func in (elements, looked_up, attributes, environment) else None
    if type(read.args[0]) is dict and not before:
        return "empty"
    return next((kind for kind in (dict, MappingProxyType) if isinstance(read.args[0], kind)), None)


def _firsts(watches: Sequence[Watch]) -> list[Any]:
    """What they watch."""
    return [read.args[0] for _, _, read, _ in watches if isinstance(read, partial)]
