"""Pictures show the tiles as they are: cells, and the words and colours of the files."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from csc import masks
from csc.errors import InputError
from csc.masks import gallery
from csc.masks.picture import EMPTY, picture, plot, ticks

PART = "{http://www.w3.org/2000/svg}"


def test_cells_of_a_picture() -> None:
    mask = masks.documents(masks.ids_of_lengths([300, 212, 88]))
    owner = torch.tensor([0, 1, 1, 0, 2])
    found = picture("three", mask, 128, owner, 4)
    dense = mask.dense()[0]
    assert (found.cell, tuple(found.cells.shape)) == (16, (38, 38))
    for y, x in [(0, 0), (0, 1), (7, 7), (7, 0), (18, 18), (20, 3), (37, 37), (37, 2), (33, 32)]:
        block = dense[y * 16 : y * 16 + 16, x * 16 : x * 16 + 16]
        row, column = y // 8, x // 8
        tile = dense[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
        code = EMPTY if not tile.any() else 1 + 2 * int(owner[row]) + (2 * int(block.sum()) >= block.numel())
        assert int(found.cells[y, x]) == code, (y, x)
    assert found.visible == int(dense.sum())
    tiles = [[bool(dense[y : y + 128, x : x + 128].any()) for x in range(0, 600, 128)] for y in range(0, 600, 128)]
    assert found.loads == tuple(sum(sum(row) for row, rank in zip(tiles, owner) if rank == r) for r in range(4))


def test_a_cross_attention_has_two_axes(tmp_path: Path) -> None:
    mask = masks.cross_documents(masks.ids_of_lengths([100, 200]), masks.ids_of_lengths([40, 20]))
    found = picture("cross", mask, 16)
    plot(found, tmp_path / "a.svg", "svg")
    assert "300 queries, 60 keys" in (tmp_path / "a.svg").read_text()
    assert found.runs == ([(0, 300, 0)], [(0, 60, 0)])


def test_svg_is_small_and_stands_alone(tmp_path: Path) -> None:
    example = gallery.example("packed", 131072, 1)
    owner = torch.arange(1024) % 16
    found = picture("<packed> & more", example.mask, 128, owner, 16, example.types[0], example.documents[0])
    assert found.cells.shape == (1024, 1024)
    for name in ("a.svg", "b.svg"):
        plot(found, tmp_path / name, "svg")
    text = (tmp_path / "a.svg").read_text()
    assert len(text) < 300_000 and text == (tmp_path / "b.svg").read_text()
    root = ET.fromstring(text)
    assert not re.search(r"href=\"(?!#|data:)|<script|@import", text)
    words = [node.text for node in root.iter(f"{PART}text")]
    assert {
        "<packed> & more",
        "queries",
        "keys",
        "tiles",
        "tokens",
        "text",
        "image",
        "audio",
        "16k",
        "tiles by rank",
    } <= set(words)
    full, partial, _ = found.tiles
    assert any(word and word.startswith(f"{full:,} (") for word in words)
    assert sum(found.loads) == full + partial


def test_ticks() -> None:
    for tokens in (1, 7, 57, 600, 4096, 8191):
        step, label = ticks(tokens)
        assert tokens / step <= 8 and label(step) == f"{step:,}"
    step, label = ticks(131072)
    assert (step, label(0), label(step)) == (16384, "0", "16k")


def test_too_many_tiles() -> None:
    with pytest.raises(InputError, match=r"2048 x 2048 tiles are too many for a picture\. Take blocks of 128 tokens"):
        picture("causal", masks.causal(131072), 64)


def test_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.image import imread

    example = gallery.example("packed", 2048, 1)
    owner = torch.arange(16) % 4
    file = tmp_path / "mask.png"
    plot(picture("packed", example.mask, 128, owner, 4, example.types[0], example.documents[0]), file, "png")
    pixels = torch.from_numpy(imread(file)[..., :3])
    blue = torch.tensor([0x00, 0x72, 0xB2]) / 255  # rank 0
    assert int((pixels - blue).abs().amax(-1).lt(0.02).sum()) > 500
    with pytest.raises(InputError, match="cannot be written"):
        plot(picture("causal", masks.causal(99)), tmp_path / "missing" / "mask.png", "png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="needs matplotlib, which is not installed"):
        plot(picture("causal", masks.causal(99)), file, "svg")
