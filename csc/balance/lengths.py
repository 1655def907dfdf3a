"""The lengths of a dataset's samples: what an assignment knows of them, read without loading a sample.

Terms
  tokens   positions that a sample takes in the language model, those of its images among them
  units    what else it has, counted: tiles, images, frames, patches; whatever an encoder pays for

    read(given, dataset) -> Lengths         given: columns or their names, or a function of a sample's number
    of_file(path) -> Lengths                of an .npz with a column of tokens and columns of units
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csc.errors import InputError
from csc.planning.assign.step import Floats

TOKENS = "tokens"
REMEDY = (
    "give a column of whole numbers with the tokens of each sample, or a dict such as {'tokens': ..., 'tiles': ...}"
)


@dataclass(frozen=True)
class Lengths:
    """tokens: [sample]; units: [sample][kind], of these names."""

    tokens: Floats
    units: Floats
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def read(given: Any, dataset: Any) -> Lengths:
    """InputError for columns of another length than the dataset, and for numbers that are no lengths: which sample."""
    count = len(dataset)
    if callable(given):
        columns = _called(given, count)
    elif isinstance(given, Mapping):
        columns = dict(given)
    else:
        columns = {TOKENS: given}
    return _checked({name: _column(name, one, dataset) for name, one in columns.items()}, count, "the dataset has")


def of_file(path: str | Path) -> Lengths:
    """InputError for a file that holds no such columns. Nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, AttributeError) as error:
        raise InputError(
            f"it holds no columns: {error}", str(path), "write it with numpy.savez(file, tokens=...)"
        ) from None
    first = columns.get(TOKENS, next(iter(columns.values()), np.zeros(0)))
    return _checked(columns, len(first) if first.ndim else 0, f"{TOKENS!r} has")


def _called(given: Callable[[int], Any], count: int) -> dict[str, Any]:
    """What a function says of each sample: a number of tokens, or a mapping."""
    rows = [given(index) for index in range(count)]
    rows = [row if isinstance(row, Mapping) else {TOKENS: row} for row in rows]
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise InputError(
                f"lengths gives {', '.join(map(str, row))} for sample {index}, and {', '.join(map(str, rows[0]))} for "
                "sample 0", "lengths", "give the same names for every sample, 0 where it has nothing of the kind",
            )  # fmt: skip
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {TOKENS: 0})}


def _column(name: str, given: Any, dataset: Any) -> Any:
    """The values of a column: themselves, or those of the dataset's column of that name."""
    if not isinstance(given, str):
        return given
    known = getattr(dataset, "column_names", None)
    if known is not None and given not in known:
        raise InputError(
            f"the dataset has no column {given!r} for {name}", "lengths", f"its columns are {', '.join(known)}"
        )
    try:
        return dataset[given]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InputError(
            f"the dataset gives no column {given!r} for {name}: {type(error).__name__}", "lengths",
            "give the numbers themselves, one for each sample, or a function of a sample's number",
        ) from error  # fmt: skip


def _checked(columns: Mapping[str, Any], count: int, whose: str) -> Lengths:
    if TOKENS not in columns:
        raise InputError(
            f"there is no column {TOKENS!r} among {', '.join(map(str, columns)) or 'none'}", "lengths", REMEDY
        )
    numbers = {name: _numbers(name, column, count, whose) for name, column in columns.items()}
    tokens = numbers.pop(TOKENS)
    if count and tokens.min() < 1:
        raise InputError(
            f"sample {int(tokens.argmin())} has no tokens", "lengths", "leave such samples out of the dataset"
        )
    units = np.stack(list(numbers.values()), axis=1) if numbers else np.zeros((count, 0))
    return Lengths(tokens, units, tuple(numbers))


def _numbers(name: str, column: Any, count: int, whose: str) -> Floats:
    try:
        found = np.asarray(list(column) if not hasattr(column, "__array__") else column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the column {name!r} holds something that is no number ({error})", "lengths", REMEDY
        ) from None
    if found.ndim != 1 or len(found) != count:
        raise InputError(
            f"there are {' x '.join(map(str, found.shape)) or 'no'} values of {name!r}, and {whose} {count} samples",
            "lengths", "give one number for each sample, in the dataset's order",
        )  # fmt: skip
    wrong = ~np.isfinite(found) | (found < 0) | (found != np.floor(found))
    if wrong.any():
        index = int(wrong.argmax())
        raise InputError(
            f"sample {index} has {found[index]:g} {name}", "lengths", "lengths are whole numbers of at least 0"
        )
    return found
