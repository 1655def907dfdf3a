"""Sets of key blocks as bits, 64 in a word.

Terms: *columns* of sets: uint64 [W, n], set i is column i. Work on all sets then runs along memory.

    pack(bool [n, K]) -> uint64 [W, n];   unpack(uint64 [W, n], K) -> bool [n, K]
    size(uint64 [W, n]) -> int64 [n]
    windows(uint64 [W, n], length) -> uint64 [W, n]: unions of all cyclic windows of that many columns
"""

from __future__ import annotations

import numpy as np

_ONES = np.array([bin(i).count("1") for i in range(1 << 8)], np.uint8)


def pack(rows: np.ndarray) -> np.ndarray:
    """Columns of the sets that the rows of a boolean matrix are."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    padded = np.zeros((len(rows), -(-rows.shape[1] // 64) * 8), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return np.ascontiguousarray(padded.view("<u8").T)


def unpack(columns: np.ndarray, keys: int) -> np.ndarray:
    """The boolean matrix of columns of sets."""
    as_bytes = np.ascontiguousarray(columns.T).view(np.uint8)
    return np.unpackbits(as_bytes, axis=1, count=keys, bitorder="little").view(bool)


def _ones_by_table(columns: np.ndarray) -> np.ndarray:
    """Bits of every word, for a numpy (before 2.0) that does not count them itself."""
    return _ONES[np.ascontiguousarray(columns)[..., None].view(np.uint8)].sum(axis=-1, dtype=np.uint8)


_ones = getattr(np, "bitwise_count", _ones_by_table)


def size(columns: np.ndarray) -> np.ndarray:
    """How many members each set has."""
    return _ones(columns).sum(axis=0, dtype=np.int64)


def windows(columns: np.ndarray, length: int) -> np.ndarray:
    """Column i of the result is the union of columns i, i + 1, ..., i + length - 1, counted in a circle.

    Two running unions per stretch of `length` columns, one from its start and one from its end; every window is the
    tail of one stretch and the head of the next (van Herk 1992).
    """
    words, n = columns.shape
    stretches = -(-(n + length - 1) // length)
    at = np.arange(stretches * length) % n
    line = columns[:, at].reshape(words, stretches, length)
    heads = np.bitwise_or.accumulate(line, axis=2).reshape(words, -1)
    tails = np.bitwise_or.accumulate(line[:, :, ::-1], axis=2)[:, :, ::-1].reshape(words, -1)
    return tails[:, :n] | heads[:, length - 1 : length - 1 + n]
