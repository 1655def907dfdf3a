"""Types of the values in a graph: its operations run on fake tensors, each kind once.

The eighty equal layers of a model ask eighty times for the shape of the same product; PyTorch takes milliseconds where
a look at the operands is enough.

    Evaluation(mode)(target, args, kwargs) -> what the operation gives: fake tensors, numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from csc.torch_private import FakeTensor, FakeTensorMode, pytree


@dataclass(frozen=True)
class _Layout:
    """A tensor of the same shape, strides, offset and dtype on the meta device, and the device that it is to be on."""

    on_meta: torch.Tensor
    device: torch.device


def _layout(tensor: torch.Tensor) -> _Layout:
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    span = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if tensor.numel() else offset
    whole = torch.empty(span, dtype=tensor.dtype, device="meta")
    return _Layout(whole.as_strided(shape, strides, offset), tensor.device)


class Evaluation:
    """Runs operations on fake tensors. Operands of the same shapes, strides, dtypes, devices and values as in an
    earlier call give the types of the earlier call's result, as tensors of their own: make_fx knows a value by its
    tensor, so the cosines and sines of positions must not be one.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results: dict[Any, Any] = {}
        self._types: dict[int, tuple[torch.Tensor, Any]] = {}  # by id, with the tensor, so that it stays that tensor's

    def __call__(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Whatever the operation raises is raised here."""
        key = (target, self._key(args), self._key(kwargs))
        try:
            known = key in self._results
        except TypeError:  # an operand that cannot be compared
            return self._run(target, args, kwargs)
        if not known:
            result = self._run(target, args, kwargs)
            self._results[key] = pytree.tree_map_only(torch.Tensor, _layout, result)
            return result
        return pytree.tree_map_only(_Layout, self._tensor, self._results[key])

    def _tensor(self, layout: _Layout) -> torch.Tensor:
        return FakeTensor(self._mode, layout.on_meta, layout.device)

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        with self._mode:
            return target(*args, **kwargs)

    def _key(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._types:
                layout = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)
                self._types[id(value)] = (value, layout)
            return self._types[id(value)][1]
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(self._key, value))
        if isinstance(value, dict):
            return tuple((name, self._key(item)) for name, item in value.items())
        return (type(value), value)  # 1, 1.0 and True are equal, and not the same operand
