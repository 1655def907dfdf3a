"""The named masks follow their definitions, and short texts say what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from csc import masks
from csc.errors import InputError
from csc.masks import gallery
from csc.masks.gallery import parse

# Visible pairs at 128k tokens over several seeds: what the tables say, and how far a seed may be from it.
SHARES = {
    "causal": (0.500, 0.001),
    "prefix_lm": (0.570, 0.001),
    "encoder_prepended": (0.531, 0.001),
    "interleaved_modality": (0.424, 0.06),
    "interleaved_span": (0.176, 0.04),
    "interleaved_prefix": (0.503, 0.002),
    "packed": (0.015, 0.008),
    "audio_visual": (0.502, 0.001),
    "long_tail": (0.090, 0.09),
    "giant": (0.127, 0.002),
    "generation": (0.188, 0.03),
}


@pytest.mark.parametrize("name", gallery.NAMES)
def test_named_masks(name: str) -> None:
    share, near = SHARES[name]
    for seed in range(3):
        found = gallery.example(name, 131072, seed)
        assert abs(masks.share(found.mask) - share) < near
        assert found.mask.rules <= 2
    again = gallery.example(name, 131072, 2)
    assert torch.equal(again.mask.ranges, found.mask.ranges)
    for tokens in (1, 2, 7, 600, 1000):
        small = gallery.example(name, tokens, 1)
        assert small.mask.queries == small.mask.keys == tokens == small.types.shape[1] == small.documents.shape[1]
        assert bool(small.mask.dense()[0].diagonal().all())  # everyone sees itself


@pytest.mark.parametrize(
    "name", ["interleaved_modality", "interleaved_span", "interleaved_prefix", "packed", "generation"]
)
def test_named_masks_pair_by_pair(name: str) -> None:
    found = gallery.example(name, 3000, 4)
    kind, span, document = found.types[0], found.span_ids[0], found.documents[0]
    at = torch.arange(3000)
    q, k = at[:, None], at[None]
    text = (kind == 0)[:, None]
    own = (span[:, None] == span) & ~text
    same = kind[:, None] == kind
    expected = {
        "interleaved_modality": (text & (k <= q)) | (~text & same),
        "interleaved_span": (text & (k <= q)) | own,
        "interleaved_prefix": (k <= q) | own,
        "packed": ((text & (k <= q)) | own) & (document[:, None] == document),
        "generation": ((k <= q) & (kind != gallery.NOISED)) | own,
    }[name]
    assert len(kind.unique()) > 1
    assert torch.equal(found.mask.dense()[0], expected)


def test_texts() -> None:
    lengths = masks.ids_of_lengths([5, 7, 3])
    same = [
        ("causal:9", masks.causal(9)),
        ("causal:5+7+3", masks.documents(lengths)),
        ("bidirectional:5+7+3", masks.documents(lengths, bidirectional=True)),
        ("window:30,width=4", masks.window(30, 4)),
        ("window:30,width=4,symmetric", masks.window(30, 4, symmetric=True)),
        ("window:5+7+3,width=4", masks.within(masks.window(15, 4), lengths)),
        ("prefix:12,length=5", masks.prefix(12, 5)),
        ("packed:900,seed=3", gallery.example("packed", 900, 3).mask),
    ]
    for text, mask in same:
        assert torch.equal(parse(text).mask.dense(), mask.dense()), text
    found = parse("spans:20,image=2..5+7..9,noised=11..14,earlier=text")
    assert found.types[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 3, 3, 3, *[0] * 6]
    see = masks.Sees("span", "text")
    expected = masks.spans(found.types, found.span_ids, {1: see, 3: masks.Sees("span", "text", hidden=True)})
    assert torch.equal(found.mask.dense(), expected.dense())
    assert not bool(found.mask.dense()[0, 14:, 11:14].any())


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"

    def said(content: object) -> torch.Tensor:
        file.write_text(json.dumps(content))
        return parse(str(file)).mask.dense()

    fields = [1, 3, 2, 2, 0]
    assert torch.equal(said({"bitfields": fields}), masks.bitfields([fields]).dense())
    assert parse(str(file)).types.tolist() == [[0, 0, 1, 1, -1]]
    assert torch.equal(said({"attention_mask": [1, 1, 0]}), masks.padding([[1, 1, 0]]).dense())
    assert torch.equal(said({"position_ids": [0, 1, 0]}), masks.documents([[0, 0, 1]]).dense())
    types, numbers, ids = [0, 1, 1, 0, 1], [0, 1, 1, 0, 2], [0, 0, 0, 1, 1]
    content = {
        "types": types,
        "spans": numbers,
        "documents": ids,
        "sees": {"1": {"own": "modality", "earlier": "text"}},
    }
    expected = masks.spans(types, numbers, {1: masks.Sees("modality", "text")}, ids)
    assert torch.equal(said(content), expected.dense())
    for wrong in ({"types": types, "size": 3}, {}, [1], {"types": types, "sees": {"1": {"all": 1}}}):
        with pytest.raises(InputError, match=r"mask\.json"):
            said(wrong)
    with pytest.raises(InputError, match="cannot be read as JSON"):
        parse(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diagonal:12", "'diagonal' is no mask"),
        ("causal", "'causal' is no mask"),
        ("causal:", "'' is no whole number"),
        ("causal:-3", "'-3' is no whole number"),
        ("causal:12,width=3", "'width=3' is not understood. causal takes seed"),
        ("window:12", "window needs width=N"),
        ("window:12,width=3,width=4", "'width=4' is not understood"),
        ("spans:12,image=3", "'3' is no span"),
        ("spans:12,image=3..15", r"\[3, 15\): it is empty or outside"),
        ("spans:12,image=3..8,audio=5..9", "overlaps"),
        ("spans:12,own=all", "sees 'all' of its own"),
        ("packed:9000+500", "packed makes documents of its own"),
    ],
)
def test_texts_that_say_nothing(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text)
