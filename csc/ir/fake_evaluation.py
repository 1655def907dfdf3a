"""Types of the values in a graph: its operations run on fake tensors, each kind once.

The eighty equal layers of a model ask eighty times for the shape of the same product; PyTorch takes milliseconds where
a look at the operands is enough.

    Evaluation(mode)(target, args, kwargs) -> what the operation gives: fake tensors, numbers
"""

from __future__ import annotations

from typing import Any

import torch

from csc.torch_private.traces import FakeTensorMode, pytree


class Evaluation:
    """Runs operations on fake tensors. Operands of the same shapes, strides, dtypes, devices and values as in an
    earlier call give the result of the earlier call, the same tensor: it stands for a type, not for a value.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results: dict[Any, Any] = {}
        self._types: dict[int, tuple[torch.Tensor, Any]] = {}  # by id, with the tensor, so that it stays that tensor's

    def __call__(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Whatever the operation raises is raised here."""
        key = (target, self._key(args), self._key(kwargs))
        try:
            return self._results[key]
        except TypeError:  # an operand that cannot be compared
            return self._run(target, args, kwargs)
        except KeyError:
            pass
        result = self._run(target, args, kwargs)
        if not any(getattr(leaf, "constant", None) is not None for leaf in pytree.tree_leaves(result)):
            self._results[key] = result  # else it stands for a value too
        return result

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
