"""`len(x)` of a tensor in the model's code, as `x.shape[0]` is in a trace: a number that may vary.

Python's `len` gives a plain number, so a trace would be for that number of samples. While a model is traced its code
finds a `len` of this file instead, among the globals of the files that its classes are from, and of those whose
functions these have. torch's own code does not, nor csc's.

    with symbolic_lengths(model) as asked: ...        asked(): whether any length was symbolic
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

NAME = "len"
APART = ("torch", "csc")  # their code needs plain numbers


@contextmanager
def symbolic_lengths(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """See the module. A file with a `len` of its own keeps it."""
    asked = [False]

    def length(of: Any) -> Any:
        if isinstance(of, torch.Tensor) and of.dim() and isinstance(of.shape[0], torch.SymInt):
            asked[0] = True
            return of.shape[0]
        return builtins.len(of)

    with ExitStack() as stack:
        for names in _globals_of(model):
            if NAME not in names:
                names[NAME] = length
                stack.callback(names.pop, NAME)
        yield lambda: asked[0]


def _globals_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Of the code of the model, each once."""
    seen: set[int] = set()
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    written = [inspect.unwrap(one) for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
    for function in filter(_is_own, written):
        for other in (function, *filter(_is_own, function.__globals__.values())):
            if id(other.__globals__) not in seen:
                seen.add(id(other.__globals__))
                yield other.__globals__


def _is_own(one: Any) -> bool:
    """Whether it is a function of Python code that is neither torch's nor csc's."""
    if not isinstance(one, FunctionType):
        return False
    return str(one.__globals__.get("__name__", "")).partition(".")[0] not in APART
