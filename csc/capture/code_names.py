"""Which names, texts and modules code refers to, read off its bytecode without running it."""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from opcode import EXTENDED_ARG, opmap
from types import CodeType
from typing import NamedTuple

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
BY_NAME = ("getattr", "vars", "attrgetter", "methodcaller")  # functions that are given names
COMPUTED = ("BINARY_OP", "BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE")  # makes a text


def texts(code: CodeType) -> tuple[str, ...]:
    """The texts in code and in functions in it: names of environment variables, or of what `getattr` asks for."""
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
def imported(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(module, names from it) of each import in code and in functions in it; a relative one begins with dots."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for inner in _codes(code):
        if next(_arguments(inner, "IMPORT_NAME"), None) is None:
            continue
        constants: list[object] = []
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants.append(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                level, names = constants[-2:]
                found.append(("." * int(str(level)) + instruction.argval, tuple(names or ())))  # type: ignore[arg-type]
    return tuple(found)


def modules_imported(code: CodeType, package: str) -> list[str]:
    """The full names of the modules that code of a package may import while it runs, those around them included."""
    modules: dict[str, None] = {}
    for name, inner in imported(code):
        if full := full_name(name, package):
            modules |= dict.fromkeys((full.partition(".")[0], full, *(f"{full}.{one}" for one in inner)))
    return list(modules)


def full_name(module: str, package: str) -> str:
    """Of a module that code of a package names; "" for a relative name where there is no such package."""
    try:
        return importlib.util.resolve_name(module, package)
    except ImportError:
        return ""


@functools.cache
def asks_by_name(code: CodeType) -> bool:
    """Whether it, or a function in it, asks for something by a name that is computed."""
    for inner in _codes(code):
        if not {"__dict__", *BY_NAME} & set(inner.co_names):
            continue
        instructions = list(dis.get_instructions(inner))
        for place, one in enumerate(instructions):
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval in BY_NAME:
                given = list(itertools.takewhile(lambda other: other.opname[:4] != "CALL", instructions[place + 1 :]))
                written_out = any(other.opname == "LOAD_CONST" and type(other.argval) is str for other in given)
                if not written_out or any(other.opname in COMPUTED for other in given):
                    return True
            elif one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and one.argval in ("__dict__", *BY_NAME):
                return True
    return False


class Asked(NamedTuple):
    """Names by which code asks namespaces: those that it reads as globals (`globals()["SCALE"]`), Python modules
    (`sys.modules["settings"]`), and where it asks by a name that is computed, as (what it asks, line).
    """

    globals: frozenset[str]
    modules: frozenset[str]
    computed: tuple[tuple[str, int], ...]
    variables: bool  # whether it asks the environment by a name that is computed


WRITING = frozenset({"update", "pop", "clear"})  # methods of a namespace that ask nothing
OWN_MODULE = "__name__"  # as which a function names the module that it is in
FRAMES = frozenset({"f_globals", "f_locals", "f_builtins", "__globals__"})  # whose names nothing here follows
ENDS = ("CALL", "BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR")  # stands behind a key
ENVIRONMENT = frozenset({"environ", "getenv"})
ASKING = ENVIRONMENT | frozenset({"globals", "eval", "exec", "__import__", "import_module", "modules"}) | FRAMES


@functools.cache
def asked_of_namespaces(code: CodeType) -> Asked:
    """Of code and functions in it."""
    names, modules, computed, line = set[str](), set[str](), list[tuple[str, int]](), code.co_firstlineno
    variables = False
    for inner in _codes(code):
        if not ASKING & set(inner.co_names):
            continue
        instructions = list(dis.get_instructions(inner))
        for place, one in enumerate(instructions):
            line = one.starts_line or line
            following, what = instructions[place + 1 :], one.argval
            if not one.opname.startswith("LOAD_") or what not in ASKING:
                continue
            is_global, before = one.opname in ("LOAD_GLOBAL", "LOAD_NAME"), instructions[place - 1] if place else None
            if what in ENVIRONMENT:
                variables |= _key(following, instructions[place - 2] if place > 1 else None) is None
                continue
            known: str | None = None
            if what == "globals" and is_global:
                called = next((number for number, other in enumerate(following) if other.opname == "CALL"), None)
                behind = following[called + 1 :] if called is not None else []  # it is handed on, and not called here
                known = _key(behind, before) if behind else None
                if behind and behind[0].argval in WRITING:
                    continue
                names |= {known} if known else set()
            elif what in ("eval", "exec") and is_global:
                known = _key(following, None)
                try:
                    names |= set(compile(known, "", "eval").co_names) if known and what == "eval" else set()
                except SyntaxError:
                    known = None
            elif what == "modules" and before is not None and before.argval == "sys":
                known = _key(following, instructions[place - 2] if place > 1 else None)
                modules |= {known} if known else set()
            elif what in ("__import__", "import_module"):
                known = _key(following, None)
                modules |= {known} if known else set()
            elif what not in FRAMES or is_global:
                continue
            if known is None or what == "exec":
                computed.append((what, line))
    return Asked(frozenset(names), frozenset(modules), tuple(computed), variables)


def _key(following: Sequence[dis.Instruction], before: dis.Instruction | None) -> str | None:
    """The text written out in code that a mapping or a function is asked for next, or by what stands before `in`."""
    rest = [one for one in following if one.opname not in ("PUSH_NULL", "PRECALL")]
    if rest and rest[0].opname == "CONTAINS_OP":
        return before.argval if before is not None and type(before.argval) is str else None
    if rest and rest[0].opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and rest[0].argval in ("get", "setdefault"):
        rest = rest[1:]
    ends = (place for place, one in enumerate(rest[1:]) if not one.opname.startswith(("LOAD_", "KW_NAMES")))
    end = next(ends, None)  # behind other arguments of a call
    if end is None or type(rest[0].argval) is not str or not rest[1 + end].opname.startswith("CALL" if end else ENDS):
        return None
    key = rest[0]
    written_out = key.opname == "LOAD_CONST" or (key.opname == "LOAD_GLOBAL" and key.argval == OWN_MODULE)
    return key.argval if written_out else None


def line_of(code: CodeType, name: str) -> int:
    """Where code first names something; where it begins, if it does not."""
    for inner in _codes(code):
        line = inner.co_firstlineno
        for instruction in dis.get_instructions(inner):
            line = instruction.starts_line or line
            if instruction.argval == name:
                return line
    return code.co_firstlineno


@functools.cache
def digest(code: CodeType) -> str:
    """Of what code does, without its file and lines."""
    total = hashlib.sha256(code.co_code + code.co_exceptiontable)
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    for values in (code.co_consts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, numbers):
        total.update(repr(list(map(_constant, values))).encode())
    return total.hexdigest()


def _constant(item: object) -> object:
    if isinstance(item, CodeType):
        return digest(item)
    return sorted(map(repr, item)) if isinstance(item, frozenset) else item


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
