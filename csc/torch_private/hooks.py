"""What is registered on modules and tensors, to be called around a forward or a backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as modules

_BACKWARD, _AFTER = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def hooks_of_all_modules() -> list[tuple[str, Any]]:
    """(kind, hooks) of what `torch.nn.modules.module.register_module_*_hook` registers for every module.

    Mappings alone: the flag beside them, whether backward hooks are full ones, stays set when the last is removed.
    """
    found = vars(torch.nn.modules.module).items()
    return sorted((name, value) for name, value in found if name.startswith("_global_") and isinstance(value, dict))


@contextmanager
def no_new_registration_hooks() -> Iterator[None]:
    """Takes away what was registered within it for buffers of all modules, which they get from then on: torch.export
    leaves a hook of its own where a trace fails (torch 2.12).
    """
    hooks = modules._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for one in set(hooks) - before:
            del hooks[one]


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """What `register_hook` and `register_post_accumulate_grad_hook` have put on a tensor."""
    found = (getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hook for hooks in found for hook in (hooks or {}).values()]


def global_backward_hooks() -> list[Any]:
    """Backward hooks that were registered for all modules."""
    return [*modules._global_backward_hooks.values(), *modules._global_backward_pre_hooks.values()]


def backward_hooks(module: torch.nn.Module) -> list[Any]:
    """Those that were registered on a module, to be called before or after its backward."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """Those that were registered on a parameter, to be called with its gradient or after that was added to `.grad`."""
    kinds = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [hook for hooks in kinds if hooks for hook in hooks.values()]


def any_gradient_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether any parameter has such a hook, in a loop of C."""
    return any(map(_BACKWARD, parameters)) or any(map(_AFTER, parameters))
