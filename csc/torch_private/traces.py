"""What tracing goes through: fake tensors, modes, and torch's own code as a trace can run it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher as python_kernels
from torch._subclasses.fake_tensor import FakeTensor
from torch.export._trace import _compiling_state_context
from torch.fx import traceback as fx_traceback
from torch.fx._symbolic_trace import _orig_module_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from csc.torch_private.real_layouts import FakeTensorMode as FakeTensorMode

__all__ = [
    "FakeTensor",
    "TorchDispatchMode",
    "fx_traceback",
    "make_fx",
    "python_kernels",
    "pytree",
]  # of torch, as they are

_CHECKPOINT = "_checkpoint_without_reentrant_generator"
if hasattr(checkpoints, f"{_CHECKPOINT}_impl"):  # from torch 2.14 on; the other calls it
    _CHECKPOINT = f"{_CHECKPOINT}_impl"


def modes_that_are_on() -> list[Any]:
    """Objects of TorchFunctionMode and TorchDispatchMode within whose `with` the caller runs."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


@contextmanager
def unchanged_modules() -> Iterator[None]:
    """While it lasts, `module.to(dtype)` and its like do nothing where the module is so already. In a trace torch would
    put a new tensor in place of each parameter, which it cannot.
    """
    own = torch.nn.Module._apply

    def apply(self: torch.nn.Module, change: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.nn.Module:
        with outside_tracing():
            kinds = {(one.dtype, one.device, one.dim()) for one in (*self.parameters(), *self.buffers())}
            like = [torch.empty([0] * dims, dtype=dtype, device=device) for dtype, device, dims in kinds]
            same = all(change(one) is one for one in like)
        return self if same else own(self, change, *args, **kwargs)

    with patch.object(torch.nn.Module, "_apply", apply):
        yield


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Within the block a checkpoint that is not reentrant runs its function and no more: what a step computes twice is
    csc's to decide, and export takes what follows one checkpoint inside another for computed without gradients.
    """

    def only_runs(*_: Any, **__: Any) -> Iterator[None]:
        yield

    with patch.object(checkpoints, _CHECKPOINT, only_runs):
        yield


def in_functorch_transform() -> bool:
    """True inside vmap, grad and the like, where tensors are wrapped."""
    return peek_interpreter_stack() is not None


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Operations in it run for real: no fake tensors, no proxies, no torch functions, nothing recorded."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


@contextmanager
def modules_called_untraced() -> Iterator[None]:
    """A trace does not note which modules are called in it: what they raise would leave that half done."""
    with patch.object(torch.nn.Module, "__call__", _orig_module_call):
        yield


def random_state() -> bytes:
    """The state of torch's generator on the CPU."""
    with outside_tracing():
        return torch.default_generator.get_state().numpy().tobytes()


@contextmanager
def unwatched() -> Iterator[None]:
    """Torch functions in it are not shown to torch function modes; what they do is recorded all the same."""
    with torch._C.DisableTorchFunction():
        yield


@contextmanager
def replaying() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Code in it runs on fake tensors of plain sizes, and takes itself for exported. Gives what makes a tensor fake."""
    environment = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
    with _compiling_state_context(), mode:
        yield partial(mode.from_tensor, static_shapes=True)


@contextmanager
def each_computed() -> Iterator[None]:
    """Fake tensor modes that are made in it compute what every operation gives. They would remember what operations on
    like tensors gave, which takes longer than it saves where sizes are symbols.
    """
    from torch._dynamo import config  # at the top it would be imported by every rank of a program

    with config.patch(fake_tensor_cache_enabled=False):
        yield


@contextmanager
def lists_from(numbers: Callable[[torch.Tensor, Callable[[], Any]], Any]) -> Iterator[None]:
    """While it lasts, `tolist()` of a traced tensor is what `numbers` gives for it and for its own `tolist()`. That is
    Python code that asks for number by number, which a torch function mode sees one by one.
    """
    own = FakeTensor.tolist

    def tolist(self: FakeTensor) -> Any:
        return numbers(self, partial(own, self))

    with patch.object(FakeTensor, "tolist", tolist):
        yield


@contextmanager
def tensors_of_data() -> Iterator[None]:
    """While it lasts, `torch.Tensor(data)` of a list or an array can be traced, as `torch.tensor(data)` of floats."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor and len(args) == 1 and not kwargs and isinstance(args[0], (list, tuple, np.ndarray)):
            return torch.tensor(args[0], dtype=torch.get_default_dtype())
        return torch._C.TensorBase.__new__(cls, *args, **kwargs)

    with patch.object(torch.Tensor, "__new__", new):
        yield


@contextmanager
def varlen_attention(computed: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """While it lasts, `torch.nn.attention.varlen.varlen_attn` is what this function gives: the attention, and the
    logarithms of its sums [heads, queries]. It is called with the names of the operator's arguments.
    """
    from torch.nn.attention import varlen  # noqa: F401  # it defines the operator, for models that are traced

    names = [argument.name for argument in torch.ops.torch_attn._varlen_attn.default._schema.arguments]

    def called(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *computed(**dict(zip(names, args)), **kwargs), None  # that is the state of random numbers

    with patch.object(torch.ops.torch_attn, "_varlen_attn", called):
        yield


@contextmanager
def without_messages() -> Iterator[None]:
    """While it lasts, torch does not log what it could not evaluate: whoever calls it says so in a sentence. Loggers
    that the user has turned up (TORCH_LOGS) stay as they are.
    """
    names = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    changed = [(one, one.level) for one in loggers if one.getEffectiveLevel() >= logging.WARNING]
    try:
        for one, _ in changed:
            one.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for one, level in changed:
            one.setLevel(level)


class ParameterReads(TorchDispatchMode):
    """A context in which operations run as they are, up to the first that is given a parameter; any: whether there was
    one. It ends with an error: on parameters of a trace what follows would leave conditions on sizes there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.any |= any(isinstance(leaf, torch.nn.Parameter) for leaf in pytree.tree_leaves((args, kwargs)))
        if self.any:
            raise RuntimeError("a parameter is read")
        return func(*args, **(kwargs or {}))


def address_of_storage(tensor: torch.Tensor) -> int:
    """Of the memory that a tensor and its views share, in a trace too; another one's once nobody has them any more."""
    return int(tensor.untyped_storage()._cdata)
