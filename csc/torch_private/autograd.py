"""Autograd within operators, and torch.autograd.Function with its backward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import Function, FunctionCtx, FunctionMeta, _SingleLevelFunction
from torch.utils import checkpoint as checkpoints

from csc.errors import InputError

__all__ = ["FunctionCtx"]  # of torch, as they are

Applied = Callable[[Any, Callable[..., Any], Any, Any], Any]
_APPLY_IS_PYTHON = isinstance(vars(Function)["apply"], classmethod)  # until torch 2.13


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


def applied_functions(applied: Applied) -> AbstractContextManager[None]:
    """While it lasts, `Function.apply(*args)` is what applied(cls, own, args, kwargs) gives; own: what it is otherwise.

    Also of an `apply` that was bound before, as in `reverse = Reverse.apply`.
    """
    return _above_function(applied) if _APPLY_IS_PYTHON else _asked_of_classes(applied)


@contextmanager
def _above_function(applied: Applied) -> Iterator[None]:
    """Function.apply asks the class above it, whenever it was bound."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(cls, super(_SingleLevelFunction, cls).apply, args, kwargs)

    assert "apply" not in vars(_SingleLevelFunction)
    base: Any = _SingleLevelFunction
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


@contextmanager
def _asked_of_classes(applied: Applied) -> Iterator[None]:
    """From torch 2.14 on `apply` is C, and one that was bound before calls nothing that could be replaced. It asks its
    class for `_backward_cls` and then, without gradients, for `forward`: here it is given one that calls `applied`.
    """
    state = threading.local()  # began: a class whose own apply was called; bound: (class, gradients are recorded)
    ask = type.__getattribute__

    def own(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state.began = cls
        try:
            return ask(cls, "apply")(*args, **kwargs)
        finally:
            state.began = None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if has_setup(cls):
            call = inspect.signature(cls.forward).bind(*args, **kwargs)
            call.apply_defaults()
            args, kwargs = call.args, call.kwargs
        return applied(cls, partial(own, cls), args, kwargs)

    def asked(cls: Any, name: str) -> Any:
        value = ask(cls, name)
        if name == "apply" and inspect.isbuiltin(value):
            return partial(apply, cls)
        if name == "_backward_cls":
            began, state.began = getattr(state, "began", None), None
            state.bound = None if began is cls else (cls, torch.is_grad_enabled())
        elif name == "forward" and (bound := getattr(state, "bound", None)) is not None and bound[0] is cls:
            state.bound = None
            return _BoundBefore(cls, value, bound[1], applied, state)
        elif name == "setup_context" and (setup := getattr(state, "setup", None)) is not None and setup[0] is cls:
            state.setup = None
            return setup[1]
        return value

    meta: Any = FunctionMeta
    assert "__getattribute__" not in vars(meta)
    meta.__getattribute__ = asked
    try:
        yield
    finally:
        del meta.__getattribute__


class _BoundBefore:
    """The forward of a function whose `apply` was bound before, where `applied` decides what it gives."""

    def __init__(self, cls: Any, forward: Any, records: bool, applied: Applied, state: threading.local) -> None:
        self.cls, self.forward, self.records = cls, forward, records
        self.applied, self.state = applied, state
        self.is_own = False

    def __call__(self, *args: Any) -> Any:
        context = () if has_setup(self.cls) else args[:1]

        def own(*args: Any, **kwargs: Any) -> Any:
            self.is_own = True
            with _gradients_recorded(False):  # as it is called in apply, which goes on with what it gives
                return self.forward(*context, *args, **kwargs)

        with _gradients_recorded(self.records):
            result = self.applied(self.cls, own, args[len(context) :], {})
        if self.is_own:
            return result
        if context:
            self._close(context[0], result)
        else:
            self.state.setup = self.cls, lambda context, inputs, output: self._close(context, output)
        return result

    def _close(self, context: Any, result: Any) -> None:
        """The context is not that of the forward that ran: nothing is differentiated with it."""
        outputs = result if isinstance(result, tuple) else (result,)
        tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
        context.mark_non_differentiable(*(one for one in tensors if not one.requires_grad))
        context.apply = self._refuse

    def _refuse(self, *_: Any) -> Any:
        name = self.cls.__qualname__
        raise InputError(
            f"the model differentiates in its forward through {name}.apply, which was bound to a name before",
            self.cls.__module__,
            f"call {name}.apply(...) itself",
        )


@contextmanager
def _gradients_recorded(whether: bool) -> Iterator[None]:
    """As torch.set_grad_enabled, but what traces does not see it, as it does not see what `apply` switches in C: a
    trace would leave gradients off behind it.
    """

    def switch(on: bool) -> None:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(on)

    before = torch.is_grad_enabled()
    switch(whether)
    try:
        yield
    finally:
        switch(before)


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
