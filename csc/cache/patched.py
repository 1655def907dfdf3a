"""Functions and classes of torch, of Python and of other distributions that somebody has put others in place of.

patched(describer) -> tree       of what is there now, under which name; own code among it is described
"""

from __future__ import annotations

import builtins
import hashlib
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from csc.cache.class_sources import functions_of, is_own_class, is_own_function, is_put_there, torch_folder
from csc.cache.describe import Describer
from csc.torch_private.traces import modes_that_are_on

SPACES: tuple[Any, ...] = (
    builtins, torch, torch.Tensor, torch.fft, torch.linalg, torch.special, torch.nn.attention, nn.functional, nn.init,
)  # fmt: skip


def patched(describer: Describer) -> Any:
    """Names in torch's own modules with what they stand for; elsewhere, own functions among installed ones."""
    names: list[str] = []
    own: list[Any] = []
    for space in SPACES:
        for name, value in list(vars(space).items()):
            if isinstance(value, ModuleType) or (name.startswith("__") and name.endswith("__") and not callable(value)):
                continue
            stands_for = getattr(value, "__qualname__", None)
            if isinstance(stands_for, str):
                names.append(f"{name} {stands_for}")
            found = [one for one in functions_of(value) if not one.__code__.co_filename.startswith(torch_folder())]
            for one in (*found, *([value] if is_put_there(value) else [])):
                own.append([name, describer.tree(one, f"{space.__name__}.{name}")])
    for mode in modes_that_are_on():
        if is_own_class(type(mode)):
            own.append(["mode", describer.tree(mode, "a mode that is on")])
    for module, name, function in _put_into_others():
        own.append([module, name, describer.tree(function, f"{module}.{name}")])
    return [hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest(), own]


def _put_into_others() -> Iterator[tuple[str, str, FunctionType]]:
    """Own functions that stand in modules of transformers and PEFT."""
    for place in sorted(sys.modules):
        if place.partition(".")[0] in ("transformers", "peft"):
            installed = getattr(sys.modules[place], "__file__", None)
            for name, value in list(vars(sys.modules[place]).items()):
                if type(value) is FunctionType and value.__code__.co_filename != installed and is_own_function(value):
                    yield place, name, value
