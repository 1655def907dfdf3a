"""While an operation of torch's runs, nobody looks at what is called.

Python tells a profile function of every call and return. A layer of forty operations makes 80,000 of them in a trace,
nearly all within torch, where none is to be looked at: telling them took longer than the trace.

    with unprofiled(look): layer(x)      look is the profile function, but not while an operation runs

An operation is one that torch defines, called with tensors of torch's and plain values, so that it can call nothing of
the model's: no subclass of Tensor, no function among its arguments, no mode but torch's and csc's around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from csc.torch_private.traces import FakeTensor, modes_that_are_on

DEFINED = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)  # in C
IN_PYTHON = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor"})
TENSORS = frozenset({FakeTensor, torch.Tensor, torch.nn.Parameter})
PLAIN = frozenset(
    {bool, int, float, complex, str, type(None), type(...), torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype,
     torch.device, torch.layout, torch.memory_format}
)  # fmt: skip
TRACERS = ("torch", "csc")  # packages whose modes are on in every trace


class _Operations(TorchFunctionMode):
    def __init__(self, look: Callable[..., None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (_is_torch_s(func) and _are_plain(args) and _are_plain(kwargs.values()) and _only_tracers()):
            return func(*args, **kwargs)
        sys.setprofile(None)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(self._look)


@contextmanager
def unprofiled(look: Callable[..., None]) -> Iterator[None]:
    """Python calls `look` for what runs in the context, outside of operations."""
    before = sys.getprofile()
    with _Operations(look):
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)


def _is_torch_s(func: Any) -> bool:
    if isinstance(func, FunctionType):
        return func.__module__ in IN_PYTHON
    return isinstance(func, DEFINED)


def _are_plain(values: Any) -> bool:
    for one in values:
        kind = type(one)
        if kind in TENSORS or kind in PLAIN:
            continue
        if kind in (tuple, list, torch.Size):
            if not _are_plain(one):
                return False
        elif kind is not slice or not _are_plain((one.start, one.stop, one.step)):
            return False
    return True


def _only_tracers() -> bool:
    return all(type(mode).__module__.partition(".")[0] in TRACERS for mode in modes_that_are_on())
