"""What every builder asks of its inputs before it looks at them, and where in a batch something is wrong.

Terms: a *row* is one entry of the batch, a *position* a token in it.

    row_major(value, name, what) -> int64 [B, T]           a tensor or nested lists; one row may come without its batch
    positive(value, name) -> int                           a size
    refuse_where(wrong, name, say, remedy)                 InputError at the first True of bool [B, T]
    same_shape(name, value, other_name, other)             InputError unless [B, T] are equal; B may be 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from csc.errors import InputError

Numbers = torch.Tensor | Sequence[Any]  # a tensor, or lists of numbers
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def row_major(value: Numbers, name: str, what: str = "integers [B, T]") -> torch.Tensor:
    """int64 [B, T] of integers or bools. InputError for floats and other shapes."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"it is no table of {what}: {error}", name, "Rows must be equally long") from error
    if tensor.dtype not in INTEGERS:
        raise InputError(f"its dtype is {tensor.dtype}, not {what}", name, f"Convert it: {name}.long()")
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise InputError(f"its shape is {list(tensor.shape)}, not [B, T] with at least one token", name)
    return tensor.long()


def positive(value: int, name: str) -> int:
    """A size of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}, not a whole number of at least 1")
    return value


def refuse_where(wrong: torch.Tensor, name: str, say: Callable[[int, int], str], remedy: str = "") -> None:
    """InputError at the first row and position where `wrong` bool [B, T] holds; `say(row, position)` is what."""
    if bool(wrong.any()):
        row, position = (int(i) for i in wrong.nonzero()[0])
        raise InputError(say(row, position), f"{name}, row {row}, position {position}", remedy)


def same_shape(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """InputError unless both are [B, T] of the same sizes. A batch of 1 goes with any batch."""
    if value.shape[1] != other.shape[1] or len({*value.shape[:1], *other.shape[:1]} - {1}) > 1:
        raise InputError(
            f"{name} is {list(value.shape)} and {other_name} is {list(other.shape)}",
            remedy="Both have a number for every token of the same batch",
        )
