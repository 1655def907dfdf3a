"""Whole numbers that a model makes of sizes by torch's functions, not Python's.

`torch.div(length, window, rounding_mode="trunc") - 1` is a tensor, though of sizes alone. Where it then stands for a
size, a trace knows nothing of it; the number of the same kind as the sizes that it comes from, it does.

    counts.add(name, args, kwargs, result)        of every call
    counts.of(tensor) -> SymInt, int or None
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from csc.capture.values.call_log import writes

SIMPLE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "__add__": operator.add, "__radd__": operator.add, "sub": operator.sub,
    "__sub__": operator.sub, "mul": operator.mul, "__mul__": operator.mul, "__rmul__": operator.mul,
}  # fmt: skip
NUMBERS = (int, torch.SymInt)


class TensorCounts:
    """Of one run."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}

    def of(self, tensor: Any) -> Any:
        """The number that a tensor holds; None if it is not known to be made of sizes."""
        return self._known.get(id(tensor), (tensor, None))[1]

    def add(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A call, and what it returned."""
        if not isinstance(result, torch.Tensor) or result.dim() or result.dtype != torch.int64:
            return
        if writes(name) or "out" in kwargs:  # perhaps through a view
            self._known.clear()
            return
        number = self._number(name, args, kwargs)
        if number is not None:
            self._known[id(result)] = (result, number)

    def _number(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if len(args) != 2:
            return None
        if name == "div" and kwargs.get("rounding_mode") in ("trunc", "floor") and len(kwargs) == 1:
            plain = all(type(one) in NUMBERS for one in args)  # sizes, so not below 0, where both ways round alike
            return args[0] // args[1] if plain and (type(args[1]) is not int or args[1] > 0) else None
        left, right = (one if type(one) in NUMBERS else self.of(one) for one in args)
        if name not in SIMPLE or kwargs or left is None or right is None:
            return None
        return SIMPLE[name](left, right)
