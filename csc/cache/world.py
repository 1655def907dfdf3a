"""What lies outside of a process or changes by itself: the environment, files, the clock, random numbers.

Code that asks for it gives one program now and another at the next start, whatever is written in the code. A module
of Python's library counts as the world unless it is in PURE.

    asked(value) -> "os.environ" | ""                            asked_of(module, names) -> "time" | ""
"""

from __future__ import annotations

import sys
from collections.abc import Set
from pathlib import PurePath
from types import ModuleType
from typing import Any

from csc import devices

PURE = {
    "__future__", "_abc", "_collections", "_collections_abc", "_functools", "_operator", "_struct", "_warnings",
    "_weakref", "_weakrefset", "abc", "array", "bisect", "builtins", "cmath", "collections", "colorsys", "contextlib",
    "contextvars", "copy", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "inspect", "itertools",
    "json", "keyword", "logging", "math", "numbers", "operator", "pprint", "re", "reprlib", "statistics", "string",
    "struct", "textwrap", "traceback", "types", "typing", "unicodedata", "warnings", "weakref",
}  # fmt: skip
OF_SYS = {"byteorder", "float_info", "hexversion", "implementation", "maxsize", "platform", "version_info"}
BUILTINS = {"open", "input", "globals", "locals", "eval", "exec", "compile", "__import__", "breakpoint"}
ATTRIBUTES = {"read_text", "read_bytes", "open", "exists", "is_file", "iterdir"}  # of files and paths
READERS = {"load_file", "safe_open", "fromfile", "loadtxt", "genfromtxt", "memmap", "imread", "read_csv", "from_file"}
MODULES = {"torch.random", "torch.distributed", "torch.hub", "numpy.random"}
OF_MODULES = {
    "torch": {"load", "initial_seed", "seed", "get_rng_state", "get_num_threads", "get_num_interop_threads"},
    **devices.ASKED,
    "torch.jit": {"load"},
    "numpy": {"load"},
}  # what these modules say of the world


def asked(value: Any) -> str:
    """What of the world a function, class or object is; "" for nothing."""
    if isinstance(value, PurePath):
        return "a path"
    named = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
    name = getattr(value, "__qualname__", None)
    if not isinstance(named, str) or not isinstance(name, str):
        named, name = type(value).__module__, type(value).__qualname__
    if _outside(named) or name in OF_MODULES.get(named, ()) or (name in READERS and callable(value)):
        return f"{named}.{name}"
    return ""


def asked_of(module: ModuleType, names: Set[str]) -> str:
    """What of the world code may ask a module for that uses these names; "" for nothing."""
    found = module.__name__
    if found == "sys":
        return ", ".join(f"sys.{name}" for name in sorted(names & vars(sys).keys() - OF_SYS))
    if _outside(found) or found in MODULES:
        return found
    asking = names & (OF_MODULES.get(found, set()) | READERS) & vars(module).keys()
    return ", ".join(f"{found}.{name}" for name in sorted(asking))


def _outside(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in PURE and top != "sys"
