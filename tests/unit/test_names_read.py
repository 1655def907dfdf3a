"""Names that code looks up, read off its bytes, beside what `dis` says of the same code."""

from __future__ import annotations

import argparse
import dis
import inspect
from types import CodeType, FunctionType

import transformers.models.llama.modeling_llama
import transformers.training_args

from csc.capture import code_names


def by_dis(code: CodeType, *operations: str) -> set[str]:
    return {
        one.argval for part in code_names._codes(code) for one in dis.get_instructions(part) if one.opname in operations
    }


def functions() -> list[FunctionType]:
    modules = (argparse, inspect, transformers.models.llama.modeling_llama, transformers.training_args)
    values = [value for module in modules for value in vars(module).values()]
    values += [inner for value in values if isinstance(value, type) for inner in vars(value).values()]
    return [value for value in values if isinstance(value, FunctionType)]


def test_names_are_those_that_dis_finds() -> None:
    for function in functions():
        code = function.__code__
        assert code_names.globals_read(code) == by_dis(code, "LOAD_GLOBAL", "LOAD_NAME"), function
        assert {name.lstrip(".") for name, _ in code_names.imported(code)} == by_dis(code, "IMPORT_NAME"), function


def test_a_function_of_more_names_than_a_byte_counts() -> None:
    names = [f"name_{number}" for number in range(700)]
    text = "\n".join(["def many():", "    global written", *(f"    {name}" for name in names), "    written = 1"])
    space: dict[str, FunctionType] = {}
    exec(text, space)  # type: ignore[arg-type]
    assert code_names.globals_read(space["many"].__code__) == set(names)
    assert "written" not in code_names.names_read(space["many"].__code__) >= set(names)


def test_names_that_are_computed() -> None:
    """A text that is written out is a name; what makes one of others may be any."""
    written = ["getattr(x, 'a')", "getattr(x.y[0], 'a', 1)", "x.a"]
    computed = [
        "getattr(x, n)",
        "getattr(x, 'a' + n)",
        "getattr(x, f'a{n}')",
        "vars(x)['a']",
        "x.__dict__",
        "m.attrgetter(n)",
    ]
    for text in (*written, *computed):
        code = compile(f"def f(x, n, m): return {text}", "f", "exec")
        assert code_names.asks_by_name(code) == (text in computed), text
