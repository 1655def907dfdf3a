"""Every builder equals its meaning, asked of each pair of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csc import masks
from csc.errors import InputError
from tests.masks.cases import document_lengths, pairwise, pieces, row_of, same

FEW = settings(max_examples=40, deadline=None)


@FEW
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 24))
def test_masks_of_sizes(tokens: int, keys: int, width: int) -> None:
    assert same(masks.causal(tokens), pairwise(1, tokens, tokens, lambda b, q, k: k <= q))
    assert same(masks.bidirectional(tokens, keys), pairwise(1, tokens, keys, lambda b, q, k: True))
    near = pairwise(1, tokens, tokens, lambda b, q, k: k <= q and q - k < width)
    assert same(masks.window(tokens, width), near)
    assert same(
        masks.window(tokens, width, symmetric=True), pairwise(1, tokens, tokens, lambda b, q, k: abs(q - k) < width)
    )


@FEW
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_prefix_by_row(lengths: list[int]) -> None:
    expected = pairwise(len(lengths), 12, 12, lambda b, q, k: k <= q or k < lengths[b])
    assert same(masks.prefix(12, lengths), expected)
    assert same(masks.prefix(12, torch.tensor(lengths)), expected)


@FEW
@given(document_lengths(), st.booleans())
def test_documents_from_lengths_positions_and_ids(lengths: list[int], bidirectional: bool) -> None:
    ids = [d for d, n in enumerate(lengths) for _ in range(n)]
    positions = [t for n in lengths for t in range(n)]
    total = len(ids)
    expected = pairwise(1, total, total, lambda b, q, k: ids[q] == ids[k] and (bidirectional or k <= q))
    assert masks.ids_of_lengths(lengths, total).tolist() == [ids]
    assert masks.ids_of_lengths(torch.tensor([lengths, lengths])).tolist() == [ids, ids]
    assert masks.ids_of_positions([positions]).tolist() == [ids]
    for table in (
        masks.ids_of_lengths([lengths]),
        masks.ids_of_positions(torch.tensor(positions)),
        torch.tensor([ids]),
    ):
        mask = masks.documents(table, bidirectional)
        assert same(mask, expected)
        assert mask.rules == 1 and mask.kinds is None


@FEW
@given(st.lists(st.lists(st.integers(0, 1), min_size=11, max_size=11), min_size=1, max_size=3), st.booleans())
def test_padding(there: list[list[int]], causal: bool) -> None:
    expected = pairwise(len(there), 11, 11, lambda b, q, k: there[b][q] and there[b][k] and (k <= q or not causal))
    assert same(masks.padding(torch.tensor(there), causal), expected)
    base = masks.window(11, 4)
    dense = base.dense().expand_as(expected) & masks.padding(there).dense()
    assert same(masks.padded(base, torch.tensor(there).bool()), dense)


def test_padding_at_an_end_needs_no_kinds() -> None:
    assert masks.padding([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], causal=True).kinds is None
    assert masks.padding([[1, 0, 1]]).kinds is not None


@FEW
@given(pieces(padding=False), st.data())
def test_within_documents(parts: list[tuple[int, int, int, bool]], data: Any) -> None:
    types, _, ids = row_of(parts)
    ids = [-1 if t == 1 else d for t, d in zip(types, ids)]  # padding in the middle tears a document
    mask = masks.window(len(ids), data.draw(st.integers(1, 9)), symmetric=True)
    whole = all(ids[a] != ids[b] or ids[a] < 0 or set(ids[a:b]) == {ids[a]} for b in range(len(ids)) for a in range(b))
    if not whole:
        with pytest.raises(InputError, match="goes on after another one"):
            masks.within(mask, [ids])
        return
    dense = mask.dense()
    assert same(
        masks.within(mask, [ids]),
        pairwise(1, len(ids), len(ids), lambda b, q, k: dense[0, q, k] and ids[q] == ids[k] >= 0),
    )


SEES = st.builds(
    masks.Sees,
    st.sampled_from(["span", "modality", "causal"]),
    st.one_of(
        st.sampled_from(["nothing", "text", "everything"]),
        st.lists(st.integers(0, 3), unique=True, max_size=3).map(tuple),
    ),
    st.booleans(),
)
TEXT_SEES = st.builds(
    masks.Sees,
    st.just("causal"),
    st.one_of(st.sampled_from(["nothing", "text", "everything"]), st.just((0, 2))),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(pieces(), min_size=1, max_size=2),
    st.dictionaries(st.integers(1, 3), SEES),
    st.one_of(st.none(), TEXT_SEES),
    st.booleans(),
)
def test_spans(rows: list[Any], sees: dict[int, masks.Sees], text: masks.Sees | None, packed: bool) -> None:
    found = [row_of(row) for row in rows]
    length = min(len(types) for types, _, _ in found)
    types, numbers, ids = ([row[i][:length] for row in found] for i in range(3))
    if packed:  # a document begins with a span or before it
        documents: Any = torch.tensor(ids)
    else:
        documents, ids = None, [[0] * length for _ in rows]
    if text is not None:
        sees = {**sees, 0: text}

    def visible(b: int, q: int, k: int) -> bool:
        mine, other = types[b][q], types[b][k]
        if mine < 0 or other < 0 or ids[b][q] != ids[b][k]:
            return False
        rule = sees.get(mine, masks.Sees("causal", "everything") if mine == 0 else masks.Sees())
        if mine == 0:
            if q == k:
                return True
            own, earlier = False, k < q
        else:
            span = numbers[b][q] == numbers[b][k]
            own = mine == other if rule.own == "modality" else span and (k <= q or rule.own == "span")
            earlier = k < q and not span
        if isinstance(rule.earlier, tuple):
            named = other in rule.earlier
        elif rule.earlier == "everything":
            named = other == 0 or not sees.get(other, masks.Sees()).hidden
        else:
            named = rule.earlier == "text" and other == 0
        return own or (earlier and named)

    mask = masks.spans(types, numbers, sees, documents)
    assert same(mask, pairwise(len(rows), length, length, visible))
    assert mask.rules <= 2


def test_the_usual_span_masks_are_small() -> None:
    types, numbers = masks.tokens_of(12, [(2, 5, 1), (5, 7, 1), (9, 12, 2)])
    assert types.tolist() == [[0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2]]
    assert numbers.tolist() == [[0, 0, 1, 1, 1, 2, 2, 0, 0, 3, 3, 3]]
    for sees in (masks.Sees(), masks.Sees("span", "everything")):
        mask = masks.spans(types, numbers, {1: sees, 2: sees})
        assert mask.rules == 1 and mask.kinds is None
    generation = masks.spans(types, numbers, {1: masks.Sees("span", "everything", hidden=True)})
    assert generation.rules == 2
    assert masks.spans([[0, 1, 1, 0, -1, -1]]).kinds is None  # padding at the end is left out by ranges


@FEW
@given(st.lists(st.lists(st.integers(-1, 4), min_size=9, max_size=9), min_size=1, max_size=2), document_lengths())
def test_cross_attention(asked: list[list[int]], lengths: list[int]) -> None:
    key_ids = [(d * 3 + 1) % 5 if d < 5 else -1 for d, n in enumerate(lengths) for _ in range(n)]
    expected = pairwise(len(asked), 9, len(key_ids), lambda b, q, k: asked[b][q] == key_ids[k] and key_ids[k] >= 0)
    assert same(masks.cross_documents(torch.tensor(asked), key_ids), expected)
    ranges = torch.stack([torch.tensor(asked).clamp(min=0), torch.tensor(asked).clamp(min=0) + 2], -1)
    expected = pairwise(len(asked), 9, 6, lambda b, q, k: max(asked[b][q], 0) <= k < max(asked[b][q], 0) + 2)
    assert same(masks.cross(ranges, 6), expected)


def cornstarch(fields: list[list[int]]) -> torch.Tensor:
    """Its definition, pair by pair."""
    labels = [[x & (2**62 - 1) for x in row] for row in fields]

    def visible(b: int, q: int, k: int) -> bool:
        mine, other = labels[b][q], labels[b][k]
        return (q >= k and mine & other != 0) if mine & 1 else (mine == other and mine > 0)

    return pairwise(len(fields), len(fields[0]), len(fields[0]), visible)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 1 << 61, 1 << 62, -1, (1 << 61) + 1]), min_size=13, max_size=13),
        min_size=1,
        max_size=2,
    )
)
def test_bitfields(fields: list[list[int]]) -> None:
    mask = masks.bitfields(torch.tensor(fields))
    assert same(mask, cornstarch(fields))
    assert mask.rules == 1


def test_bitfields_of_the_published_check() -> None:
    fields = torch.full((1, 64), 0b111)
    fields[:, 12:24] = 0b010
    expected = torch.ones(64, 64).tril().bool()
    expected[12:24] = False
    expected[12:24, 12:24] = True
    assert torch.equal(masks.bitfields(fields).dense()[0], expected)


@pytest.mark.parametrize("length", [57, 600, 1000])
def test_lengths_that_no_tile_divides(length: int) -> None:
    """Text, two images of one modality and padding after the merge, at lengths that are no multiple of a tile."""
    a, b = length // 5, length // 2
    types, numbers = masks.tokens_of(length, [(10, 10 + a, 1), (10 + a, b, 1), (length - 7, length - 3, 2)])
    types[:, -3:] = -1
    mask = masks.spans(types, numbers, {1: masks.Sees("span", "text"), 2: masks.Sees("span", "everything", True)})
    slot = torch.arange(length)
    span = numbers[0]
    text, q, k = types[0] == 0, slot[:, None], slot[None]
    seen = (k <= q) & text[:, None] & (types[0] != 2)
    seen |= (span[:, None] == span) & (types[0][:, None] > 0)
    seen |= (types[0][:, None] == 1) & text & (k < q)
    seen |= (types[0][:, None] == 2) & (k < q)
    there = types[0] >= 0
    assert torch.equal(mask.dense()[0], seen & there & there[:, None])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.causal(0), "tokens is 0"),
        (lambda: masks.window(8, 0), "window of width 0"),
        (lambda: masks.prefix(8, [3, 9]), "lengths, row 1, position 0: a prefix of 9 in 8 tokens"),
        (lambda: masks.ids_of_lengths([[3, 5], [4, 3]], 8), "row 1: the lengths of documents sum to 7, and"),
        (lambda: masks.ids_of_lengths([3, 0]), "row 0: length 1 is 0"),
        (lambda: masks.ids_of_positions([[0, 1, 2, 4]]), "row 0, position 3: 4 neither follows"),
        (lambda: masks.documents([[0, 0, 1, 0]]), "row 0, position 3: document 0 goes on after another one"),
        (lambda: masks.documents([[0.0, 1.0]]), "dtype is torch.float32"),
        (lambda: masks.documents([[[0, 1]]]), r"shape is \[1, 1, 2\]"),
        (lambda: masks.padding([[1, 2]]), "row 0, position 1: 2 says neither"),
        (lambda: masks.padded(masks.causal(3), [[1, 1]]), r"the mask is \[1, 3\] and attention_mask is \[1, 2\]"),
        (lambda: masks.within(masks.bidirectional(2, 3), [[0, 0]]), "the mask is 2 x 3"),
        (lambda: masks.spans([[0, 1, 0, 1]], [[0, 5, 0, 5]]), "row 0, position 3: span 5 of type 1 goes on"),
        (lambda: masks.spans([[0, 1, 1]], [[0, 5, 5]], documents=[[0, 0, 1]]), "new document starts inside of span 5"),
        (lambda: masks.spans([[0, 99]]), "row 0, position 1: type 99"),
        (lambda: masks.spans([[0, 1]], sees={0: masks.Sees("span")}), "text sees 'span'"),
        (lambda: masks.spans([[0, 1]], sees={1: masks.Sees("image")}), "type 1 sees 'image'"),  # type: ignore[arg-type]
        (lambda: masks.spans([[0, 1]], sees={1: masks.Sees("span", (0, -1))}), r"type 1 sees \(0, -1\) before it"),
        (lambda: masks.spans([[0, 1]], sees={0: masks.Sees("causal", hidden=True)}), "text is hidden"),
        (lambda: masks.spans([[0, 1]], [[0, 1, 1]]), r"types is \[1, 2\] and span_ids is \[1, 3\]"),
        (lambda: masks.tokens_of(9, [[], [(5, 7, 1), (2, 6, 2)]]), r"row 1, span 0 at \[5, 7\): it overlaps span 1"),
        (lambda: masks.tokens_of(9, [(5, 12, 1)]), "row 0, span 0"),
        (lambda: masks.cross([[0, 3], [2, 9]], 8), r"row 0, position 1: \[2, 9\) is no range of the 8 keys"),
        (lambda: masks.cross_documents([[0, 1]], [[0, 1, 0]]), "key_ids, row 0, position 2: document 0"),
        (lambda: masks.bitfields(torch.arange(2, 140, 2)[None]), "69 different labels, and 63"),
        (lambda: masks.bitfields(torch.zeros(1, 3)), "bitfields: its dtype is torch.float32"),
    ],
)  # fmt: skip
def test_errors_say_where(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
