"""Thousands of watches in a few loops see what each of them would see alone."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from csc.capture.watches import Codes, Together, Watch, attributes, elements, environment, looked_up, values, without


class Slotted:
    __slots__ = ("one", "two")


class Class:
    one = 1


class Counting(dict):  # type: ignore[type-arg]
    """Has a length and values of its own."""

    def __len__(self) -> int:
        return 7

    def values(self) -> Any:
        raise AssertionError("its values may be made on demand")


def function(x: int, by: int = 2, *, more: int = 3) -> int:
    return x * by + more


def watch(read: Callable[[], list[Any]], *names: str) -> Watch:
    return "it", names, read, read()


def things() -> dict[str, Any]:
    slotted = Slotted()
    slotted.one = 1
    return {
        "dict": {"a": 1, "b": None}, "empty": {}, "counting": Counting(a=1), "counting nothing": Counting(),
        "ordered": OrderedDict(a=1), "list": [1, 2], "set": {1, 2}, "deque": deque([1]), "slots": slotted,
        "class": type("Own", (Class,), {"two": 2}), "space": {"a": 1, "none": None, "other": 1},
    }  # fmt: skip


def together(of: dict[str, Any]) -> Together:
    plain = [watch(partial(values, of[name])) for name in ("dict", "empty", "counting", "counting nothing", "ordered")]
    several = [watch(partial(elements, of[name])) for name in ("list", "set", "deque")]
    slots, space = ("one", "two"), ("a", "none", "absent")
    return Together(
        [
            *several,
            watch(partial(attributes, of["slots"], slots), *slots),
            watch(partial(looked_up, of["space"], space), *space),
            *plain,
            watch(partial(values, vars(of["class"])), *vars(of["class"])),
            watch(partial(environment, ("CSC_NOT_SET", "PATH")), "CSC_NOT_SET", "PATH"),
            without(watch(partial(values, of["dict"]), "a", "b"), {"a"}),
            watch(lambda: list(of["list"])),
        ]
    )


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an entry": lambda of: of["dict"].update(a=2),
    "another entry": lambda of: of["dict"].update(c=2),
    "no entry": lambda of: of["dict"].clear(),
    "a first entry": lambda of: of["empty"].update(a=1),
    "an entry of a mapping of its own": lambda of: of["counting"].update(a=2),
    "a first entry of such a mapping": lambda of: of["counting nothing"].update(a=2),
    "an ordered entry": lambda of: of["ordered"].update(a=None),
    "an element": lambda of: of["list"].__setitem__(0, 3),
    "one element more": lambda of: of["list"].append(1),
    "an element of a set": lambda of: of["set"].add(3),
    "one element less": lambda of: of["deque"].pop(),
    "a slot": lambda of: setattr(of["slots"], "one", 2),
    "a first value of a slot": lambda of: setattr(of["slots"], "two", None),
    "a slot without a value": lambda of: delattr(of["slots"], "one"),
    "a member of a class": lambda of: setattr(of["class"], "two", 3),
    "one member more": lambda of: setattr(of["class"], "three", 3),
    "a name": lambda of: of["space"].update(a=2),
    "a name that was None": lambda of: of["space"].pop("none"),
    "a name that was not there": lambda of: of["space"].update(absent=None),
    "a variable": lambda of: os.environ.update(CSC_NOT_SET="1"),
}


def test_a_space_that_was_emptied_gets_a_name() -> None:
    """From Python 3.12 on nobody counts that an empty dict became a copy of another one."""
    space = {"other": 1}
    asked = Together([watch(partial(looked_up, space, ("a",)), "a")])
    space.clear()
    assert asked.hold()
    space.update({"a": 1})
    assert not asked.hold()


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CSC_NOT_SET", raising=False)
    of = things()
    asked = together(of)
    of["space"]["other"] = 2  # nobody reads it
    assert asked.hold() and asked.hold()
    CHANGES[change](of)
    assert not asked.hold()
    monkeypatch.delenv("CSC_NOT_SET", raising=False)


def test_what_changed_while_things_were_gathered_is_seen() -> None:
    """Sizes are those that things had when their values were read."""
    first, second = {"a": 1}, {"b": 2}
    watches = [watch(partial(values, first), "a"), watch(partial(values, second), "b")]
    first.clear()
    second["c"] = 3
    assert not Together(watches).hold()


OTHERS = {
    "__code__": (lambda x, by=2, *, more=3: 0).__code__,
    "__defaults__": (4,),
    "__kwdefaults__": {"more": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_code_and_defaults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = Codes([function, test_each_change_is_seen])
    assert codes.hold()
    monkeypatch.setattr(function, name, OTHERS[name])
    assert not codes.hold()
