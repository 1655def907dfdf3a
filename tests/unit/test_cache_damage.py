"""Entries of the cache with random damage: each is what was written, or missing."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from csc.cache.store import Store
from tests.damage import FAST, SLOW, changed_bytes, changed_tree

FILES = {"program/rank_0.py": b"x = 1\n", "places.json": b"{}", "guards.json": b"[1, 2]"}


def tried(folder: Path, seed: int) -> None:
    """One change somewhere in an entry."""
    kept, draw = Store(folder / str(seed)), random.Random(seed)
    kept.write("program", "abc", FILES, {"name": "Net"})
    file = draw.choice([one for one in sorted(kept.folder.rglob("*")) if one.is_file()])
    content = file.read_bytes()
    if file.name == "entry.json" and draw.random() < 0.5:
        file.write_text(json.dumps(changed_tree(draw, json.loads(content))))
    else:
        file.write_bytes(changed_bytes(draw, content))
    assert len(kept.entries()) == 1
    assert kept.read("program", "abc") in (None, FILES), seed
    assert kept.write("program", "abc", FILES, {}) and kept.read("program", "abc") == FILES, seed


def test_damage(tmp_path: Path) -> None:
    for seed in range(FAST):
        tried(tmp_path, seed)


@pytest.mark.slow
def test_much_damage(tmp_path: Path) -> None:
    for seed in range(FAST, FAST + SLOW):
        tried(tmp_path, seed)


@pytest.mark.parametrize("name", ["entry.json", "places.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_something_else_in_place_of_a_file(name: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.write("program", "abc", FILES, {})
    file = tmp_path / "program-abc" / name
    file.unlink()
    make(file)
    assert len(kept.entries()) == 1 and kept.read("program", "abc") is None
