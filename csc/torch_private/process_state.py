"""What torch keeps for a process and its threads, beside tensors and modules: what is on, and what is pushed."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import torch
from torch._C import _autograd as autograd
from torch._C import _functorch as functorch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.utils import _device as devices
from torch.utils import _python_dispatch as dispatch

from csc.torch_private.hooks import hooks_of_all_modules

# --- What runs beside a step: profilers, torch.compile, the workers of a DataLoader ----------------------------------


def unattended_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """The iterator of a DataLoader, whose workers' deaths are found when a batch is waited for (within five seconds).
    Torch's handler of SIGCHLD else raises wherever the process is just then: in the middle of a step.
    """
    if getattr(batches, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False  # type: ignore[attr-defined]
    return batches


def is_profiled() -> bool:
    """Whether a profiler of torch's is on: emit_nvtx and one of all threads included, which each show in one place."""
    return bool(torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


# --- What torch keeps for a process and its threads, beside tensors and modules: what is on, and what is pushed ------
#
# A trace runs the code of a model. That may set what it does not set back (`torch.set_grad_enabled(False)`), and what
# torch has on in a trace may fail while it is taken down (`torch.func.jvp` leaves its level pushed); from then on
# nothing else in the process would be right.


_DEVICES = ("cpu", *(one.type for one in [torch.accelerator.current_accelerator()] if one is not None))
Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # what reads it, and what writes it


def process_state() -> dict[str, Any]:
    """All of it but random numbers, by name; equal to what it was before if nothing changed."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return {
        "levels of torch.func": functorch.get_dynamic_layer_stack_depth(),
        "dispatch keys": tuple(map(str, keys)),
        "inference mode": torch.is_inference_mode_enabled(),
        "function modes": _FunctionModes.all(),
        "dispatch modes": _DispatchModes.all(),
        "nested autocasts": _autocasts(),
        "hooks of saved tensors": _saved_tensor_hooks(),
        "hooks of all modules": {name: list(hooks) for name, hooks in hooks_of_all_modules()},
        **_settings(),
    }


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Leaves it as it was, and the generators of random numbers of NumPy and Python (csc.devices.forked: of torch)."""
    settings, modes = _settings(), [(stack, stack.all()) for stack in (_FunctionModes, _DispatchModes)]
    levels, autocasts, hooks = functorch.get_dynamic_layer_stack_depth(), _autocasts(), _saved_tensor_hooks()
    of_modules = [(held, dict(held)) for _, held in hooks_of_all_modules()]
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    try:
        with (
            torch._C._InferenceMode(torch.is_inference_mode_enabled()),
            torch._C._ForceDispatchKeyGuard(*keys),
            _random_numbers_kept(),
        ):
            _set(settings)  # the guard of inference mode turned gradients on
            try:
                yield
            finally:
                while functorch.get_dynamic_layer_stack_depth() > levels:  # at once fails in torch 2.11
                    functorch.pop_dynamic_layer_stack()
                for stack, before in modes:
                    stack.put(before)
                while _saved_tensor_hooks() not in (None, hooks):
                    autograd._pop_saved_tensors_default_hooks()
                while _autocasts() > autocasts:
                    torch.autocast_decrement_nesting()
                if autocasts == 0:
                    torch.clear_autocast_cache()
                for held, was in of_modules:
                    if held != was:
                        held.clear()
                        held.update(was)
    finally:
        _set(settings)


class ThreadState:
    """What torch has on in the thread that makes it: `on` in another one has it on there."""

    def __init__(self) -> None:
        self._settings, self._modes = _settings(), [(stack, stack.all()) for stack in (_FunctionModes, _DispatchModes)]
        self._autocasts, self._hooks = _autocasts(), _saved_tensor_hooks()
        self._inference = torch.is_inference_mode_enabled()
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    @contextmanager
    def on(self) -> Iterator[None]:
        """In a thread that ends with it."""
        with torch._C._InferenceMode(self._inference), torch._C._ForceDispatchKeyGuard(*self._keys):
            _set(self._settings)  # the guard of inference mode turned gradients on
            for stack, modes in self._modes:
                stack.put(modes)
            for _ in range(self._autocasts):
                torch.autocast_increment_nesting()
            if self._hooks is not None:
                autograd._push_saved_tensors_default_hooks(*self._hooks)
            try:
                yield
            finally:
                for stack, _ in self._modes:
                    stack.put([])
                # Torch notes for the process that a dispatch mode is on, and puts back what was noted on entry: threads
                # that take turns within modes would leave one noted for good.
                for name, value in self._settings.items():
                    if name.startswith("_is_in_"):
                        setattr(dispatch, name, value)


# --- what is pushed ------------------------------------------------------------------------------------------------


class _FunctionModes:
    """The stack of TorchFunctionModes of this thread, outermost first."""

    @staticmethod
    def all() -> list[Any]:
        return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]

    @classmethod
    def put(cls, modes: list[Any]) -> None:
        """Have these and no others on it."""
        if not _identical(cls.all(), modes):
            for _ in range(torch._C._len_torch_function_stack()):
                torch._C._pop_torch_function_stack()
            for mode in modes:
                torch._C._push_on_torch_function_stack(mode)


class _DispatchModes:
    """The stack of TorchDispatchModes of this thread, outermost first."""

    @staticmethod
    def all() -> list[Any]:
        return [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())]

    @classmethod
    def put(cls, modes: list[Any]) -> None:
        """Have these and no others on it."""
        if not _identical(cls.all(), modes):
            for _ in range(torch._C._len_torch_dispatch_stack()):
                torch._C._pop_torch_dispatch_stack(None)
            for mode in modes:
                torch._C._push_on_torch_dispatch_stack(mode)


def _identical(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))


def _autocasts() -> int:
    """How many blocks of torch.autocast the thread is in."""
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return count


def _saved_tensor_hooks() -> Any:
    """The innermost that are on for tensors saved for backward."""
    return autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    own, numpys = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        numpy.random.set_state(numpys)


# --- what is set ---------------------------------------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def _set(settings: dict[str, Any]) -> None:
    for name, (read, write) in _SETTINGS.items():
        if read() != settings[name]:
            write(settings[name])


def _attribute(module: ModuleType | Any, name: str) -> Setting:
    return partial(getattr, module, name, None), partial(setattr, module, name)


def _of(read: Callable[[Any], Any], write: Callable[[Any, Any], Any], device: str) -> Setting:
    return partial(read, device), partial(write, device)


def _precision() -> str:
    """Of float32 products by torch's older switch; "" where it was set by the newer ones, which the older does not
    tell of.
    """
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _set_precision(precision: str) -> None:
    if precision:
        torch._C._set_float32_matmul_precision(precision)


def _forward_levels() -> tuple[int, int]:
    """The level of forward gradients as the C++ part and as the Python part of torch have it, -1 for none. They differ
    where a trace refused `torch.func.jvp` half way in.
    """
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:  # there is one level at most
        return 0, forward_ad._current_level
    torch._C._exit_dual_level(level=level)
    return level - 1, forward_ad._current_level


def _leave_forward_levels(levels: tuple[int, int]) -> None:
    for level in range(_forward_levels()[0], levels[0], -1):
        torch._C._exit_dual_level(level=level)
    forward_ad._current_level = levels[1]


def _let_no_hooks(message: str | None) -> None:
    autograd._saved_tensors_hooks_enable() if message is None else autograd._saved_tensors_hooks_disable(message)


_SETTINGS: dict[str, Setting] = {
    "gradients": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "forward gradients": (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    "threads of backward": (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    "replayed views": (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    "levels of forward gradients": (_forward_levels, _leave_forward_levels),
    "levels of jvp": _attribute(eager_transforms, "JVP_NESTING"),
    **{
        f"{name} in torch.func": (getattr(functorch, f"get_{name}_allowed"), getattr(functorch, f"set_{name}_allowed"))
        for name in ("inplace_requires_grad", "single_level_autograd_function")
    },
    "saved tensors without hooks": (autograd._saved_tensors_hooks_get_disabled_error_message, _let_no_hooks),
    **{name: _attribute(dispatch, name) for name in vars(dispatch) if name.startswith("_is_in_")},  # a dispatch mode
    **{f"autocast on {one}": _of(torch.is_autocast_enabled, torch.set_autocast_enabled, one) for one in _DEVICES},
    **{f"dtype on {one}": _of(torch.get_autocast_dtype, torch.set_autocast_dtype, one) for one in _DEVICES},
    "cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": _attribute(devices, "CURRENT_DEVICE"),
    "mode of the default device": _attribute(torch._GLOBAL_DEVICE_CONTEXT, "device_context"),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "memory filled": (
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
    ),
    "anomaly detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch._C.set_anomaly_enabled(*state),
    ),
    "float32 products": (_precision, _set_precision),
    **{
        f"attention by {kind}": (
            getattr(torch._C, f"_get_{kind}_sdp_enabled"),
            getattr(torch._C, f"_set_sdp_use_{kind}"),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    },
    "threads": (torch.get_num_threads, torch.set_num_threads),
}
