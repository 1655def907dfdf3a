"""Things that hold values, with the values that they had: lists, dicts, classes, objects with __slots__, names of a
namespace, environment variables.

Terms
  watch      (path, names, read, before): `read` is a partial of one of the functions here, `before` what it gave
  together   thousands of watches, asked in loops that Python does not see

    Together(watches).hold() -> bool               whether each holds the very values that it had, by the same names
    Codes(functions).hold() -> bool                whether each function has its code and its defaults
    put_members_back(read, before, elements_before, is_wrong)      those that are not what they should be
    without(watch, names) -> watch                 the same of all its values but some
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, TypeGuard

from csc.capture.versions import Versioned, counted, kind_of, members_hold
from csc.torch_private.fast_guards import dict_version

ABSENT = object()
Read = Callable[[], list[Any]]
Names = tuple[str, ...]
Watch = tuple[str, Names, Read, list[Any]]
CODE, DEFAULTS, OF_KEYWORDS = map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))
PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def values(members: Mapping[str, Any], left_out: Set[str] = frozenset()) -> list[Any]:
    """As they are, in their order: the class of a mapping may make others on demand."""
    if left_out:
        return [value for name, value in items(members) if str(name) not in left_out]
    return list(kind_of(members).values(members))


def items(members: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """See `values`."""
    return list(kind_of(members).items(members))


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


def put_members_back(
    read: Read, before: Mapping[str, Any], elements_before: Sequence[Any], is_wrong: Callable[[Any], bool]
) -> None:
    """Put back what a partial of one of these functions reads and `is_wrong`: by name, or all elements."""
    function, holder = read.func, read.args[0]  # type: ignore[attr-defined]
    if function is elements:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(elements_before)
    elif function is attributes:
        for name, value in before.items():
            if is_wrong(getattr(holder, name, ABSENT)):
                delattr(holder, name) if value is ABSENT else setattr(holder, name, value)
    elif isinstance(holder, dict):
        for key in [key for key, value in items(holder) if is_wrong(value)]:
            was = before.get(str(key), ABSENT)
            holder.pop(key) if was is ABSENT else holder.update({key: was})


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
        self._empty = _firsts(kinds["empty"])
        mappings = list(map(counted, _firsts(kinds["counted"])))
        self._counted = Versioned(zip(filter(None, mappings), map(_holds, kinds["counted"])))
        self._ordered = list(map(_holds, kinds["ordered"]))
        self._others = [(read, before) for _, _, read, before in kinds[None]]
        self._named = [(read.args, names) for _, names, read, _ in kinds[None] if is_of_members(read)]
        self._containers = _firsts(kinds[elements])
        self._sizes = [len(before) for _, _, _, before in kinds[elements]]
        objects = kinds[attributes]
        self._objects = [one for one, (_, names, _, _) in zip(_firsts(objects), objects) for _ in names]
        self._attributes = [name for _, names, _, _ in objects for name in names]
        self._before = [value for kind in (kinds[elements], objects) for _, _, _, before in kind for value in before]
        self._variables = dict(chain.from_iterable(zip(names, before) for _, names, _, before in kinds[environment]))
        self._encoded: dict[Any, Any] = {}  # all variables, when these held last
        self._version: int | None = None  # and how often those had been written to then

    def hold(self) -> bool:
        """Whether each holds the very values that it had."""
        return (
            not any(self._empty)
            and self._counted.hold()
            and all(holds() for holds in self._ordered)
            and list(map(len, self._containers)) == self._sizes
            and all(map(is_, self._now(), self._before))
            and self._variables_hold()
            and all(names_of(*given) == names for given, names in self._named)
            and all(identical(read(), before) for read, before in self._others)
        )

    def _now(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._containers), map(getattr, self._objects, self._attributes, repeat(ABSENT))
        )

    def _variables_hold(self) -> bool:
        if not self._variables:
            return True
        kept = vars(os.environ).get("_data", os.environ)  # as Python keeps them: nothing has to be decoded
        version = dict_version(kept) if type(kept) is dict else None
        if version is not None and version == self._version:
            return True
        encoded, self._version = dict(kept), version
        if encoded == self._encoded:
            return True
        now = dict(os.environ)  # one by one, each is encoded first
        holds = all(now.get(name, ABSENT) == before for name, before in self._variables.items())
        if holds:
            self._encoded = encoded
        else:
            self._version = None
        return holds


class Codes:
    """Functions with their code and defaults, read one kind after the other: a step has driven them out of the caches,
    and what all of them lead to is ten times as much. Equal code is as good.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions
        self._codes = list(map(CODE, functions))
        self._defaults = [(read, list(map(read, functions))) for read in (DEFAULTS, OF_KEYWORDS)]

    def hold(self) -> bool:
        """Whether each has the very ones that it had."""
        return list(map(CODE, self._functions)) == self._codes and all(
            all(map(is_, map(read, self._functions), before)) for read, before in self._defaults
        )


def is_of_members(read: Read) -> TypeGuard[partial[list[Any]]]:
    """Whether these are the values of a mapping, or of a class."""
    return isinstance(read, partial) and read.func is values


def _kind(watch: Watch) -> Any:
    """What the loop over watches of a kind goes by."""
    _, _, read, before = watch
    if not isinstance(read, partial) or (read.func is values and len(read.args) > 1):
        return None
    if read.func in (elements, attributes, environment):
        return read.func
    if read.func is values and type(read.args[0]) in (dict, OrderedDict) and not before:
        return "empty"
    if read.func not in (values, looked_up):
        return None
    return "counted" if counted(read.args[0]) else "ordered"


def _holds(watch: Watch) -> Callable[[], bool]:
    """Whether what it watches has what it had."""
    _, names, read, before = watch
    assert isinstance(read, partial)
    mapping = read.args[0]
    if read.func is values:
        return partial(members_hold, mapping, [key for key, _ in items(mapping)], before)
    return partial(_looked_up_hold, mapping, names, before)


def _looked_up_hold(space: Mapping[str, Any], names: Names, before: Sequence[Any]) -> bool:
    return identical(looked_up(space, names), before)


def _firsts(watches: Sequence[Watch]) -> list[Any]:
    """What they watch."""
    return [read.args[0] for _, _, read, _ in watches if isinstance(read, partial)]
