"""The examples of docs/masks.md run, and say what the page says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from csc.masks.gallery import NAMES, OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "masks.md").read_text()


def test_examples() -> None:
    there = torch.ones(1, 1500, dtype=torch.long)
    there[:, 1400:] = 0
    given: dict[str, Any] = {
        "torch": torch,
        "attention_mask": there,
        "ranges": torch.tensor([[[0, 576], [576, 1152]]]),
        "query_ids": torch.tensor([[0, 1, 1]]),
        "key_ids": torch.tensor([[0, 0, 1]]),
        "document": torch.arange(4096)[None].expand(2, -1) // 1000,
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) > 6
    for block in blocks:
        exec(block, given)
    mask = given["mask"]
    assert (mask.batch, mask.queries, mask.rules, mask.kinds) == (2, 4096, 1, None)


def test_every_name_is_on_the_page() -> None:
    assert [name for name in {*NAMES, *OPTIONS} if f"| `{name}` |" not in PAGE] == []
    assert set(re.findall(r"^csc mask (\S+)", PAGE, re.M)) == {"packed:16384,seed=2"}


def test_pictures_of_the_page_are_there() -> None:
    pictures = re.findall(r"\]\((images/[^)]*)\)", PAGE)
    assert len(pictures) == 2
    for name in pictures:
        assert (Path(__file__).parents[2] / "docs" / name).read_text().count("<svg") == 1
