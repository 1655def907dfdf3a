"""Random inputs for builders, and masks written out pair by pair: the plain meaning that the fast ones must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from csc.kernels.mask import Mask
from hypothesis import strategies as st


def pairwise(batch: int, queries: int, keys: int, sees: Callable[[int, int, int], bool]) -> torch.Tensor:
    """bool [B, Tq, Tk] from a question about one pair: sees(b, q, k)."""
    rows = [[[bool(sees(b, q, k)) for k in range(keys)] for q in range(queries)] for b in range(batch)]
    return torch.tensor(rows).view(batch, queries, keys)


def same(mask: Mask, dense: torch.Tensor) -> bool:
    return torch.equal(mask.dense().expand_as(dense), dense)


@st.composite
def document_lengths(draw: st.DrawFn, most: int = 24) -> list[int]:
    """Lengths of the documents of one row."""
    return draw(st.lists(st.integers(1, 9), min_size=1, max_size=most // 4))


@st.composite
def pieces(draw: st.DrawFn, most: int = 10, types: int = 3, padding: bool = True) -> list[tuple[int, int, int, bool]]:
    """A row of pieces (type, span number, length, starts a document): text, media of 1..types, padding as type -1.

    Two neighbours may be spans of one type; a span number is not used twice.
    """
    kinds = [0, 0, *range(1, types + 1), *([-1] if padding else [])]
    count = draw(st.integers(1, most))
    return [
        (draw(st.sampled_from(kinds)), i, draw(st.integers(1, 5)), i == 0 or draw(st.integers(0, 3)) == 0)
        for i in range(count)
    ]


def row_of(parts: list[tuple[int, int, int, bool]]) -> tuple[list[int], list[int], list[int]]:
    """(types, span numbers, document ids) token by token."""
    types: list[int] = []
    numbers: list[int] = []
    ids: list[int] = []
    document = -1
    for kind, number, length, opens in parts:
        document += opens
        types += [kind] * length
        numbers += [number] * length
        ids += [document] * length
    return types, numbers, ids
