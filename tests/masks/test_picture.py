"""Pictures show the tiles as they are: cells, rectangles, and the elements of the SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csc import masks
from csc.errors import InputError
from csc.masks import named
from csc.masks.picture import EMPTY, picture, rectangles, ticks
from csc.masks.png import png
from csc.masks.svg import svg

PART = "{http://www.w3.org/2000/svg}"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32), st.integers(1, 3))
def test_rectangles_cover_the_cells_once(rows: int, columns: int, seed: int, most: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(0, most + 1, (rows, columns), generator=generator)
    cells = cells.repeat_interleave(2, 0)
    drawn = torch.zeros_like(cells)
    for code, boxes in rectangles(cells).items():
        for x, y, wide, high in boxes:
            part = drawn[y : y + high, x : x + wide]
            assert part.shape == (high, wide) and bool((part == EMPTY).all())
            part += code
    assert torch.equal(drawn, cells)


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


def test_a_cross_attention_has_two_axes() -> None:
    mask = masks.cross_documents(masks.ids_of_lengths([100, 200]), masks.ids_of_lengths([40, 20]))
    found = picture("cross", mask, 16)
    text = svg(found)
    assert "300 queries, 60 keys" in text
    assert found.runs == ([(0, 300, 0)], [(0, 60, 0)])


def test_svg_is_small_and_stands_alone() -> None:
    example = named.example("packed", 131072, 1)
    owner = torch.arange(1024) % 16
    found = picture("<packed> & more", example.mask, 128, owner, 16, example.types[0], example.documents[0])
    assert found.cells.shape == (1024, 1024)
    text = svg(found)
    assert len(text) < 300_000
    root = ET.fromstring(text)
    assert root.findtext(f"{PART}title") == "<packed> & more"
    assert not re.search(r"href|<script|url\(|@import", text)
    words = [node.text for node in root.iter(f"{PART}text")]
    assert {"queries", "keys", "tiles", "tokens", "text", "image", "audio", "16k", "tiles by rank"} <= set(words)
    full, partial, _ = found.tiles
    assert any(word and word.startswith(f"{full:,} (") for word in words)
    assert sum(found.loads) == full + partial


def test_paths_of_the_svg_add_up() -> None:
    """The area of all paths is that of the cells that are not empty, short ones at the edge included."""
    example = named.example("generation", 1000, 1)
    found = picture("generation", example.mask, 64)
    area = 0.0
    for path in re.findall(r'<path fill="#[^>]* d="([^"]*)"/>', svg(found).split("<g ")[1].split("</g>")[0]):
        for wide, high in re.findall(r"h([\d.]+)v([\d.]+)H", path):
            area += float(wide) * float(high)
    sides = torch.full((found.cells.shape[0],), 1.0)
    sides[-1] = 1000 / found.cell - (len(sides) - 1)
    assert area == pytest.approx(float(((found.cells != EMPTY) * sides[:, None] * sides).sum()))


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

    example = named.example("packed", 2048, 1)
    owner = torch.arange(16) % 4
    file = tmp_path / "mask.png"
    png(picture("packed", example.mask, 128, owner, 4, example.types[0], example.documents[0]), file)
    pixels = torch.from_numpy(imread(file)[..., :3])
    blue = torch.tensor([0x00, 0x72, 0xB2]) / 255  # rank 0
    assert int((pixels - blue).abs().amax(-1).lt(0.02).sum()) > 500
    with pytest.raises(InputError, match="cannot be written"):
        png(picture("causal", masks.causal(99)), tmp_path / "missing" / "mask.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="needs matplotlib, which is not installed"):
        png(picture("causal", masks.causal(99)), file)
