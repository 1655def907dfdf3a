"""What a function's code does and looks at, read off its bytecode without running it.

Terms
  names      under which it may look something up: globals, attributes, and strings, which `getattr` may be given

    facts(function.__code__) -> Facts
"""

from __future__ import annotations

import dis
import hashlib
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
BY_NAME = ("getattr", "vars", "attrgetter", "methodcaller")  # functions that are given names
NEAR = 6  # instructions after such a function within which a name that is written out is loaded


@dataclass(frozen=True)
class Facts:
    """digest: of what it does, without its file and lines. globals: with the line of each. imports: of statements in
    it, (name, how many packages up, names from it, line). dynamic: it asks for something by a name that is computed.
    """

    digest: str
    globals: tuple[tuple[str, int], ...]
    attributes: frozenset[str]
    strings: frozenset[str]
    imports: tuple[tuple[str, int, tuple[str, ...], int], ...]
    dynamic: bool

    @property
    def names(self) -> frozenset[str]:
        """Under which it may look something up in an object or a module."""
        return self.attributes | self.strings


@cache
def facts(code: CodeType) -> Facts:
    """Of a function's code, and of the functions and classes within it."""
    inner = [facts(one) for one in code.co_consts if isinstance(one, CodeType)]
    found: dict[str, int] = {}
    attributes, line, dynamic = set[str](), code.co_firstlineno, False
    imports: list[tuple[str, int, tuple[str, ...], int]] = []
    constants: list[Any] = []
    instructions = list(dis.get_instructions(code))
    for at, one in enumerate(instructions):
        if one.starts_line is not None:
            line = one.starts_line
        if one.opname in OF_GLOBALS:
            found.setdefault(one.argval, line)
            if one.argval in BY_NAME:
                near = instructions[at + 1 : at + NEAR]
                dynamic = dynamic or not any(o.opname == "LOAD_CONST" and type(o.argval) is str for o in near)
        elif one.opname == "IMPORT_NAME":
            above, names = constants[-2:]
            imports.append((one.argval, above, names or (), line))
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(one.argval)
            dynamic = dynamic or one.argval in ("__dict__", *BY_NAME)
        elif one.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(one.argval)
    strings = {one for one in code.co_consts if type(one) is str}
    for within in inner:
        found = {**dict(within.globals), **found}
    return Facts(
        _digest(code),
        tuple(sorted(found.items())),
        frozenset(attributes).union(*(one.attributes for one in inner)),
        frozenset(strings).union(*(one.strings for one in inner)),
        (*imports, *(each for one in inner for each in one.imports)),
        dynamic or any(one.dynamic for one in inner),
    )


def _digest(code: CodeType) -> str:
    digest = hashlib.sha256(code.co_code + code.co_exceptiontable)
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    for one in (code.co_consts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, numbers):
        digest.update(repr([_constant(item) for item in one]).encode())
    return digest.hexdigest()


def _constant(item: Any) -> Any:
    if isinstance(item, CodeType):
        return facts(item).digest
    return sorted(map(repr, item)) if isinstance(item, frozenset) else item
