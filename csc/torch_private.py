"""Every private torch name that csc leans on, in one place.

Each has a contract test in tests/unit/test_torch_private.py: a torch release that moves or changes one fails there, by
name, and not somewhere inside a pass.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import sympy
import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher as python_kernels
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.export._trace import _compiling_state_context
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import _config as size_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._sympy import functions as size_functions

__all__ = [
    "SIZE_FUNCTIONS",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionCtx",
    "GuardOnDataDependentSymNode",
    "OpOverload",
    "ParameterReads",
    "TorchDispatchMode",
    "address_of_storage",
    "applied_functions",
    "assume_several",
    "assumed_of_sizes",
    "backward_hooks",
    "backward_of",
    "compiler_errors",
    "conditions_of_models",
    "each_computed",
    "fx_traceback",
    "global_backward_hooks",
    "gradient_hooks",
    "has_setup",
    "hint",
    "hooks_of_all_modules",
    "hooks_of_tensor",
    "in_functorch_transform",
    "is_autocast_region",
    "is_no_grad_region",
    "is_of_torch",
    "is_profiled",
    "is_reentrant_checkpoint",
    "is_taken_apart",
    "lists_from",
    "make_fx",
    "modes_that_are_on",
    "one_is_no_special_size",
    "outside_tracing",
    "parts_of",
    "plain_checkpoints",
    "python_kernels",
    "pytree",
    "replaying",
    "unattended_workers",
    "unchanged_modules",
    "under_autograd",
    "unwatched",
]

# Functions of whole numbers that sizes are made of, beside sympy's own.
SIZE_FUNCTIONS = {
    name: getattr(size_functions, name)
    for name in ("CleanDiv", "FloorDiv", "Max", "Min", "Mod", "ModularIndexing", "PythonMod")
}


DIVISIBLE = 2**33 * 3**6 * 5**3 * 7**2 * 11 * 13  # by most numbers of patches, frames and tokens that models have
TORCH = f"{torch.__path__[0]}{os.sep}"
SYMBOLS = (os.path.join(TORCH, "fx", "experimental", ""), os.path.join(TORCH, "__init__.py"), __file__)
MODULES = (os.path.join(TORCH, "nn", ""), os.path.join(TORCH, "functional.py"))


def is_no_grad_region(target: Any) -> bool:
    """True for the higher-order op that export writes for `with torch.no_grad()`."""
    return target is torch.ops.higher_order.wrap_with_set_grad_enabled


def hooks_of_all_modules() -> list[tuple[str, Any]]:
    """(kind, hooks) of what `torch.nn.modules.module.register_module_*_hook` registers for every module.

    Mappings alone: the flag beside them, whether backward hooks are full ones, stays set when the last is removed.
    """
    found = vars(torch.nn.modules.module).items()
    return sorted((name, value) for name, value in found if name.startswith("_global_") and isinstance(value, dict))


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """What `register_hook` and `register_post_accumulate_grad_hook` have put on a tensor."""
    found = (getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hook for hooks in found for hook in (hooks or {}).values()]


def modes_that_are_on() -> list[Any]:
    """Objects of TorchFunctionMode and TorchDispatchMode within whose `with` the caller runs."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def is_autocast_region(target: Any) -> bool:
    """True for the higher-order op that export writes for `with torch.autocast(...)`."""
    return getattr(target, "__name__", "") == "wrap_with_autocast"


def is_taken_apart(operation: OpOverload) -> bool:
    """Whether export, when it makes a graph functional, puts others in place of an operation: of one that is no more
    than others that it calls, and may give its argument, a view of it or a copy.
    """
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")
    views = any(argument.alias_info is not None for argument in operation._schema.arguments)
    return composite and (views or torch.Tag.maybe_aliasing_or_mutating in operation.tags)


def parts_of(operation: OpOverload) -> Callable[..., Any]:
    """What an operation that is made of others calls. Not its `decompose`: that asks the table in which export puts
    this here for the operation, and so asks itself.
    """
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    own = operation.py_kernels.get(composite)
    return own if callable(own) else partial(operation._op_dk, composite)


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

    with patch.object(checkpoints, "_checkpoint_without_reentrant_generator", only_runs):
        yield


def assume_several(size: Any) -> None:
    """Let a trace take a size that depends on values (a selection by a mask) for no special case: not 0, not 1, and not
    the largest that there is, since torch fails where a bound is no multiple of what a size turns out to be one of.
    """
    if isinstance(size, torch.SymInt) and not size.node.has_hint():
        torch._check(size >= 2)
        torch._check(size <= DIVISIBLE)


def hint(size: Any) -> int | None:
    """What a symbolic size is in the batch that is traced; None for a plain number, and where only values tell."""
    return size.node.hint if isinstance(size, torch.SymInt) and size.node.has_hint() else None


def as_hinted(size: Any) -> int | None:
    """A size in the batch that is traced; None where only values tell."""
    return hint(size) if isinstance(size, torch.SymInt) else int(size)


def in_functorch_transform() -> bool:
    """True inside vmap, grad and the like, where tensors are wrapped."""
    return peek_interpreter_stack() is not None


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Operations in it run for real: no fake tensors, no proxies, no torch functions, nothing recorded."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
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
def one_is_no_special_size(wanted: bool = True) -> Iterator[None]:
    """Traces in it make a symbol of a size of 1 too, and torch's own code takes symbols for neither 0 nor 1 without
    making that a condition. wanted: False for traces as torch makes them by default.
    """
    with size_config.patch(backed_size_oblivious=wanted):  # type: ignore[attr-defined]
        yield


@contextmanager
def conditions_of_models(found: Callable[[Any, dict[Any, int]], None]) -> Iterator[None]:
    """In it, found(condition, sizes) is called for each condition on sizes that a model makes: a sympy relation that a
    trace has, or the least value of a symbol, since code asked for it that is no part of torch's own way through an
    operation. sizes: of its symbols, in the batch that is traced. What it raises ends the trace.
    """
    own = ShapeEnv.evaluate_expr

    def evaluate(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        if not _in_model_code(sys._getframe(1)):
            return own(self, *args, **kwargs)
        before, least = set(map(id, _conditions(self))), _least(self)
        result = own(self, *args, **kwargs)
        made = [condition.expr for condition in _conditions(self) if id(condition) not in before]
        made += [sympy.Ge(symbol, low) for symbol, low in _least(self).items() if low != least.get(symbol)]
        for condition in made:
            hints = {symbol: self.size_hint(symbol, allow_none=True) for symbol in condition.free_symbols}
            found(condition, {symbol: int(size) for symbol, size in hints.items() if size is not None})
        return result

    with patch.object(ShapeEnv, "evaluate_expr", evaluate):
        yield


def _conditions(environment: ShapeEnv) -> list[Any]:
    """Those that were checked while it traced, and those that export would check at run time."""
    deferred = environment.deferred_runtime_asserts.values()
    return [*environment.guards, *(one for several in deferred for one in several)]


def _least(environment: ShapeEnv) -> dict[Any, Any]:
    """The least value of each symbol."""
    return {symbol: found.lower for symbol, found in environment.var_to_range.items()}


def _in_model_code(frame: Any) -> bool:
    """Whether symbols are asked from a frame that is not in torch, or in the code of its modules."""
    while frame is not None and frame.f_code.co_filename.startswith(SYMBOLS):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return not name.startswith(TORCH) or name.startswith(MODULES)


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


def unattended_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """The iterator of a DataLoader, whose workers' deaths are found when a batch is waited for (within five seconds).
    Torch's handler of SIGCHLD else raises wherever the process is just then: in the middle of a step.
    """
    if getattr(batches, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False  # type: ignore[attr-defined]
    return batches


class ParameterReads(TorchDispatchMode):
    """A context in which operations run as they are; any: whether one of them was given a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.any |= any(isinstance(leaf, torch.nn.Parameter) for leaf in pytree.tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def assumed_of_sizes(mode: FakeTensorMode) -> tuple[dict[str, tuple[int, int | None]], list[Any]]:
    """What a graph that export traced in this mode assumes of its symbols: least and largest values (None: no limit),
    and sympy relations between them.

    Export specialises in silence where a model counts with a size in Python; what it then assumed is in the ranges of
    symbols, in symbols replaced by others, and in conditions that it would have checked at run time.
    """
    environment = mode.shape_env
    if environment is None:
        return {}, []
    ranges = {
        str(symbol): (int(found.lower), int(found.upper) if found.upper.is_Integer else None)
        for symbol, found in environment.var_to_range.items()
        if found.is_int and found.lower.is_Integer
    }
    relations = [condition.expr for condition in _conditions(environment)]
    relations += [sympy.Eq(symbol, other) for symbol, other in environment.replacements.items()]
    return ranges, relations


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


def address_of_storage(tensor: torch.Tensor) -> int:
    """Of the memory that a tensor and its views share, in a trace too; another one's once nobody has them any more."""
    return int(tensor.untyped_storage()._cdata)


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises for what it cannot compile, before any of it has run."""
    from torch._dynamo import exc  # takes a second to import

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def is_profiled() -> bool:
    """Whether a profiler of torch's is on, emit_nvtx included."""
    return bool(torch.autograd._profiler_enabled())
