"""Passes as text: `shapes,freeze{freeze=[vision_tower]},my_passes.py:Scale{factor=2.0}`.

    line     item, item, ...
    item     name, or name{field=value, ...}
    name     of a pass of csc; or where a pass of a user stands: my.module:Scale, my_passes.py:Scale
    value    true, false, none, a number, a word, a "text", or a list [value, ...]

Fields that are as they are by default are left out. What a line holds reads back as the same values.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from csc.errors import CscError, InputError
from csc.ir.program import Pass

WORDS = {"true": True, "false": False, "none": None}
NUMBER = re.compile(r"[+-]?(\d+|\d*\.?\d+([eE][+-]?\d+)?|\d+\.(\d*)([eE][+-]?\d+)?|inf|nan)")
WORD = re.compile(r'[^\s,{}\[\]"=]+')
TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
PLACE = "passes"

Value = Any  # None, bool, int, float, str, or a tuple of these


# --- Printing ---------------------------------------------------------------------------------------------------------


def text_of(step: Pass, name: str) -> str:
    """A pass as an item of a line, under that name."""
    values = [(option.name, getattr(step, option.name)) for option in fields(step)]
    texts = [
        f"{key}={_text(value)}" for (key, value), option in zip(values, fields(step)) if not _is_default(option, value)
    ]
    return f"{name}{{{','.join(texts)}}}" if texts else name


def place_of(kind: type[Pass]) -> str:
    """Where a class can be found again: its module if it can be imported by name, else its file; and its name."""
    module = sys.modules.get(kind.__module__)
    importable = kind.__module__ != "__main__" and getattr(module, "__spec__", None) is not None
    if importable and module is not None and not _is_loaded_file(module):
        return f"{kind.__module__}:{kind.__qualname__}"
    return f"{getattr(module, '__file__', None) or kind.__module__}:{kind.__qualname__}"


def _is_loaded_file(module: types.ModuleType) -> bool:
    """Whether a module was made of a file, and has a name that nobody can import it by."""
    return module.__name__.startswith("csc_target_")


def _is_default(option: Field[Any], value: Value) -> bool:
    standard = option.default if option.default_factory is MISSING else option.default_factory()
    return type(standard) is type(value) and standard == value


def _text(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{','.join(_text(entry) for entry in value)}]"
    text = str(value)
    plain = WORD.fullmatch(text) and text not in WORDS and not NUMBER.fullmatch(text)
    return text if plain else json.dumps(text)


# --- Reading ----------------------------------------------------------------------------------------------------------


def read(line: str, known: Mapping[str, type[Pass]], load: Callable[[str], Any]) -> tuple[Pass, ...]:
    """The passes of a line.

    Args:
        line: As above.
        known: The classes of csc's own passes, by name.
        load: What `module:name` or `file.py:name` names: a class, a pass, or several passes, which stand there then.

    Returns:
        The passes, in order.

    Raises:
        InputError: It says the column of the line that cannot be read, or whose names there are not.
    """
    reader = _Reader(line)
    steps: list[Pass] = []
    for name, options, column in reader.items():
        steps.extend(_passes(name, options, f"{PLACE}, column {column}", known, load))
    return tuple(steps)


def _passes(
    name: str, options: Mapping[str, Value], where: str, known: Mapping[str, type[Pass]], load: Callable[[str], Any]
) -> Sequence[Pass]:
    value: Any = known.get(name)
    if value is None and ":" not in name:
        raise InputError(f"there is no pass {name!r}", where, no_pass(name, known))
    if value is None:
        try:
            value = load(name)
        except CscError as error:
            raise type(error)(error.what, f"{where}, {error.where}", error.remedy) from error
    if isinstance(value, type) and issubclass(value, Pass):
        return (made(value, options, where),)
    steps = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not steps or not all(isinstance(step, Pass) for step in steps):
        raise InputError(
            f"{name} is {_article(type(value).__name__)}, and no pass", where,
            "name a class of csc.Pass, a pass, or a tuple of passes (csc.pipeline())",
        )  # fmt: skip
    if options:
        raise InputError(
            f"{name} is made already, and options are given for it", where, "name its class, or give no options"
        )
    return steps


def no_pass(name: str, known: Mapping[str, Any]) -> str:
    """What to do about a name that no pass of csc has."""
    if name == "capture":
        return "leave it out: the capture is made before the first pass"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}csc's own are {', '.join(known)}; one of your own is my_passes.py:Name or my.module:Name"


def made(kind: type[Pass], options: Mapping[str, Value], where: str) -> Pass:
    """A pass of a class, with these options. InputError if it has no such options, or not of this type."""
    names = [option.name for option in fields(kind) if option.init]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            its = f"its options are {', '.join(names)}" if names else "it has none"
            raise InputError(f"pass {kind.name} has no option {name!r}", where, f"{hint}{its}")
    hints = _hints(kind)
    read_as = {name: _as(hints.get(name, Any), value) for name, value in options.items()}
    try:
        step = kind(**read_as)
    except CscError:
        raise
    except Exception as error:
        raise InputError(
            f"pass {kind.name} refuses its options ({type(error).__name__}: {error})", where, "give it others"
        ) from error
    check_fields(step, where)
    return step


def _as(hint: Any, value: Value) -> Value:
    """A number without a point is one with a point where that is asked for."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    if isinstance(value, tuple) and get_origin(hint) is tuple:
        inner = get_args(hint)
        each = [inner[0]] * len(value) if inner[1:] == (...,) else [*inner, *[Any] * len(value)]
        return tuple(_as(kind, entry) for kind, entry in zip(each, value))
    return value


class _Reader:
    """Reads a line from left to right."""

    def __init__(self, line: str) -> None:
        self._line, self._at = line, 0

    def items(self) -> Iterator[tuple[str, dict[str, Value], int]]:
        """Name, options, and the column of the name, from 1."""
        while True:
            self._skip()
            column = self._at + 1
            name = self._word("the name of a pass")
            yield name, self._options(name), column
            if not self._next(","):
                break
        if self._at < len(self._line):
            self._refuse(
                f"{self._line[self._at]!r} stands where a comma or the end is expected", "put commas between passes"
            )

    def _options(self, name: str) -> dict[str, Value]:
        options: dict[str, Value] = {}
        if not self._next("{") or self._next("}"):
            return options
        while True:
            field = self._word(f"an option of {name}")
            if field in options:
                self._refuse(f"{name} has the option {field} twice", "give it once")
            if not self._next("="):
                self._refuse(f"{field} of {name} has no value", f"write {name}{{{field}=value}}")
            options[field] = self._value()
            if self._next("}"):
                return options
            if not self._next(","):
                self._refuse(f"the options of {name} do not end", "close them with }")

    def _value(self) -> Value:
        if self._next("["):
            values: list[Value] = []
            while not self._next("]"):
                if values and not self._next(","):
                    self._refuse("a list does not end", "close it with ]")
                values.append(self._value())
            return tuple(values)
        if text := TEXT.match(self._line, self._at):
            try:
                value = json.loads(text[0])
            except ValueError:
                self._refuse(f"{text[0]} is no text", 'write it as JSON has it, with \\ before " and \\')
            self._at = text.end()
            return value
        word = self._word("a value")
        if word in WORDS:
            return WORDS[word]
        if NUMBER.fullmatch(word):
            return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
        return word

    def _word(self, wanted: str) -> str:
        self._skip()
        word = WORD.match(self._line, self._at)
        if word is None:
            there = f"{self._line[self._at]!r} stands" if self._at < len(self._line) else "the line ends"
            self._refuse(f"{there} where {wanted} is expected", "`csc passes` shows a line as it should be")
        self._at = word.end()
        return word[0]

    def _next(self, mark: str) -> bool:
        """Whether this mark comes next, which is read then."""
        self._skip()
        if not self._line.startswith(mark, self._at):
            return False
        self._at += 1
        return True

    def _skip(self) -> None:
        while self._at < len(self._line) and self._line[self._at].isspace():
            self._at += 1

    def _refuse(self, fault: str, remedy: str) -> NoReturn:
        raise InputError(fault, f"{PLACE}, column {self._at + 1}", remedy)


# --- What fields may hold ---------------------------------------------------------------------------------------------


def check_fields(step: Pass, where: str) -> None:
    """InputError for an option that a line cannot hold, or of another type than its class says."""
    hints = _hints(type(step))
    for option in fields(step):
        value = getattr(step, option.name)
        if not _holds(value):
            raise InputError(
                f"the option {option.name} of pass {step.name} is {_article(type(value).__name__)}", where,
                "use None, True or False, numbers, texts, or tuples of these: a line has to hold it",
            )  # fmt: skip
        if not _fits(value, hints.get(option.name, Any)):
            raise InputError(
                f"the option {option.name} of pass {step.name} is {_text(value)}",
                where,
                f"its type is {type_text(option)}",
            )


def _holds(value: Value) -> bool:
    return value is None or type(value) in (bool, int, float, str) or (
        type(value) is tuple and all(_holds(entry) for entry in value)
    )  # fmt: skip


def type_text(one: Field[Any]) -> str:
    """The type of an option, as its class writes it."""
    return one.type.__name__ if isinstance(one.type, type) else str(one.type)


def _hints(kind: type[Pass]) -> Mapping[str, Any]:
    """The types of its fields; none if names in them cannot be looked up, as in a class within a function."""
    try:
        return get_type_hints(kind)
    except Exception:
        return {}


def _fits(value: Value, hint: Any) -> bool:
    """Whether a value is of a type. Types of which a line knows nothing fit all."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[1:] == (...,):
            return all(_fits(entry, inner[0]) for entry in value)
        return len(inner) == len(value) and all(map(_fits, value, inner))
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return type(value) in (int, float)
    if hint in (bool, int, str, tuple):
        return type(value) is hint
    return True


def _article(kind: str) -> str:
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
