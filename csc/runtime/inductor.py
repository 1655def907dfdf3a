"""The functions of the templates compiled by Inductor, from the text of the layer files.

Terms: a *template function* is one of FUNCTIONS in layers/NAME.py. Compiled, it is called as before, so rank files know
nothing of it; equal layers, microbatches and ranks of a process share it.

    fuse(package, device, later, folder)    replaces the functions of an imported program's layer files, once
    host_compiler()                         the C++ compiler that Inductor finds; None if there is none

`w`, the parameters of a region, is handed on as a plain dict of the names that the function's text reads: what is
compiled depends on no region's place in the model. What Inductor does not take runs as it is, and the log says why.
"""

from __future__ import annotations

import ast
import inspect
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from csc.runtime.flat_tensors import tensors_of

if TYPE_CHECKING:
    from csc.runtime.compiled_function import CompiledFunction

log = logging.getLogger("csc")

FUNCTIONS = ("forward", "backward_input", "backward_weight", "backward")
LAYOUTS = 8  # of the arguments of one function: what comes with more is run as it is
Layouts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
CALLS = 64  # of a function for sizes that came later, before it is compiled: a step does not wait for what comes once


def fuse(package: str, device: torch.device, later: bool = False, folder: Path | None = None) -> None:
    """Compile the template functions of a program when they are first called; later: once they were called often.
    folder: where what is made is kept, and taken from; None: where torch keeps what it compiles.

    Without a C++ compiler for a CPU nothing changes, but for a sentence in the log.
    """
    lacks = _lacks(device)
    if lacks:
        log.warning("fuse: the functions run as they are: %s", lacks)
        return
    start = f"{package}.layers."
    for name, module in sorted(sys.modules.items()):
        if name.startswith(start) and name != f"{start}tables":
            _fuse(module, CALLS if later else 0, folder)


def host_compiler() -> str | None:
    """Its path."""
    names = (os.environ.get("CXX") or "g++", "g++", "clang++", "clang")
    return next(filter(None, map(shutil.which, names)), None)


def _lacks(device: torch.device) -> str:
    """What Inductor would need and is not there; empty if it has all."""
    if device.type != "cpu" or host_compiler() is not None:
        return ""
    return "there is no C++ compiler on this machine; install g++ or clang, or set CXX to one"


def _fuse(module: ModuleType, calls: int, folder: Path | None) -> None:
    text = ""
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        if not inspect.isfunction(function):  # not there, or done
            continue
        shown = f"{module.__name__.rpartition('.')[2]}.{name}"
        text = text or _code(Path(function.__code__.co_filename).read_text())
        try:
            setattr(module, name, Fused(shown, function, text, calls, folder))
        except ValueError as error:
            log.warning("fuse: %s runs as it is: %s", shown, error)


class Fused:
    """A template function that is compiled for the layouts of its first call, and for others that come. ValueError if
    `w` is used otherwise than by names in the text: those could not be told from outside.

    text: of its file, as `_code` gives it. calls: to run as it is before it is compiled.
    """

    def __init__(self, name: str, function: Callable[..., Any], text: str, calls: int, folder: Path | None) -> None:
        self.name, self.plain, self.calls = name, function, calls
        self._text, self._folder = text, folder
        self._names = _read_of_w(function)
        self._place = list(inspect.signature(function).parameters).index("w") if self._names else -1
        self._known: dict[Layouts, CompiledFunction | None] = {}

    def __call__(self, *given: Any) -> Any:
        if self.calls:
            self.calls -= 1
            return self.plain(*given)
        if self._place >= 0:
            w: Mapping[str, torch.Tensor] = given[self._place]
            own = {name: w[name] for name in self._names}
            given = (*given[: self._place], own, *given[self._place + 1 :])
        try:
            tensors = tensors_of(given)
        except TypeError:  # an edited file may hand on anything
            return self.plain(*given)
        layouts = tuple([(one.shape, one.stride(), one.dtype) for one in tensors])
        if layouts not in self._known:
            self._known[layouts] = self._first(given) if len(self._known) < LAYOUTS else None
        compiled = self._known[layouts]
        return self.plain(*given) if compiled is None else compiled(tensors)

    def _first(self, given: tuple[Any, ...]) -> CompiledFunction | None:
        """Compile, or find what is kept; None for what cannot be compiled, which runs as it is from here on."""
        from csc.runtime.compiled_function import compiled_function  # which imports what only compilers need

        start = time.perf_counter()
        try:
            found, was_kept = compiled_function(self.plain, self._text, given, self._folder)
        except Exception as error:  # of whatever stands in the file; run as it is, its own errors come again
            reason = str(error).strip().partition("\n")[0]
            log.warning("fuse: %s runs as it is: %s: %s", self.name, type(error).__name__, reason)
            return None
        how = "found in the cache" if was_kept else "compiled"
        log.info("fuse: %s %s in %.2f s", self.name, how, time.perf_counter() - start)
        return found


def _code(text: str) -> str:
    """A file's Python without comments and what its docstring says of a program: the same for any number of layers."""
    tree = ast.parse(text)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.dump(tree)


def _read_of_w(function: Callable[..., Any]) -> list[str]:
    """The names under which a function's text reads parameters, `w["name"]`."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    reads = [
        node for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "w"
    ]  # fmt: skip
    names = [node.slice.value for node in reads if isinstance(node.slice, ast.Constant)]
    uses = sum(isinstance(node, ast.Name) and node.id == "w" for node in nodes)
    if uses != len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError('it uses w otherwise than as w["name"]')
    return sorted(set(map(str, names)))
