"""What a function of a layer file uses besides its arguments and torch: a trace would see it once, and keep that.

    outside_read(function) -> str        the first such name, as the text has it; "" if there is none

Constants of the file count as its text. What it calls of its own file is looked through too.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

import torch

PURE = (
    "abs", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "map", "max", "min", "range",
    "reversed", "slice", "sorted", "str", "sum", "tuple", "zip", "False", "None", "True",
)  # fmt: skip
CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def outside_read(function: Callable[..., Any]) -> str:
    """OSError if its text is not to be had."""
    seen: set[str] = set()
    waiting = [function]
    while waiting:
        one = waiting.pop()
        seen.add(one.__name__)
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        for name in _names(tree):
            value = one.__globals__.get(name, None)
            if inspect.isfunction(value) and value.__globals__ is one.__globals__:
                waiting += [value] if name not in seen else []
            elif not _is_known(name, value, name in one.__globals__):
                return name
    return ""


def _is_known(name: str, value: Any, of_file: bool) -> bool:
    if not of_file:
        return name in PURE
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, CONSTANTS) for one in values) or value in (torch, math, torch.ops.aten)


def _names(tree: ast.AST) -> list[str]:
    """Those that are read and not set in it; what it imports, and what it sets elsewhere."""
    nodes = list(ast.walk(tree))
    there = {node.arg for node in nodes if isinstance(node, ast.arg)}
    there |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    there |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ExceptHandler)) and node.name}
    elsewhere = [name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names]
    imports = [one.name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for one in node.names]
    read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return [f"global {name}" for name in elsewhere] + [f"import {name}" for name in imports] + [
        name for name in read if name not in there
    ]  # fmt: skip
