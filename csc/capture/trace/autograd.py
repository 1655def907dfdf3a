"""What a model asks of autograd in its forward: functions and hooks with a backward of their own, and calls a trace
would not see.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from csc.capture.dedup.layers import CannotRepeat
from csc.errors import InputError, calling_line, is_of_libraries
from csc.kernels import own_gradient as _operators  # noqa: F401  registers them
from csc.torch_private.autograd import (
    FunctionCtx,
    applied_functions,
    backward_of,
    has_setup,
    is_of_torch,
    is_reentrant_checkpoint,
)
from csc.torch_private.hooks import backward_hooks, global_backward_hooks, gradient_hooks
from csc.torch_private.traces import FakeTensor, address_of_storage, in_functorch_transform, pytree, unwatched

# --- What a model asks of autograd where a trace would not see it, or take it for something else ---------------------
#
#     asked = Asked()
#     with autograd_calls(asked): ...     while the model's forward is traced; asked.gradients, asked.flags: the lines
#                                         that did
#
# What becomes of it:
#     torch.autograd.grad           without create_graph its results are detached; with it they are traced
#     tensor.data                   tensor.detach()
#     torch.inference_mode          torch.no_grad: what it makes may be used like any other tensor of a trace
#     tensor.requires_grad          answered as it is, and noted: with another frozen set the answer may be another
#     tensor.backward, detach_      refused; so are hooks on several tensors, on saved ones and on a grad_fn, which csc
#                                   would not call
#     y.data.mul_(2)                refused: a write that autograd does not see leaves gradients as they were, which a
#                                   graph without writes cannot say
#     no_grad inside autocast       export loses it: each result is detached, and writes are refused
#     enable_grad inside autocast   refused, where gradients were off before it: export loses it
#     embedding(.., max_norm)       refused: it changes the table
#     F.linear_cross_entropy(..,    traced as the linear layer and the cross entropy that it is: `options` say how
#       torch
#       options=..)                 makes gradients chunk by chunk, which is csc's to choose (pass `head`)
#     F.relu = mine, which calls    refused: torch tells of F.relu by its name, so that `mine` would run once more for
#     the one before                each mode of a trace


EMBEDDINGS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
CHUNKED_LOSS = getattr(torch.nn.functional, "linear_cross_entropy", None)  # from torch 2.13 on
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
        self._replaced = {function for function in vars(torch.nn.functional).values() if _is_replaced(function)}
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
        if func is CHUNKED_LOSS and CHUNKED_LOSS is not None:
            kwargs = {**kwargs, "options": None}
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
        tensors = [tensor for tensor in args if type(tensor) is FakeTensor]
        with unwatched():
            versions = [tensor._version for tensor in tensors]
        result = _of_autograd(*args, **kwargs) if func is torch.autograd.grad else func(*args, **kwargs)
        if func == GRAD_FN and result is not None:
            return _Node(result)
        with unwatched():
            for tensor, version in zip(tensors, versions):
                if tensor._version != version:
                    self._check(tensor)
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
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if type(tensor) is not FakeTensor or not tensor.requires_grad or in_functorch_transform():
                continue
            if tensor.layout is not torch.strided:
                raise _refused(
                    "the model computes with a sparse tensor, which programs have no memory for",
                    "make the dense one (torch.zeros(sizes).index_put(places, values)), or keep the module out of the "
                    "trace with csc.opaque(module)",
                )
            self._differentiable[address_of_storage(tensor)] = (
                tensor.untyped_storage()
            )  # kept, so that it stays its own

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


def _is_replaced(function: Any) -> bool:
    """Whether a member of torch.nn.functional is somebody else's function."""
    return isinstance(function, FunctionType) and not str(function.__module__).startswith(("torch", "typing"))


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


def _noting(queries: AutogradQueries, method: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(self: torch.autocast) -> Any:
        queries.autocasts.append(torch.is_grad_enabled())
        return method(self)

    return __enter__


def _leaving(queries: AutogradQueries, method: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: torch.autocast, *error: Any) -> Any:
        queries.autocasts.pop()
        return method(self, *error)

    return __exit__


def _enter_as_no_grad(self: torch.inference_mode) -> None:
    instead = torch.no_grad() if self.mode else nullcontext()
    self.__dict__["_instead"] = instead
    instead.__enter__()


def _leave_as_no_grad(self: torch.inference_mode, *error: Any) -> None:
    self.__dict__.pop("_instead").__exit__(*error)


def _entered(method: Callable[[Any], None]) -> Callable[[Any], None]:
    def __enter__(self: saved_tensors_hooks) -> None:
        if not type(self).__module__.startswith("torch.") or type(self) is saved_tensors_hooks:
            raise _refused(
                "the model has hooks on the tensors that autograd saves, which csc would not call",
                "leave them out: what is kept between forward and backward is csc's to choose (recompute=, memory=)",
            )
        method(self)

    return __enter__


def _no_backward(*args: Any, **kwargs: Any) -> None:
    raise _backward()


def _no_hook_on_several(*args: Any, **kwargs: Any) -> None:
    raise _refused(
        "the model puts one hook on several tensors (register_multi_grad_hook), which csc would not call",
        "put a hook on each that returns its gradient",
    )


def _detached(result: Any, arguments: Any) -> Any:
    """What a call made; what it was given and returns as it is (x.float() of a float32 x) keeps its gradient."""
    same = {id(leaf) for leaf in pytree.tree_leaves(arguments)}
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf if id(leaf) in same else leaf.detach(), result)


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


def _refused(fault: str, remedy: str) -> InputError:
    return InputError(fault, calling_line() or "model", remedy)


# --- `torch.autograd.Function` and hooks on tensors while a model is traced: their backward is traced too ------------
#
# Terms
#   function   a torch.autograd.Function of the model's, or of a library that it uses
#   backward   what a function computes its gradients with; a hook is the backward of a function that changes nothing
#
# The backward runs right after the forward, on what stands for incoming gradients. It is traced for all inputs that
# may have a gradient, whatever is frozen: what nobody needs of it, pass `prune` removes.


Apply = Callable[..., Any]


@contextmanager
def own_gradients() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Functions that are applied in it, and hooks put on tensors, keep their gradients in a trace. Gives what a loss
    has to go through for that.
    """
    hooked: list[torch.Tensor] = []
    requires_grad_ = torch.Tensor.requires_grad_

    def kept(loss: torch.Tensor) -> torch.Tensor:
        return torch.ops.csc.with_hooks(loss, hooked) if hooked else loss

    def asking(tensor: torch.Tensor, wanted: bool = True) -> torch.Tensor:
        if wanted and not in_functorch_transform() and _is_inexact(tensor):
            hooked.append(torch.ops.csc.checkpointed([tensor], [], ""))
        return requires_grad_(tensor, wanted)

    register_hook = _hooked(torch.Tensor.register_hook, hooked)
    with (
        applied_functions(partial(_applied, hooked)),
        patch.object(torch.Tensor, "register_hook", register_hook),
        patch.object(torch.Tensor, "requires_grad_", asking),
    ):
        yield kept


def refuse_hooks(model: nn.Module) -> None:
    """Raises InputError for hooks that run where a trace does not see them: on parameters, and modules' on gradients.

    Hooks on parameters are given the gradient of a whole step, which no graph has.
    """
    for name, parameter in model.named_parameters():
        for hook in gradient_hooks(parameter):
            raise _on_parameter(name, hook)
    for path, module in model.named_modules():
        for hook in backward_hooks(module):
            raise _on_module(path or type(model).__name__, hook)
    for hook in global_backward_hooks():
        raise _on_module("every module", hook)


def _on_parameter(name: str, hook: Any) -> InputError:
    return InputError(
        f"the parameter has a hook on its gradient ({_place_of(hook)}), which csc would not call",
        name,
        "remove the hook, and change parameter.grad between train_step and the optimizer's step",
    )


def _on_module(where: str, hook: Any) -> InputError:
    return InputError(
        f"it has a backward hook ({_place_of(hook)}), which csc would not call",
        where,
        "remove it; to change a gradient call tensor.register_hook in forward, or apply a torch.autograd.Function",
    )


def _applied(noted: list[torch.Tensor], cls: Any, apply: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives; apply: its apply as it is outside of a trace. noted: grows by reentrant checkpoints."""
    if is_reentrant_checkpoint(cls):
        return _checkpointed(noted, *args)
    if not torch.is_grad_enabled() or in_functorch_transform() or is_of_torch(cls):
        return apply(*args, **kwargs)
    context: Any = FunctionCtx()
    context.needs_input_grad = tuple(_is_inexact(argument) for argument in args)
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    with torch.no_grad():
        if has_setup(cls):
            result = cls.forward(*args, **kwargs)
            cls.setup_context(context, args, result)
        else:
            result = cls.forward(context, *args, **kwargs)
    if getattr(context, "dirty_tensors", ()) or versions != [tensor._version for tensor in tensors]:
        raise InputError(
            "a torch.autograd.Function writes to its input (ctx.mark_dirty)",
            _place_of(cls),
            "let its forward return a new tensor",
        )
    context.saved_tensors = getattr(context, "to_save", None) or ()
    outputs = result if isinstance(result, tuple) else (result,)
    apart = {id(output) for output in getattr(context, "non_differentiable", ())}
    places = [place for place, output in enumerate(outputs) if _is_inexact(output) and id(output) not in apart]
    if len(places) > 1 and not getattr(context, "materialize_grads", True):
        raise InputError(
            "a torch.autograd.Function with several results has set_materialize_grads(False): which of their "
            "gradients its backward is given is not known while it is traced",
            _place_of(cls),
            "leave set_materialize_grads out, and take gradients of zeros for None",
        )
    results = list(outputs)
    differentiable = [outputs[place] for place in places]
    if differentiable:
        with torch.no_grad():
            stand_ins = _stand_ins(outputs, places, getattr(context, "materialize_grads", True))
            gradients = _gradients(cls, context, stand_ins, args)
        for place, output in zip(places, _with_gradients(differentiable, *gradients, everywhere=False)):
            results[place] = output
    results = [
        output.detach() if isinstance(output, torch.Tensor) and id(output) in apart else output for output in results
    ]
    return tuple(results) if isinstance(result, tuple) else results[0]


def _checkpointed(noted: list[torch.Tensor], run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint computes what `run` does, twice; which values are made again is csc's to decide."""
    result = run(*args)
    if torch.is_grad_enabled() and not in_functorch_transform():
        inputs, outputs = (list(filter(_is_inexact, pytree.tree_leaves(value))) for value in (args, result))
        noted.append(torch.ops.csc.checkpointed(inputs, outputs, _place_of(run)))
    return result


def _stand_ins(outputs: Sequence[Any], places: Sequence[int], materialize: bool) -> list[Any]:
    """What stands for the gradients that a backward is given."""
    stand_ins: list[Any] = []
    for place, output in enumerate(outputs):
        if place in places:
            stand_ins.append(torch.ops.csc.incoming(output, places.index(place)))
        else:
            stand_ins.append(torch.zeros_like(output) if isinstance(output, torch.Tensor) and materialize else None)
    return stand_ins


def _gradients(cls: Any, context: Any, incoming: list[Any], args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(inputs that have a gradient, their gradients), as a backward gives them and autograd takes them."""
    returned = backward_of(cls)(context, *incoming)
    gradients = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(gradients) < len(args) or any(gradient is not None for gradient in gradients[len(args) :]):
        raise InputError(
            f"a torch.autograd.Function's backward returns {len(gradients)} gradients for {len(args)} arguments",
            _place_of(cls),
            "return one for each argument of forward, None for those without",
        )
    pairs = [
        (argument, gradient)
        for argument, gradient in zip(args, gradients)
        if _is_inexact(argument) and gradient is not None
    ]
    return [argument for argument, _ in pairs], [_fitting(argument, gradient) for argument, gradient in pairs]


def _fitting(argument: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the value's shape and dtype: autograd adds up what was broadcast."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.shape != argument.shape:
        gradient = gradient.sum_to_size(argument.shape)
    return gradient if gradient.dtype == argument.dtype else gradient.to(argument.dtype)


def _with_gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], gradients: Sequence[Any], everywhere: bool
) -> list[torch.Tensor]:
    with torch.enable_grad():
        return list(torch.ops.csc.own_gradient(list(outputs), list(inputs), list(gradients), everywhere))


def _hooked(register: Callable[..., Any], hooked: list[torch.Tensor]) -> Callable[..., Any]:
    """Tensor.register_hook as it is in a trace; hooked: grows by what each gives."""

    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        if in_functorch_transform() or not tensor.requires_grad:
            return register(tensor, hook)
        if tensor.is_leaf:
            raise _on_parameter("a hook on a parameter, put on it in forward", hook)
        with torch.no_grad():
            incoming = torch.ops.csc.incoming(tensor, 0)
            gradient = hook(incoming)
            if gradient is None or gradient is incoming:
                raise InputError(
                    "a hook on a tensor returns no gradient of its own: what else it does would be lost",
                    _place_of(hook),
                    "return the changed gradient, or leave the hook out",
                )
            gradient = _fitting(tensor, gradient)
        hooked.extend(_with_gradients([tensor], [tensor], [gradient], everywhere=True))
        with unwatched():
            handle = register(tensor, lambda gradient: None)  # the caller expects one
        handle.remove = partial(_removed, hook)
        return handle

    return register_hook


def _removed(hook: Any) -> None:
    raise InputError(
        "a hook on a tensor is removed in forward, before it was called", _place_of(hook), "do not register it at all"
    )


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _place_of(function: Any) -> str:
    """`Name, file.py:12` of a class or a function; its name alone where there is no source."""
    function = getattr(function, "func", function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (TypeError, OSError):
        return name
    return f"{name}, {file}:{line}"
