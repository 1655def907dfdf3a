"""Where code comes from: Python, torch and other libraries; an installed distribution; or files of the user's.

Terms
  own      of the model or of the libraries that define models: not torch's, the standard library's, nor LIBRARIES'
  users    own, and in no folder where an installer put it: what is cloned or installed as editable is the user's too
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from csc.capture.dedup.equality import LIBRARIES


@cache
def distribution(path: str) -> str:
    """`name-version` of the installed distribution that a file belongs to, in site-packages or another folder (`pip
    install --target`); "" for files of the user's.
    """
    if not os.path.isabs(path):
        return ""
    for file in dict.fromkeys((Path(path), Path(path).resolve())):
        for folder in file.parents:
            first = file.relative_to(folder).parts[0]
            if name := installed_in(folder).get(inspect.getmodulename(first) or first, ""):
                return name
    return ""


@cache
def installed_in(folder: Path) -> dict[str, str]:
    """`name-version` of what an installer put into a folder, by what can be imported of it."""
    found: dict[str, str] = {}
    for about in sorted(folder.glob("*.dist-info"), reverse=True):
        declared, record = about / "top_level.txt", about / "RECORD"
        if declared.is_file() and (names := set(declared.read_text().split())):
            found |= dict.fromkeys(names, about.stem)
        elif record.is_file():  # to make a path of each file takes a tenth of a second
            lines = record.read_text().splitlines()
            parts = {line.partition(",")[0].strip('"').partition("/")[:2] for line in lines}
            names = {first if inside else inspect.getmodulename(first) or "" for first, inside in parts}
            found |= dict.fromkeys((name for name in names if name and "." not in name), about.stem)
    return found


def is_own(module: Any) -> bool:
    """Whether a Python module of this name is; one that has no name is."""
    return str(module).partition(".")[0] not in LIBRARIES and module != "builtins"


def is_source(path: str) -> bool:
    """Whether a path is that of a Python file that is there."""
    return path.endswith(".py") and (bool(distribution(path)) or os.path.isfile(path))  # the first is remembered


def module_of(kind: type) -> str:
    """The module of a class; "builtins" for one that has an attribute of its own by that name, as Cython's have."""
    return kind.__module__ if isinstance(kind.__module__, str) else "builtins"


def file_of(kind: type) -> str:
    """The source file of a class; "" for one of C or of none."""
    path = getattr(sys.modules.get(module_of(kind)), "__file__", None) or ""
    return path if is_source(path) else ""


def home_of(function: FunctionType) -> Any:
    """The module whose globals a function reads: a decorator may give it the name of another one."""
    return function.__globals__.get("__name__", "")


def is_users(value: Any) -> bool:
    """Whether a function is, or a class, a Python module, the class of an object. A function of no file, which a
    decorator wrote, say, is as the module whose globals it reads.
    """
    if isinstance(value, FunctionType):
        path, home = value.__code__.co_filename, home_of(value)
        path = path if is_source(path) else getattr(sys.modules.get(str(home)), "__file__", None) or ""
        return is_own(home) and not distribution(path)
    if isinstance(value, ModuleType):
        return is_own(value.__name__) and not distribution(getattr(value, "__file__", None) or "")
    kind = value if isinstance(value, type) else type(value)
    return is_own(module_of(kind)) and bool(path := file_of(kind)) and not distribution(path)
