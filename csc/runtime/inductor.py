"""The functions of the templates compiled by Inductor, from the text of the layer files.

Terms: a *template function* is one of FUNCTIONS in layers/NAME.py. Compiled, it is called as before, so rank files know
nothing of it; equal layers, microbatches and ranks of a process share it.

    fused_functions(package, folder) -> [Fused]         in place of those of an imported program's layer files
    lacks(device) -> str                    what Inductor would need on this machine and is not there
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from csc.runtime.compiled_function import MISSING, CompiledFunction, KeptFunction
from csc.runtime.flat_tensors import Layout, empty_as, layouts_of, nesting, structure_of, tensors_of
from csc.runtime.function_order import FunctionOrder, code, form_of
from csc.runtime.outside_reads import outside_read
from csc.runtime.tried_function import tried
from csc.runtime.weight_names import Under
from csc.torch_private.fast_guards import same_layouts

log = logging.getLogger("csc")

FUNCTIONS = ("forward", "backward_input", "backward_weight", "backward")
LAYOUTS = 8  # of the arguments of one function: what comes with more is run as it is
ALL = ""  # in place of a form
SEEN = 64  # layouts that are known at once, whatever runs with them
SHORT = 4  # of which are asked in C
Layouts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
COMPILED, KEPT, AS_IT_IS = "compiled", "found in the cache", "runs as it is"
OTHERS = "other layouts of its arguments came"


@dataclass(frozen=True)
class FusedRow:
    """A function for layouts of its arguments. how: COMPILED by this start, KEPT, AS_IT_IS; seconds: that its
    compilation took, whenever that was; why: it runs as it is; products: that oneDNN computes.
    """

    name: str
    how: str
    seconds: float
    why: str = ""
    products: int = 0


def fused_functions(package: str, folder: Path) -> list[Fused]:
    """The template functions of a program, which run as they are until they are switched on. folder: where what is made
    is kept, and taken from.
    """
    start = f"{package}.layers."
    found = []
    for name, module in sorted(sys.modules.items()):
        if name.startswith(start) and name != f"{start}tables":
            found += _fused(module, folder)
    return found


def host_compiler() -> str | None:
    """Its path."""
    names = (os.environ.get("CXX") or "g++", "g++", "clang++", "clang")
    return next(filter(None, map(shutil.which, names)), None)


def lacks(device: torch.device) -> str:
    """Empty if it has all."""
    if device.type != "cpu" or host_compiler() is not None:
        return ""
    return "there is no C++ compiler on this machine; install g++ or clang, or set CXX to one"


def _fused(module: ModuleType, folder: Path) -> list[Fused]:
    text, found = "", []
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        if not inspect.isfunction(function):  # not there, or done
            continue
        shown = f"{module.__name__.rpartition('.')[2]}.{name}"
        text = text or code(Path(function.__code__.co_filename).read_text())
        try:
            fused = Fused(shown, function, text, folder)
        except ValueError as error:
            log.warning("fuse: %s runs as it is: %s", shown, error)
            continue
        setattr(module, name, fused.call)
        found.append(fused)
    return found


class Fused:
    """A template function, and what stands for it with certain layouts of its arguments: nothing is compiled in a call.
    ValueError if `w` is used otherwise than by names in the text, which could not be told from outside; or something
    else than arguments and torch is, which would be compiled as it was then.

    text: of its file, as csc.runtime.function_order gives it. on: what was taken is used. differs: in what those do
    that were not near enough.
    """

    def __init__(self, name: str, function: Callable[..., Any], text: str, folder: Path) -> None:
        self.name, self.plain, self.on = name, function, False
        self._rows: dict[str, FusedRow] = {}  # by form
        self.differs: list[str] = []
        self._tries, self._tried = False, set[str]()
        self._text, self._folder = text, folder
        outside = outside_read(function)
        if outside:
            raise ValueError(f"it uses {outside}, and is compiled for arguments and torch alone")
        self._names = _read_of_w(function)
        self._place = list(inspect.signature(function).parameters).index("w") if self._names else -1
        self._taken: dict[str, CompiledFunction | None] = {}  # by form; None: computes nothing
        self._known: dict[Layouts, CompiledFunction | None] = {}  # as calls came
        self._short: dict[Layouts, tuple[int, Callable[..., bool], Callable[..., Any], Callable[..., Any]]] = {}
        self._watch: _Watch | None = None

    def call(self, *given: Any) -> Any:
        """What stands in the module, as a method: Python hands over the arguments of one, where it keeps those of an
        object that is called. So what F has kept and a rank file hands on is freed as soon as B has read it.
        """
        if self._short:
            tensors = self._flat(given)
            for count, are_these, code, nested in self._short.values():
                if len(tensors) == count and are_these(*tensors):
                    del given
                    return nested(code(tensors))
        return self._called(given)

    def _flat(self, given: tuple[Any, ...]) -> list[Any]:
        """The tensors, unless something is nested more deeply or is none: then it is in the list as it is."""
        found: list[Any] = []
        for one in given:
            kind = type(one)
            if kind is tuple:
                found += one
            elif kind is Under:
                found += one.several(self._names)
            else:
                found.append(one)
        return found

    def _called(self, given: tuple[Any, ...]) -> Any:
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
        try:
            compiled = self._known[layouts]
        except KeyError:
            if len(self._known) == SEEN:
                return self.plain(*given)
            compiled = self._known[layouts] = self._first(given, tensors)
        if compiled is None:
            return self.plain(*given)
        code = compiled.unwrapped.code
        if code is not None and len(self._short) < SHORT and layouts not in self._short:
            self._short[layouts] = len(tensors), same_layouts(tensors), code, compiled.nested
        return compiled.run(tensors)

    def _first(self, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> CompiledFunction | None:
        """What was taken for arguments like these."""
        layouts = layouts_of(tensors)
        form = form_of(structure_of(given), layouts)
        if form not in self._taken and ALL not in self._taken:
            others = ", ".join(f"{dtype} {sizes} {strides}" for dtype, _, sizes, strides in layouts)
            if not any(row.why == OTHERS for row in self.rows):
                log.warning("fuse: %s runs as it is with layouts that it was not compiled for", self.name)
            log.debug("fuse: %s was not compiled for %s", self.name, others)
            self._rows[form] = FusedRow(self.name, AS_IT_IS, 0.0, OTHERS)
        return self._taken.get(form)

    def tries(self, tries: bool) -> None:
        """Whether it runs as it is, with what was taken beside it at the first call with certain layouts."""
        self._tries = tries
        self._short.clear()

    def _try(self, layouts: Layouts, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        if layouts in self._known:
            return self.plain(*given)
        form = form_of(structure_of(given), layouts_of(tensors))
        compiled = self._taken.get(form)
        if compiled is None:
            return self.plain(*given)
        self._known[layouts] = compiled
        self._tried.add(form)
        results, why = tried(self.plain, given, compiled, tensors)
        if why:
            self.differs.append(f"{self.name}: {why}")
        return results

    def make(self, order: FunctionOrder, wait: bool) -> None:
        """Compile it in this process, unless it is kept. Without wait BeingMadeError if another process does. Any error
        of the trace or the compiler.
        """
        given = nesting(order.structure)(empty_as(order.layouts))
        self._ordered(order.structure, order.layouts).made(self.plain, given, wait)

    def take(self, order: FunctionOrder, how: str) -> str:
        """Use what is kept of this once it is switched on. Why not; "" if it is there."""
        try:
            found = self._ordered(order.structure, order.layouts).read()
        except Exception as error:  # of the folder, or of what is not torch's
            return f"{type(error).__name__}: {error}"
        if found is MISSING:
            return "what was compiled is not to be read"
        self._taken[order.form] = found
        if found is not None:
            self._rows[order.form] = FusedRow(self.name, how, found.seconds, products=found.products)
            log.info("fuse: %s %s%s", self.name, how, f" in {found.seconds:.2f} s" if how == COMPILED else "")
        return ""

    def refuse(self, form: str, why: str) -> bool:
        """Run as it is for arguments of this form, or of ALL, whatever was taken; whether it would not have."""
        if form in self._taken and self._taken[form] is None:
            return False
        self._taken[form] = None
        self._known.clear()
        self._short.clear()
        self._rows[form] = FusedRow(self.name, AS_IT_IS, 0.0, why)
        return True

    @property
    def untried(self) -> list[str]:
        """The forms of what was taken and has not been called beside the function as it is."""
        return [form for form, one in self._taken.items() if one is not None and form not in self._tried]

    @property
    def rows(self) -> list[FusedRow]:
        """What has become of it, for all forms."""
        return list(self._rows.values())

    def order(self, structure: Any, layouts: list[Layout]) -> FunctionOrder:
        """To have it compiled for these."""
        return FunctionOrder.of(self.plain, self._ordered(structure, layouts))

    def _ordered(self, structure: Any, layouts: list[Layout]) -> KeptFunction:
        return KeptFunction(self.plain.__name__, self._text, structure, layouts, self._folder)

    def watch(self, repeats: bool) -> None:
        """From now on it runs as it is, and what it is called with is noted. repeats: every call runs; else one of each
        kind does, on tensors without values, and others are given the same results.
        """
        self._watch = _Watch(repeats)
        self._short.clear()

    def watched(self) -> list[FunctionOrder]:
        """What has been noted. It is no longer watched."""
        watch, self._watch = self._watch, None
        return [FunctionOrder.of(self.plain, kept) for kept, _ in watch.seen.values()] if watch is not None else []

    def kept(self, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> KeptFunction:
        """For such arguments."""
        return self._ordered(structure_of(given), layouts_of(tensors))


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
