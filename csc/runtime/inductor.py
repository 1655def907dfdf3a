"""The functions of the templates compiled by Inductor, from the text of the layer files.

Terms: a *template function* is one of forward, backward_input, backward_weight in layers/NAME.py. Compiled, it is
called as before, so rank files know nothing of it; equal layers, microbatches and ranks of a process share it.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger("csc")

FUNCTIONS = ("forward", "backward_input", "backward_weight")
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
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


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """What torch compiles meanwhile is kept there. The user's own compilations stay where they are."""
    before = os.environ.get(FOLDER)
    if folder is not None:
        os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        if folder is not None and before is None:
            os.environ.pop(FOLDER, None)
        elif before is not None:
            os.environ[FOLDER] = before


def _fuse(module: ModuleType, calls: int, folder: Path | None) -> None:
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        if not inspect.isfunction(function):  # not there, or done
            continue
        shown = f"{module.__name__.rpartition('.')[2]}.{name}"
        try:
            setattr(module, name, Fused(shown, function, calls, folder))
        except ValueError as error:
            log.warning("fuse: %s runs as it is: %s", shown, error)


class Fused:
    """A template function that is compiled for the sizes of its first call. ValueError if `w` is used otherwise than by
    names in the text: those could not be told from outside.
    """

    def __init__(self, name: str, function: Callable[..., Any], calls: int, folder: Path | None) -> None:
        self.name, self.folder = name, folder
        self.plain = function
        self.calls = calls  # to run as it is before it is compiled
        self._names = _read_of_w(function)
        self._place = list(inspect.signature(function).parameters).index("w") if self._names else -1
        self._compiled: Callable[..., Any] | None = torch.compile(function, fullgraph=True, dynamic=False)
        self._is_new = True

    def __call__(self, *given: Any) -> Any:
        if self.calls or self._compiled is None:
            self.calls = max(0, self.calls - 1)
            return self.plain(*given)
        if self._place >= 0:
            w: Mapping[str, torch.Tensor] = given[self._place]
            own = {name: w[name] for name in self._names}
            given = (*given[: self._place], own, *given[self._place + 1 :])
        return self._first(given) if self._is_new else self._compiled(*given)

    def _first(self, given: tuple[Any, ...]) -> Any:
        """Compile, and run; what cannot be compiled runs as it is from here on."""
        from csc.torch_private.processes import compiler_errors

        assert self._compiled is not None
        start = time.perf_counter()
        try:
            with _kept_in(self.folder):
                found = self._compiled(*given)
        except compiler_errors() as error:
            self._compiled = None
            reason = str(error).strip().partition("\n")[0]
            log.warning("fuse: %s runs as it is: %s: %s", self.name, type(error).__name__, reason)
            return self.plain(*given)
        self._is_new = False
        log.info("fuse: %s compiled in %.1f s", self.name, time.perf_counter() - start)
        return found


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
