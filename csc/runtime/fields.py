"""A JSON object read field by field: every complaint names the field, what it should be, and its place in the file.

fields = Fields(json, "program.json")
fields.get("microbatches", int)      fields.rows("stages") -> [Fields]      ProgramError
"""

from __future__ import annotations

import math
from typing import Any

import torch

from csc.errors import ProgramError

LARGEST = 2**53
DIMENSIONS = 64  # torch has no tensors of more
REMEDY = "Compile the program again, or mend program.json"


class Fields:
    """A JSON object with its place in the file, so that every complaint can name both."""

    def __init__(self, table: Any, where: str) -> None:
        if not isinstance(table, dict):
            raise ProgramError(f"this should be an object, not {type(table).__name__}", where, REMEDY)
        self.table, self.where = table, where

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Of this kind; with a default, it may be missing."""
        value = self.table.get(key, default)
        if value is ...:
            raise ProgramError(f"field {key!r} is missing", self.where, REMEDY)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ProgramError(f"field {key!r} should be {names}, it is {short(value)}", self.where, REMEDY)
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise ProgramError(f"field {key!r} is {short(value)}, which nothing is", self.where, REMEDY)
        return value

    def rows(self, key: str, default: Any = ...) -> list[Fields]:
        """Of a list of objects."""
        return [Fields(row, f"{self.where}, {key}[{i}]") for i, row in enumerate(self.get(key, list, default))]

    def sizes(self, key: str) -> tuple[int, ...]:
        """Whole numbers from 0 on."""
        sizes = self.get(key, list)
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < LARGEST for n in sizes):
            raise ProgramError(f"field {key!r} should list sizes, it is {short(sizes)}", self.where, REMEDY)
        if len(sizes) > DIMENSIONS or (key == "shape" and math.prod(sizes) >= LARGEST):
            raise ProgramError(f"field {key!r} is {short(sizes)}: no tensor is that large", self.where, REMEDY)
        return tuple(sizes)

    def names(self, key: str, default: Any = ...) -> tuple[str, ...]:
        """Texts."""
        names = self.get(key, list, default)
        if not all(isinstance(name, str) for name in names):
            raise ProgramError(f"field {key!r} should list names, it is {short(names)}", self.where, REMEDY)
        return tuple(names)

    def hashes(self, key: str, default: Any = ...) -> dict[str, str]:
        """Texts by file."""
        table: dict[str, str] = self.get(key, dict, default)
        if not all(isinstance(value, str) for value in table.values()):
            raise ProgramError(f"field {key!r} should hold the hash of each file", self.where, REMEDY)
        return table

    def limit(self, key: str) -> tuple[str, int] | None:
        """The parameter whose rows an input's numbers are, and how many there are; None where the key is absent."""
        value = self.get(key, dict, {})
        table = Fields(value, f"{self.where}, {key}")
        return (table.get("name", str), table.get("rows", int)) if value else None

    def classes(self, key: str) -> tuple[int, int, int] | None:
        """Of labels: how many classes, the number that stands for none, the first place that is read; None where the
        key is absent.
        """
        value = self.get(key, dict, {})
        found = Fields(value, f"{self.where}, {key}")
        return (found.get("count", int), found.get("ignored", int), found.get("first", int)) if value else None

    def number(self, key: str) -> float:
        """From 0 on."""
        value = self.get(key, (int, float))
        if isinstance(value, bool) or not 0 <= value < LARGEST:
            raise ProgramError(f"field {key!r} should be a number, it is {short(value)}", self.where, REMEDY)
        return float(value)

    def stages(self, key: str, count: int) -> tuple[int, ...]:
        """Different ones of so many, at least one."""
        stages = self.sizes(key)
        if not stages or max(stages) >= count or len(set(stages)) != len(stages):
            raise ProgramError(
                f"field {key!r} is {list(stages)}: different stages in 0..{count - 1}", self.where, REMEDY
            )
        return stages

    def dtype(self, key: str = "dtype") -> torch.dtype:
        """Of torch."""
        dtype = getattr(torch, self.get(key, str), None)
        if not isinstance(dtype, torch.dtype):
            raise ProgramError(f"{self.table[key]!r} is not a torch dtype", self.where, REMEDY)
        return dtype


def short(value: Any) -> str:
    """A value as an error shows it: one may be nested deeply, or have many digits."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list) and all(isinstance(one, (int, str)) for one in value[:8]):
        return f"[{', '.join(short(one) for one in value[:8])}{', ...' if len(value) > 8 else ''}]"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else f"{value!r:.60}"
