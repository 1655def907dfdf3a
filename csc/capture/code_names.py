"""Which names, texts and modules code refers to, read off its bytecode without running it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from opcode import EXTENDED_ARG, opmap
from types import CodeType

_ARITHMETIC = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
CALLED_BY_PYTHON = frozenset(  # methods that no code names
    f"__{name}__"
    for name in (
        *_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *(f"i{name}" for name in _ARITHMETIC), "neg", "pos", "abs",
        "invert", "get", "getattr", "getattribute", "getitem", "missing", "len", "length_hint", "iter", "next",
        "reversed", "contains", "bool", "int", "float", "index", "complex", "round", "eq", "ne", "lt", "le", "gt", "ge",
        "hash", "enter", "exit", "torch_function", "array", "class_getitem", "instancecheck",
    )
)  # fmt: skip


def texts(code: CodeType) -> tuple[str, ...]:
    """The texts in code and in functions in it: some may be names of environment variables."""
    return tuple(
        dict.fromkeys(constant for part in _codes(code) for constant in part.co_consts if isinstance(constant, str))
    )


def names_read(code: CodeType) -> frozenset[str]:
    """The names that code and functions in it look up, but for globals that it writes itself."""
    codes = list(_codes(code))
    written = {inner.co_names[place] for inner in codes for place in _arguments(inner, "STORE_GLOBAL")}
    return frozenset(name for inner in codes for name in inner.co_names) - written


@functools.cache  # the functions of a library are met in every walk
def globals_read(code: CodeType) -> frozenset[str]:
    """The names that code and functions in it look up as globals, not as attributes."""
    return frozenset(
        name
        for inner in _codes(code)
        for name in (
            *(inner.co_names[place >> 1] for place in _arguments(inner, "LOAD_GLOBAL")),  # its last bit is a flag
            *(inner.co_names[place] for place in _arguments(inner, "LOAD_NAME")),
        )
    )


@functools.cache
def imported(code: CodeType) -> frozenset[str]:
    """The modules that it imports while it runs."""
    names = (inner.co_names[place] for inner in _codes(code) for place in _arguments(inner, "IMPORT_NAME"))
    return frozenset(name for name in names if name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _arguments(code: CodeType, operation: str) -> Iterator[int]:
    """The arguments of the instructions of one kind, in order. Read off the bytes: `dis` makes objects of all
    instructions, which took half of the time of compiling a model with adapters.
    """
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    place = operations.find(opmap[operation])
    while place >= 0:
        argument, before = arguments[place], place - 1
        while before >= 0 and operations[before] == EXTENDED_ARG:
            argument |= arguments[before] << 8 * (place - before)
            before -= 1
        yield argument
        place = operations.find(opmap[operation], place + 1)
