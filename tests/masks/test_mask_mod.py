"""Masks read from FlexAttention's functions equal the dense masks that FlexAttention makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

from csc import masks
from csc.errors import InputError
from csc.masks import mask_mod as module

B, Q, K = 2, 11, 9


def dense(function: Callable[..., Any], batch: int = B, queries: int = Q, keys: int = K) -> torch.Tensor:
    return create_mask(function, batch, 1, queries, keys, device="cpu")[:, 0]


def equal(function: Callable[..., Any], batch: int = B, queries: int = Q, keys: int = K) -> masks.Mask:
    expected = dense(function, batch, queries, keys)
    found = masks.from_mask_mod(function, batch, queries, keys)
    assert torch.equal(found.dense().expand_as(expected), expected)
    return found


DOCUMENT = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
SHUFFLED = torch.tensor([4, 4, 1, 1, 1, 3, 3, 0, 0, 2, 2])
TORN = torch.tensor([4, 1, 4, 1, 1, 3, 0, 3, 0, 2, 4])
BY_ROW = torch.stack([DOCUMENT, TORN])
TEXT = torch.tensor([True, True, False, False, True, True, False, True, False, True, True])
LENGTH = torch.tensor([4, 9])
IMAGES = torch.tensor([-1, 3, 3, -1, -1, 0, 0, 0, -1, 2, 2])


def image(index: Any) -> Any:
    return IMAGES[index] >= 0


FUNCTIONS: dict[str, tuple[Callable[..., Any], int | None, bool]] = {  # function, rules, kinds
    "causal": (lambda b, h, q, k: q >= k, 1, False),
    "shifted": (lambda b, h, q, k: q - 2 >= k + 1, 1, False),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 4), 1, False),
    "symmetric window": (lambda b, h, q, k: torch.abs(q - k) <= 3, 1, False),
    "outside of a window": (lambda b, h, q, k: (q - k).abs() > 3, 2, False),
    "distance": (lambda b, h, q, k: abs(k - q) == 2, 2, False),
    "prefix": (lambda b, h, q, k: (q >= k) | (k < 5), 1, False),
    "prefix by row": (or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < LENGTH[b]), 1, False),
    "padding": (lambda b, h, q, k: (k < LENGTH[b]) & (q < LENGTH[b]), 1, False),
    "documents": (and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k]), 1, False),
    "documents in any order": (lambda b, h, q, k: SHUFFLED[q] == SHUFFLED[k], 1, False),
    "torn groups": (lambda b, h, q, k: TORN[q] == TORN[k], 1, True),
    "other groups": (lambda b, h, q, k: TORN[q] != TORN[k], 1, True),
    "other documents": (lambda b, h, q, k: DOCUMENT[q] != DOCUMENT[k], 2, False),
    "by row": (lambda b, h, q, k: (BY_ROW[b, q] == BY_ROW[b, k]) & (k <= q), 1, True),
    "by row in two steps": (lambda b, h, q, k: BY_ROW[b][q] == BY_ROW[b][k], 1, True),
    "text": (lambda b, h, q, k: torch.where(TEXT[q], q >= k, TEXT[k] & (q - k < 3)), None, True),
    "modalities": (lambda b, h, q, k: (TEXT[q] & (k <= q)) | (~TEXT[q] & ~TEXT[k]), 1, True),
    "same modality": (lambda b, h, q, k: TEXT[q] == TEXT[k], 1, True),
    "either": (lambda b, h, q, k: TEXT[q] ^ TEXT[k], 1, True),
    "either of pairs": (lambda b, h, q, k: (q >= k) ^ (DOCUMENT[q] == DOCUMENT[k]), None, False),
    "blocks": (lambda b, h, q, k: q // 4 >= k // 4, 1, False),
    "block diagonal": (lambda b, h, q, k: q // 4 == torch.div(k, 4, rounding_mode="floor"), 1, False),
    "strided": (lambda b, h, q, k: q % 3 == k % 3, 1, True),
    "order of groups": (lambda b, h, q, k: TORN[q] < TORN[k], 1, True),
    "two groupings": (lambda b, h, q, k: (TORN[q] == TORN[k]) & (TEXT[q] == TEXT[k]) & (k % 2 == 0), 1, True),
    "queries later": (lambda b, h, q, k: q + 5 - LENGTH[b] >= k, 1, False),
    "in chosen groups": (lambda b, h, q, k: torch.isin(TORN[k], torch.tensor([4, 3])) & (q >= k), 1, True),
    "all": (lambda b, h, q, k: b.new_ones((), dtype=torch.bool) & (q >= 0), 1, False),
    "none": (lambda b, h, q, k: (q >= k) & (q < k), None, False),
    "reversed": (lambda b, h, q, k: 10 - k >= q, 1, False),
    "clamped": (lambda b, h, q, k: torch.maximum(q, LENGTH[b]) > k, 1, False),
    "not causal": (lambda b, h, q, k: torch.logical_not(q >= k), 1, False),
    "scaled": (lambda b, h, q, k: 2 * k <= q, 1, False),
    "images between text": (lambda b, h, q, k: (q >= k) | ((IMAGES[q] == IMAGES[k]) & (IMAGES[q] >= 0)), 1, False),
    "images, both asked": (lambda b, h, q, k: (q >= k) | (image(q) & image(k) & (IMAGES[q] == IMAGES[k])), 1, False),
    "text too": (lambda b, h, q, k: (q >= k) | (IMAGES[q] == IMAGES[k]), 2, True),
    "of a difference": (lambda b, h, q, k: -(q - k) * 2 >= -7, 1, False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function, rules, kinds = FUNCTIONS[name]
    found = equal(function)
    assert (found.kinds is not None) == kinds
    assert rules is None or found.rules == rules


def comparison(draw: st.DrawFn) -> Callable[..., Any]:
    """One condition about a query, a key or both."""
    shift, kind = draw(st.integers(-4, 4)), draw(st.integers(0, 11))
    table = draw(st.sampled_from([DOCUMENT, SHUFFLED, TORN]))
    conditions: list[Callable[..., Any]] = [
        lambda b, h, q, k: q + shift >= k,
        lambda b, h, q, k: q - k < shift,
        lambda b, h, q, k: (q - k).abs() <= shift,
        lambda b, h, q, k: (q - k).abs() > shift + 3,
        lambda b, h, q, k: table[q] == table[k] + shift // 3,
        lambda b, h, q, k: table[q] != table[k],
        lambda b, h, q, k: table[k] <= table[q],
        lambda b, h, q, k: TEXT[k],
        lambda b, h, q, k: TEXT[q] & (b == shift % 2),
        lambda b, h, q, k: k + shift < LENGTH[b],
        lambda b, h, q, k: BY_ROW[b, q] == BY_ROW[b][k],
        lambda b, h, q, k: q // 3 != k // 3 + shift // 2,
    ]
    return conditions[kind]


@st.composite
def functions(draw: st.DrawFn, depth: int = 3) -> Callable[..., Any]:
    """Conditions joined by and, or, not, xor and where."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return comparison(draw)
    one, two = draw(functions(depth - 1)), draw(functions(depth - 1))
    kind = draw(st.integers(0, 5))
    joined: list[Callable[..., Any]] = [
        lambda b, h, q, k: one(b, h, q, k) & two(b, h, q, k),
        lambda b, h, q, k: one(b, h, q, k) | two(b, h, q, k),
        lambda b, h, q, k: ~one(b, h, q, k),
        lambda b, h, q, k: one(b, h, q, k) ^ two(b, h, q, k),
        lambda b, h, q, k: torch.where(one(b, h, q, k), two(b, h, q, k), ~two(b, h, q, k)),
        lambda b, h, q, k: torch.logical_and(one(b, h, q, k), torch.logical_not(two(b, h, q, k))),
    ]
    return joined[kind]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(functions())
def test_random_functions(function: Callable[..., Any]) -> None:
    try:
        found = masks.from_mask_mod(function, B, Q, K)
    except InputError as error:  # too much for the form, said so; and the other way around never
        assert "is the limit" in str(error) or "multiplied out" in str(error) or "more than" in str(error)
        return
    assert torch.equal(found.dense().expand(B, Q, K), dense(function))


def test_most_random_functions_fit() -> None:
    """The property above may not be empty."""
    fits = []

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(functions(2))
    def count(function: Callable[..., Any]) -> None:
        try:
            masks.from_mask_mod(function, B, Q, K)
        except InputError:
            fits.append(False)
        else:
            fits.append(True)

    count()
    assert sum(fits) > 0.9 * len(fits)


def test_a_long_function_is_sampled() -> None:
    document = torch.arange(3000) // 700
    mask = masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (document[q] == document[k]), None, 3000)
    lengths = [700, 700, 700, 700, 200]
    assert torch.equal(mask.ranges, masks.documents(masks.ids_of_lengths(lengths)).ranges)


def branches(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k if q > 3 else k < 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, q, k: (q + k) % 2 == 0, "remainder is used on a number of the query and a number of the key"),
        (lambda b, h, q, k: (q >= k) & (h < 2), "lt uses the head"),
        (lambda b, h, q, k: LENGTH[h] > k, "indexed by the head"),
        (lambda b, h, q, k: h, "the result depends on the head"),
        (lambda b, h, q, k: q * k > 6, "mul multiplies a number of the query with one of the key"),
        (lambda b, h, q, k: torch.eye(11)[q, k] > 0, "getitem reads a table of queries by keys"),
        (lambda b, h, q, k: torch.eye(11)[q - k] > 0, "getitem has an index that is no number of the query or of"),
        (lambda b, h, q, k: torch.eye(11)[q] > k, "is of a table that is not indexed to a number"),
        (lambda b, h, q, k: torch.linspace(0, 1, 11)[q] > torch.linspace(0, 1, 11)[k], "is of torch.float32 numbers"),
        (lambda b, h, q, k: q.float().sin() > 0, "float is no operation on single indices"),
        (lambda b, h, q, k: k == TORN, r"eq gets a tensor \[11\] that is not indexed"),
        (lambda b, h, q, k: q - k, "takes a number for a condition"),
        (lambda b, h, q, k: DOCUMENT[q + 1] == 0, "an index leaves its table"),
        (lambda b, h, q, k: [1, 2][q] > k, "turns an index into a Python number"),
        (lambda b, h, q, k: q.add_(1) > k, "add_ changes a number in place"),
        (branches, "asks for the truth of a condition"),
        (lambda b, h, q, k: q.max() >= k, "max is used on all of a table"),
    ],
)
def test_what_has_no_rules_is_named(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        masks.from_mask_mod(function, B, Q)


def test_functions_of_transformers() -> None:
    """The mask functions that HF models hand to FlexAttention."""
    from transformers import masking_utils as hf

    there = torch.ones(2, 40, dtype=torch.bool)
    there[0, :5], there[1, -7:] = False, False
    packed = torch.tensor([[0] * 10 + [1] * 20 + [2] * 10] * 2)
    blocks = torch.full((2, 40), -1)
    blocks[:, 4:12], blocks[:, 13:20], blocks[1, 25:33] = 1, 0, 5
    for function, rules in (
        (hf.causal_mask_function, 1),
        (hf.bidirectional_mask_function, 1),
        (hf.sliding_window_causal_mask_function(7), 1),
        (hf.sliding_window_bidirectional_mask_function(7), 1),
        (hf.chunked_causal_mask_function(8, torch.tensor([5, 0])), 1),
        (hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(there)), 1),
        (hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(packed)), 1),
        (hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(blocks)), 1),
        (hf.add_offsets_to_mask_function(hf.causal_mask_function, 3, 1), 1),
    ):
        found = equal(function, 2, 40, 40)
        assert found.rules == rules and found.kinds is None


def test_many_images_need_no_kinds() -> None:
    blocks = torch.where(torch.arange(3000) % 10 < 4, -1, torch.arange(3000) // 10)
    mask = masks.from_mask_mod(lambda b, h, q, k: (q >= k) | ((blocks[q] == blocks[k]) & (blocks[q] >= 0)), None, 3000)
    assert torch.equal(
        mask.ranges, masks.spans((blocks >= 0).long(), None, {1: masks.Sees("span", "everything")}).ranges
    )


def test_too_many_kinds() -> None:
    scattered = torch.arange(200) % 100
    with pytest.raises(InputError, match="100 kinds of keys apart, and 63 is the limit"):
        masks.from_mask_mod(lambda b, h, q, k: scattered[q] == scattered[k], None, 200)


@pytest.mark.parametrize("size", [12, 300])
def test_a_mask_that_differs_is_an_error(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has teeth: a reading that is one off is found."""
    monkeypatch.setattr(module, "rules", lambda formula, queries, keys: masks.window(queries, 6))
    with pytest.raises(InputError, match="the function says False and the mask that was read from it True"):
        masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 5), None, size)
