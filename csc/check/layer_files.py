"""The layer files of a large program and those of a shallow one, beside each other.

Terms
  the same     two files that do the same: their Python is equal but for comments and for what their docstring counts
  of a kind    two files of one name whose first region is the same: what one does, the other is to do

    install_alike(files, directory) -> names       put files in place of those of a kind that are not the same
    not_the_same(files, directory) -> names        of files that have none that is the same
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Set
from pathlib import Path

TABLES = "layers/tables.py"


def install_alike(files: Mapping[str, bytes], directory: Path) -> tuple[str, ...]:
    """files: by their paths in a program's directory; directory: of the shallow program."""
    found = []
    for name, text in _layers(files).items():
        file = directory / name
        if name == TABLES or not file.is_file():
            continue
        own = file.read_bytes()
        if _code(own) != _code(text) and _first_region(own) == _first_region(text) != "":
            file.write_bytes(text)
            found.append(name)
    return tuple(found)


def not_the_same(files: Mapping[str, bytes], directory: Path) -> tuple[str, ...]:
    """Of tables, which each stage has some of, every line is to stand in the shallow program's."""
    own = {file.relative_to(directory).as_posix(): file.read_bytes() for file in (directory / "layers").glob("*.py")}
    codes, lines = {_code(text) for text in own.values()}, _lines(own.get(TABLES, b""))
    return tuple(
        name for name, text in _layers(files).items()
        if _code(text) not in codes and not (name == TABLES and _lines(text) <= lines)
    )  # fmt: skip


def _layers(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: text for name, text in sorted(files.items()) if name.startswith("layers/") and name.endswith(".py")}


def _code(text: bytes) -> str:
    tree = ast.parse(text)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.dump(tree)


def _lines(text: bytes) -> set[str]:
    """What each assignment says; one that calls a function of the file says nothing that is not said there."""
    tree = ast.parse(text)
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assignments = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    return {ast.dump(node) for node in assignments if not _calls(node.value, own)}


def _calls(value: ast.expr, functions: Set[str]) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in functions


def _first_region(text: bytes) -> str:
    found = re.search(r"^Regions +(\S+)", ast.get_docstring(ast.parse(text)) or "", re.MULTILINE)
    return found[1].rstrip(",") if found else ""
