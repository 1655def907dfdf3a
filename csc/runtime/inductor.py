"""The functions of the templates compiled by Inductor, from the text of the layer files.

Terms: a *template function* is one of FUNCTIONS in layers/NAME.py. Compiled, it is called as before, so rank files know
nothing of it; equal layers, microbatches and ranks of a process share it.

    fused_functions(package, device, folder, later) -> [Fused]    in place of those of an imported program's layer files
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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from csc.runtime.compiled_function import MISSING, CompiledFunction, KeptFunction
from csc.runtime.flat_tensors import layouts_of, structure_of, tensors_of
from csc.runtime.function_order import FunctionOrder, code
from csc.runtime.outside_reads import outside_read
from csc.runtime.tried_function import tried

log = logging.getLogger("csc")

FUNCTIONS = ("forward", "backward_input", "backward_weight", "backward")
LAYOUTS = 8  # of the arguments of one function: what comes with more is run as it is
Layouts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
COMPILED, KEPT, AS_IT_IS = "compiled", "found in the cache", "runs as it is"


@dataclass(frozen=True)
class FusedRow:
    """A function for layouts of its arguments. how: COMPILED by this start, KEPT, AS_IT_IS; seconds: that its
    compilation took, whenever that was; why: it runs as it is.
    """

    name: str
    how: str
    seconds: float
    why: str = ""


def fused_functions(package: str, device: torch.device, folder: Path, later: bool = False) -> list[Fused]:
    """The template functions of a program, each compiled when it is first called; later: found if they are kept, once
    they are switched on. folder: where what is made is kept, and taken from.

    Without a C++ compiler for a CPU nothing changes, but for a sentence in the log.
    """
    lacks = _lacks(device)
    if lacks:
        log.warning("fuse: the functions run as they are: %s", lacks)
        return []
    start = f"{package}.layers."
    found = []
    for name, module in sorted(sys.modules.items()):
        if name.startswith(start) and name != f"{start}tables":
            found += _fused(module, folder, later)
    return found


def host_compiler() -> str | None:
    """Its path."""
    names = (os.environ.get("CXX") or "g++", "g++", "clang++", "clang")
    return next(filter(None, map(shutil.which, names)), None)


def _lacks(device: torch.device) -> str:
    """What Inductor would need and is not there; empty if it has all."""
    if device.type != "cpu" or host_compiler() is not None:
        return ""
    return "there is no C++ compiler on this machine; install g++ or clang, or set CXX to one"


def _fused(module: ModuleType, folder: Path, later: bool) -> list[Fused]:
    text, found = "", []
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        if not inspect.isfunction(function):  # not there, or done
            continue
        shown = f"{module.__name__.rpartition('.')[2]}.{name}"
        text = text or code(Path(function.__code__.co_filename).read_text())
        try:
            fused = Fused(shown, function, text, folder, later)
        except ValueError as error:
            log.warning("fuse: %s runs as it is: %s", shown, error)
            continue
        setattr(module, name, fused)
        found.append(fused)
    return found


class Fused:
    """A template function that is compiled for the layouts of its first call, and for others that come. ValueError if
    `w` is used otherwise than by names in the text, which could not be told from outside; or something else than
    arguments and torch is, which would be compiled as it was then.

    text: of its file, as csc.runtime.function_order gives it. later: it is never compiled by its calls: what is kept is
    used, where it was tried beside the function as it is, and once `on`. differs: in what those do that were not near
    enough. ordered: keys that were compiled for it ahead, by this start. rows: what has become of it.
    """

    def __init__(self, name: str, function: Callable[..., Any], text: str, folder: Path, later: bool = False) -> None:
        self.name, self.plain, self.on = name, function, not later
        self.rows: list[FusedRow] = []
        self.differs: list[str] = []
        self._tries = False
        self.ordered: set[str] = set()
        self._text, self._folder, self._later = text, folder, later
        outside = outside_read(function)
        if outside:
            raise ValueError(f"it uses {outside}, and is compiled for arguments and torch alone")
        self._names = _read_of_w(function)
        self._place = list(inspect.signature(function).parameters).index("w") if self._names else -1
        self._known: dict[Layouts, CompiledFunction | None] = {}
        self._watch: _Watch | None = None

    def __call__(self, *given: Any) -> Any:
        if not self.on and not self._tries and self._watch is None:
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
        if self._watch is not None:
            return self._watch.call(self, layouts, given, tensors)
        if self._tries:
            return self._try(layouts, given, tensors)
        if layouts not in self._known and self._later:
            return self.plain(*given)
        if layouts not in self._known:
            self._known[layouts] = self._first(given, tensors) if len(self._known) < LAYOUTS else None
        compiled = self._known[layouts]
        return self.plain(*given) if compiled is None else compiled(tensors)

    def tries(self, tries: bool) -> None:
        """Whether it runs as it is, with what is kept beside it at the first call with certain layouts."""
        self._tries = tries

    def _try(self, layouts: Layouts, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        if layouts in self._known or len(self._known) == LAYOUTS:
            return self.plain(*given)
        compiled = self._known[layouts] = self._first(given, tensors)
        if compiled is None:
            return self.plain(*given)
        results, why = tried(self.plain, given, compiled, tensors)
        if why:
            self.differs.append(f"{self.name}: {why}")
        return results

    def _first(self, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> CompiledFunction | None:
        """Compile, or find what is kept; None for what cannot be compiled, which runs as it is from here on."""
        start = time.perf_counter()
        kept = self.kept(given, tensors)
        try:
            if self._later:
                there = kept.read()
                found, was_kept = (None, True) if there is MISSING else (there, True)
            else:
                found, was_kept = kept.made(self.plain, given)
        except Exception as error:  # of whatever stands in the file; run as it is, its own errors come again
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            log.warning("fuse: %s runs as it is: %s", self.name, reason)
            self.rows.append(FusedRow(self.name, AS_IT_IS, 0.0, reason))
            return None
        if found is not None:
            how = KEPT if was_kept and kept.key not in self.ordered else COMPILED
            self.rows.append(FusedRow(self.name, how, found.seconds))
            log.info("fuse: %s %s in %.2f s", self.name, how, found.seconds if how == COMPILED else _since(start))
        return found

    def watch(self, repeats: bool) -> None:
        """From now on it runs as it is, and what it is called with is noted. repeats: every call runs; else one of each
        kind does, on tensors without values, and others are given the same results.
        """
        self._watch = _Watch(repeats)

    def watched(self) -> list[FunctionOrder]:
        """What has been noted. It is no longer watched."""
        watch, self._watch = self._watch, None
        return [FunctionOrder.of(self.plain, kept) for kept, _ in watch.seen.values()] if watch is not None else []

    def kept(self, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> KeptFunction:
        """For such arguments."""
        return KeptFunction(self.plain.__name__, self._text, structure_of(given), layouts_of(tensors), self._folder)


def _since(start: float) -> float:
    return time.perf_counter() - start


class _Watch:
    def __init__(self, repeats: bool) -> None:
        self._repeats = repeats
        self.seen: dict[Layouts, tuple[KeptFunction, Any]] = {}  # and its results, unless calls are repeated

    def call(self, function: Fused, layouts: Layouts, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        if layouts in self.seen and not self._repeats:
            return self.seen[layouts][1]
        results = function.plain(*given)
        if layouts not in self.seen and len(self.seen) < LAYOUTS:
            self.seen[layouts] = function.kept(given, tensors), None if self._repeats else results
        return results


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
