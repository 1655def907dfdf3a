"""Symbolic sizes: what a trace makes of them, asks of them, and assumes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as size_config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy import functions as size_functions

__all__ = ["GuardOnDataDependentSymNode"]  # of torch, as they are

# Functions of whole numbers that sizes are made of, beside sympy's own.
SIZE_FUNCTIONS = {
    name: getattr(size_functions, name)
    for name in ("CleanDiv", "FloorDiv", "Max", "Min", "Mod", "ModularIndexing", "PythonMod")
}
DIVISIBLE = 2**33 * 3**6 * 5**3 * 7**2 * 11 * 13  # by most numbers of patches, frames and tokens that models have
TORCH = f"{torch.__path__[0]}{os.sep}"
SYMBOLS = (
    os.path.join(TORCH, "fx", "experimental", ""),
    os.path.join(TORCH, "__init__.py"),
    os.path.join(os.path.dirname(__file__), ""),  # csc's own way to symbols
)
MODULES = (os.path.join(TORCH, "nn", ""), os.path.join(TORCH, "functional.py"))


def assume_several(size: Any) -> None:
    """Let a trace take a size that depends on values (a selection by a mask) for no special case: not 0, not 1, and not
    the largest that there is, since torch fails where a bound is no multiple of what a size turns out to be one of.
    """
    if isinstance(size, torch.SymInt) and not size.node.has_hint():
        torch._check(size >= 2)
        torch._check(size <= DIVISIBLE)


def assume_as_many(size: Any, other: Any) -> None:
    """Let a trace take two sizes, of which one depends on values, for equal; it ends the run where they are not."""
    if any(isinstance(one, torch.SymInt) and not one.node.has_hint() for one in (size, other)):
        torch._check(size == other)


def hint(size: Any) -> int | None:
    """What a symbolic size is in the batch that is traced; None for a plain number, and where only values tell."""
    return size.node.hint if isinstance(size, torch.SymInt) and size.node.has_hint() else None


def symbols_of(size: Any) -> frozenset[str]:
    """The names of the symbols that a symbolic size is computed from; of anything else there are none."""
    return frozenset(map(str, size.node.expr.free_symbols)) if isinstance(size, torch.SymInt) else frozenset()


def as_hinted(size: Any) -> int | None:
    """A size in the batch that is traced; None where only values tell."""
    return hint(size) if isinstance(size, torch.SymInt) else int(size)


@contextmanager
def one_is_no_special_size(wanted: bool = True) -> Iterator[None]:
    """Traces in it make a symbol of a size of 1 too, and torch's own code takes symbols for neither 0 nor 1 without
    making that a condition. wanted: False for traces as torch makes them by default.
    """
    with size_config.patch(backed_size_oblivious=wanted):  # type: ignore[attr-defined]
        yield


@contextmanager
def conditions_of_models(found: Callable[[Any, dict[Any, int]], None]) -> Iterator[None]:
    """In it, found(condition, sizes) is called for each condition on sizes that a model makes: a sympy relation that a
    trace has, or the least value of a symbol, since code asked for it that is no part of torch's own way through an
    operation. sizes: of its symbols, in the batch that is traced. What it raises ends the trace.
    """
    own = ShapeEnv.evaluate_expr

    def evaluate(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        if not _in_model_code(sys._getframe(1)):
            return own(self, *args, **kwargs)
        before, least = set(map(id, _conditions(self))), _least(self)
        result = own(self, *args, **kwargs)
        made = [condition.expr for condition in _conditions(self) if id(condition) not in before]
        made += [sympy.Ge(symbol, low) for symbol, low in _least(self).items() if low != least.get(symbol)]
        for condition in made:
            hints = {symbol: self.size_hint(symbol, allow_none=True) for symbol in condition.free_symbols}
            found(condition, {symbol: int(size) for symbol, size in hints.items() if size is not None})
        return result

    with patch.object(ShapeEnv, "evaluate_expr", evaluate):
        yield


def _conditions(environment: ShapeEnv) -> list[Any]:
    """Those that were checked while it traced, and those that export would check at run time."""
    deferred = environment.deferred_runtime_asserts.values()
    return [*environment.guards, *(one for several in deferred for one in several)]


def _least(environment: ShapeEnv) -> dict[Any, Any]:
    """The least value of each symbol."""
    return {symbol: found.lower for symbol, found in environment.var_to_range.items()}


def _in_model_code(frame: Any) -> bool:
    """Whether symbols are asked from a frame that is not in torch, or in the code of its modules."""
    while frame is not None and frame.f_code.co_filename.startswith(SYMBOLS):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return not name.startswith(TORCH) or name.startswith(MODULES)


def assumed_of_sizes(mode: FakeTensorMode) -> tuple[dict[str, tuple[int, int | None]], list[Any]]:
    """What a graph that export traced in this mode assumes of its symbols: least and largest values (None: no limit),
    and sympy relations between them.

    Export specialises in silence where a model counts with a size in Python; what it then assumed is in the ranges of
    symbols, in symbols replaced by others, and in conditions that it would have checked at run time.
    """
    environment = mode.shape_env
    if environment is None:
        return {}, []
    ranges = {
        str(symbol): (int(found.lower), int(found.upper) if found.upper.is_Integer else None)
        for symbol, found in environment.var_to_range.items()
        if found.is_int and found.lower.is_Integer
    }
    relations = [condition.expr for condition in _conditions(environment)]
    relations += [sympy.Eq(symbol, other) for symbol, other in environment.replacements.items()]
    return ranges, relations
