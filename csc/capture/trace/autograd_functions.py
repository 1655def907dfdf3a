"""`torch.autograd.Function` and hooks on tensors while a model is traced: their backward is traced too.

Terms
  function   a torch.autograd.Function of the model's, or of a library that it uses
  backward   what a function computes its gradients with; a hook is the backward of a function that changes nothing

    with own_gradients() as kept: loss = kept(model(**batch))       a trace of it has csc::own_gradient
                                    (csc.kernels.own_gradient) where a function is applied, or a hook put on a tensor

The backward runs right after the forward, on what stands for incoming gradients. It is traced for all inputs that may
have a gradient, whatever is frozen: what nobody needs of it, pass `prune` removes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from csc.errors import InputError
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
from csc.torch_private.traces import in_functorch_transform, pytree, unwatched

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


def _applied(noted: list[torch.Tensor], cls: Any, own: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives; own: its apply as it is outside of a trace. noted: grows by reentrant checkpoints."""
    if is_reentrant_checkpoint(cls):
        return _checkpointed(noted, *args)
    if not torch.is_grad_enabled() or in_functorch_transform() or is_of_torch(cls):
        return own(*args, **kwargs)
    context: Any = FunctionCtx()
    context.needs_input_grad = tuple(_is_inexact(one) for one in args)
    given = [one for one in args if isinstance(one, torch.Tensor)]
    versions = [one._version for one in given]
    with torch.no_grad():
        if has_setup(cls):
            result = cls.forward(*args, **kwargs)
            cls.setup_context(context, args, result)
        else:
            result = cls.forward(context, *args, **kwargs)
    if getattr(context, "dirty_tensors", ()) or versions != [one._version for one in given]:
        raise InputError(
            "a torch.autograd.Function writes to its input (ctx.mark_dirty)",
            _place_of(cls),
            "let its forward return a new tensor",
        )
    context.saved_tensors = getattr(context, "to_save", None) or ()
    outputs = result if isinstance(result, tuple) else (result,)
    apart = {id(one) for one in getattr(context, "non_differentiable", ())}
    places = [place for place, one in enumerate(outputs) if _is_inexact(one) and id(one) not in apart]
    if len(places) > 1 and not getattr(context, "materialize_grads", True):
        raise InputError(
            "a torch.autograd.Function with several results has set_materialize_grads(False): which of their "
            "gradients its backward is given is not known while it is traced",
            _place_of(cls),
            "leave set_materialize_grads out, and take gradients of zeros for None",
        )
    made = list(outputs)
    differentiable = [outputs[place] for place in places]
    if differentiable:
        with torch.no_grad():
            stand_ins = _stand_ins(outputs, places, getattr(context, "materialize_grads", True))
            gradients = _gradients(cls, context, stand_ins, args)
        for place, one in zip(places, _with_gradients(differentiable, *gradients, everywhere=False)):
            made[place] = one
    made = [one.detach() if isinstance(one, torch.Tensor) and id(one) in apart else one for one in made]
    return tuple(made) if isinstance(result, tuple) else made[0]


def _checkpointed(noted: list[torch.Tensor], run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint computes what `run` does, twice; which values are made again is csc's to decide."""
    result = run(*args)
    if torch.is_grad_enabled() and not in_functorch_transform():
        inputs, outputs = (list(filter(_is_inexact, pytree.tree_leaves(one))) for one in (args, result))
        noted.append(torch.ops.csc.checkpointed(inputs, outputs, _place_of(run)))
    return result


def _stand_ins(outputs: Sequence[Any], places: Sequence[int], materialize: bool) -> list[Any]:
    """What stands for the gradients that a backward is given."""
    found: list[Any] = []
    for place, one in enumerate(outputs):
        if place in places:
            found.append(torch.ops.csc.incoming(one, places.index(place)))
        else:
            found.append(torch.zeros_like(one) if isinstance(one, torch.Tensor) and materialize else None)
    return found


def _gradients(cls: Any, context: Any, incoming: list[Any], args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(inputs that have a gradient, their gradients), as a backward gives them and autograd takes them."""
    given = backward_of(cls)(context, *incoming)
    gradients = given if isinstance(given, (tuple, list)) else (given,)
    if len(gradients) < len(args) or any(one is not None for one in gradients[len(args) :]):
        raise InputError(
            f"a torch.autograd.Function's backward returns {len(gradients)} gradients for {len(args)} arguments",
            _place_of(cls),
            "return one for each argument of forward, None for those without",
        )
    pairs = [(one, gradient) for one, gradient in zip(args, gradients) if _is_inexact(one) and gradient is not None]
    return [one for one, _ in pairs], [_fitting(one, gradient) for one, gradient in pairs]


def _fitting(one: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the value's shape and dtype: autograd adds up what was broadcast."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.shape != one.shape:
        gradient = gradient.sum_to_size(one.shape)
    return gradient if gradient.dtype == one.dtype else gradient.to(one.dtype)


def _with_gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], gradients: Sequence[Any], everywhere: bool
) -> list[torch.Tensor]:
    with torch.enable_grad():
        return list(torch.ops.csc.own_gradient(list(outputs), list(inputs), list(gradients), everywhere))


def _hooked(own: Callable[..., Any], hooked: list[torch.Tensor]) -> Callable[..., Any]:
    """Tensor.register_hook as it is in a trace; hooked: grows by what each gives."""

    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        if in_functorch_transform() or not tensor.requires_grad:
            return own(tensor, hook)
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
            handle = own(tensor, lambda gradient: None)  # the caller expects one
        handle.remove = partial(_removed, hook)
        return handle

    return register_hook


def _removed(hook: Any) -> None:
    raise InputError(
        "a hook on a tensor is removed in forward, before it was called", _place_of(hook), "do not register it at all"
    )


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _place_of(what: Any) -> str:
    """`Name, file.py:12` of a class or a function; its name alone where there is no source."""
    what = getattr(what, "func", what)
    name = getattr(what, "__qualname__", type(what).__qualname__)
    try:
        file, line = inspect.getsourcefile(what), inspect.getsourcelines(what)[1]
    except (TypeError, OSError):
        return name
    return f"{name}, {file}:{line}"
