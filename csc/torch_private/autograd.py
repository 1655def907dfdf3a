"""Autograd within operators, and torch.autograd.Function with its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.utils import checkpoint as checkpoints

__all__ = ["FunctionCtx"]  # of torch, as they are


def below_autograd() -> Any:
    """A context in which operators run without asking autograd, as `no_grad` does each time: what needs it fails."""
    return torch._C._AutoDispatchBelowAutograd()


@contextmanager
def under_autograd() -> Iterator[None]:
    """Autograd records what runs in it, also within an operator, where it is switched off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


@contextmanager
def applied_functions(applied: Callable[[Any, Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """While it lasts, `Function.apply(*args)` is what applied(cls, own, args, kwargs) gives; own: what it is otherwise.

    Also of an `apply` that was bound before, as in `reverse = Reverse.apply`: it asks the class above Function.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(cls, super(_SingleLevelFunction, cls).apply, args, kwargs)

    assert "apply" not in vars(_SingleLevelFunction)
    base: Any = _SingleLevelFunction
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


def has_setup(function: Any) -> bool:
    """Whether a torch.autograd.Function fills its context in `setup_context`, not in `forward`."""
    return function.setup_context is not _SingleLevelFunction.setup_context


def backward_of(function: Any) -> Callable[..., Any]:
    """A torch.autograd.Function's backward, which may be called `vjp`."""
    if function.vjp is not _SingleLevelFunction.vjp:
        return function.vjp
    return function.backward


def is_reentrant_checkpoint(function: Any) -> bool:
    """Whether it is what `torch.utils.checkpoint` applies with use_reentrant=True, to (function, preserve, *args)."""
    return function is checkpoints.CheckpointFunction


def is_of_torch(function: Any) -> bool:
    """Whether torch applies a torch.autograd.Function for something that a trace keeps whole (custom and higher-order
    operators), or only to note what a checkpoint is given. Those that it makes of a model's own for vmap are not.
    """
    home = function.__module__
    return home == checkpoints.__name__ or (home.startswith("torch._") and home != "torch._functorch.autograd_function")
