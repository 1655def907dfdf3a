"""What a model asks of autograd in its forward, where a trace would not see it or would take it for something else.

    asked = Asked()
    with autograd_calls(asked): ...     while the model's forward is traced; asked.gradients, asked.flags: the lines
                                        that did

What becomes of it:
    torch.autograd.grad           without create_graph its results are detached; with it they are traced
    tensor.data                   tensor.detach()
    torch.inference_mode          torch.no_grad: what it makes may be used like any other tensor of a trace
    tensor.requires_grad          answered as it is, and noted: with another frozen set the answer may be another
    tensor.backward, detach_      refused; so are hooks on several tensors, on saved ones and on a grad_fn, which csc
                                  would not call
    y.data.mul_(2)                refused: a write that autograd does not see leaves gradients as they were, which a
                                  graph without writes cannot say
    no_grad inside autocast       export loses it: each result is detached, and writes are refused
    enable_grad inside autocast   refused, where gradients were off before it: export loses it
    embedding(.., max_norm)       refused: it changes the table
    F.relu = mine, which calls    refused: torch tells of F.relu by its name, so that `mine` would run once more for
    the one before                each mode of a trace
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from csc.capture.dedup.layers import CannotRepeat
from csc.errors import InputError, calling_line, is_of_libraries
from csc.torch_private.traces import FakeTensor, address_of_storage, in_functorch_transform, pytree, unwatched

EMBEDDINGS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
GRAD_FN, DATA, NEEDS, LEAF = (
    getattr(torch.Tensor, name).__get__ for name in ("grad_fn", "data", "requires_grad", "is_leaf")
)
AGAIN = "csc.layer_again"  # the call that stands for such a layer (csc.capture.dedup.layers), in torch's messages
FLAGS = (NEEDS, LEAF, GRAD_FN)
MODES = ("__torch_function__", "_run")  # functions of modes between the model's line and this one


class AutogradQueries(TorchFunctionMode):
    """gradients: the line that last asked for a gradient; flags: the first of the model's own that asked whether a
    tensor needs one; transformed: the first within a function that torch.func transforms. "": none did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradients = self.flags = self.transformed = ""
        self.autocasts: list[bool] = []  # of the blocks that are open: whether gradients were on where it began
        self._replaced = {one for one in vars(torch.nn.functional).values() if _is_replaced(one)}
        self._differentiable: dict[int, Any] = {}  # storages of values that need a gradient, and their addresses

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._replaced:
            raise _refused(
                f"torch.nn.functional has {func.__module__}.{func.__qualname__} in place of a function of its own that "
                "this one calls",
                "call your function by its own name in the model, and leave torch's where it was",
            )
        if not self.transformed and in_functorch_transform():
            self.transformed = calling_line()
        if func == DATA:
            return torch.Tensor.detach(*args)
        if func in FLAGS and not self.flags and not in_functorch_transform() and _is_asked_by_the_model():
            self.flags = calling_line()
        lost = bool(self.autocasts) and self.autocasts[0] != torch.is_grad_enabled() and not in_functorch_transform()
        if lost and (torch.is_grad_enabled() or "out" in kwargs):
            raise _lost()
        if func is torch.Tensor.detach_:
            raise _refused("the model detaches a tensor in place", "take the tensor that detach() returns")
        if func is torch.Tensor.backward:
            raise _backward()
        if func in EMBEDDINGS and (kwargs.get("max_norm") if len(args) < 4 else args[3]) is not None:
            raise _refused(
                "an embedding has max_norm, which changes its table while the model runs",
                "leave it out, and shorten the rows of the table after the optimizer's step",
            )
        tensors = [one for one in args if type(one) is FakeTensor]
        with unwatched():
            versions = [one._version for one in tensors]
        result = _of_autograd(*args, **kwargs) if func is torch.autograd.grad else func(*args, **kwargs)
        if func == GRAD_FN and result is not None:
            return _Node(result)
        with unwatched():
            for one, version in zip(tensors, versions):
                if one._version != version:
                    self._check(one)
                    if lost:
                        raise _lost()
        if lost:
            result = _detached(result, (args, kwargs))
        with unwatched():
            self._note(result)
        if func is torch.autograd.grad:
            self.gradients = calling_line() or "model"
            if not kwargs.get("create_graph", False):
                return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return result

    def _note(self, result: Any) -> None:
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if type(one) is FakeTensor and one.requires_grad and not in_functorch_transform():
                self._differentiable[address_of_storage(one)] = one.untyped_storage()  # kept, so that it stays its own

    def _check(self, written: torch.Tensor) -> None:
        """If what was written to needs a gradient, or is memory of what does, autograd must have seen it. Not for
        parameters: of those the graph says so.
        """
        if in_functorch_transform() or (written.is_leaf and written.requires_grad):
            return
        seen = torch.is_grad_enabled() and written.requires_grad
        if not seen and address_of_storage(written) in self._differentiable:
            raise _refused(
                "the model writes to a value that needs a gradient where autograd does not see it (under no_grad, or "
                "through detach() or .data)",
                "write to a clone of it, or use the new value where it is needed",
            )


def _is_replaced(one: Any) -> bool:
    """Whether a member of torch.nn.functional is somebody else's function."""
    return isinstance(one, FunctionType) and not str(one.__module__).startswith(("torch", "typing"))


def _of_autograd(*args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad. CannotRepeat where it goes through a layer that stands for an equal one: that has no
    backward yet.
    """
    try:
        return torch.autograd.grad(*args, **kwargs)
    except RuntimeError as error:
        if AGAIN not in str(error):
            raise
        raise CannotRepeat("the model asks for gradients through its layers") from error


class _Node:
    """A tensor's grad_fn that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise _refused(
                "the model puts a hook on a grad_fn, which csc would not call",
                "put it on the tensor (tensor.register_hook), and let it return the gradient",
            )
        return getattr(self._node, name)


def _is_asked_by_the_model() -> bool:
    """Whether a mode is called for a line that is neither torch's nor csc's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name in MODES:
        frame = frame.f_back
    return not is_of_libraries(frame.f_code.co_filename)


@contextmanager
def autograd_calls(asked: AutogradQueries) -> Iterator[None]:
    """A context around the model's forward, in a trace."""
    with (
        patch.object(torch.autograd, "backward", _no_backward),
        patch.object(torch.autograd.graph, "register_multi_grad_hook", _no_hook_on_several),
        patch.object(saved_tensors_hooks, "__enter__", _entered(saved_tensors_hooks.__enter__)),
        patch.object(torch.inference_mode, "__enter__", _enter_as_no_grad),
        patch.object(torch.inference_mode, "__exit__", _leave_as_no_grad),
        patch.object(torch.autocast, "__enter__", _noting(asked, torch.autocast.__enter__)),
        patch.object(torch.autocast, "__exit__", _leaving(asked, torch.autocast.__exit__)),
        asked,
    ):
        yield


def _noting(asked: AutogradQueries, own: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(self: torch.autocast) -> Any:
        asked.autocasts.append(torch.is_grad_enabled())
        return own(self)

    return __enter__


def _leaving(asked: AutogradQueries, own: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: torch.autocast, *error: Any) -> Any:
        asked.autocasts.pop()
        return own(self, *error)

    return __exit__


def _enter_as_no_grad(self: torch.inference_mode) -> None:
    instead = torch.no_grad() if self.mode else nullcontext()
    self.__dict__["_instead"] = instead
    instead.__enter__()


def _leave_as_no_grad(self: torch.inference_mode, *error: Any) -> None:
    self.__dict__.pop("_instead").__exit__(*error)


def _entered(own: Callable[[Any], None]) -> Callable[[Any], None]:
    def __enter__(self: saved_tensors_hooks) -> None:
        if not type(self).__module__.startswith("torch.") or type(self) is saved_tensors_hooks:
            raise _refused(
                "the model has hooks on the tensors that autograd saves, which csc would not call",
                "leave them out: what is kept between forward and backward is csc's to choose (recompute=, memory=)",
            )
        own(self)

    return __enter__


def _no_backward(*args: Any, **kwargs: Any) -> None:
    raise _backward()


def _no_hook_on_several(*args: Any, **kwargs: Any) -> None:
    raise _refused(
        "the model puts one hook on several tensors (register_multi_grad_hook), which csc would not call",
        "put a hook on each that returns its gradient",
    )


def _detached(result: Any, given: Any) -> Any:
    """What a call made; what it was given and returns as it is (x.float() of a float32 x) keeps its gradient."""
    same = {id(leaf) for leaf in pytree.tree_leaves(given)}
    return pytree.tree_map_only(torch.Tensor, lambda one: one if id(one) in same else one.detach(), result)


def _lost() -> InputError:
    return _refused(
        "the model turns gradients on, or writes to a tensor with gradients off, inside a block of torch.autocast, "
        "which a trace loses",
        "put torch.no_grad() or torch.enable_grad() around the autocast block",
    )


def _backward() -> InputError:
    return _refused(
        "the model runs a backward in its forward",
        "ask for gradients with torch.autograd.grad, and return the loss alone",
    )


def _refused(what: str, remedy: str) -> InputError:
    return InputError(what, calling_line() or "model", remedy)
