"""The house is read in sittings: no function of more than 60 lines of code, no file of more than 1,000 lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES_OF_CODE, LINES = 60, 1000


def files() -> Iterator[tuple[str, str]]:
    """(path, text) of every file of the package."""
    for folder in ("csc", "passes", "codegen", "kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text()


def functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines of code) of all functions: without docstrings, comments, and empty lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            said = node.body[0] if ast.get_docstring(node) is not None else None
            left_out = range(said.lineno, (said.end_lineno or 0) + 1) if said is not None else range(0)
            inside = range(node.lineno, (node.end_lineno or 0) + 1)
            code = (lines[number - 1].strip() for number in inside if number not in left_out)
            yield node.name, sum(bool(line) and not line.startswith("#") for line in code)


def test_functions_are_short() -> None:
    long = {f"{path}:{name}": size for path, text in files() for name, size in functions(text) if size > LINES_OF_CODE}
    assert not long, long


def test_files_are_short() -> None:
    long = {path: size for path, text in files() if (size := len(text.splitlines())) > LINES}
    assert not long, long
