"""`csc mask`: figures, dispatches, pictures, errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from csc import masks
from csc.commands.main import main
from csc.masks.gallery import parse


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["csc", "mask", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, monkeypatch, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures(capsys, monkeypatch, "causal:1000")
    assert found["visible_pairs"] == 1000 * 1001 // 2 == masks.area(parse("causal:1000").mask)
    assert found["visible_share"] == found["visible_pairs"] / 1e6
    assert found["tiles"] == {"full": 28, "partial": 8, "empty": 28}
    assert "ranks" not in found
    code, out, _ = run(capsys, monkeypatch, "causal:1000")
    assert code == 0 and "500,500 pairs visible (50.05%)" in out and "full 28" in out


@pytest.mark.parametrize("way", ["balanced", "contiguous", "zigzag"])
def test_ranks_share_the_tiles(way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures(capsys, monkeypatch, "packed:8100,seed=1", "--ranks", "4", "--dispatch", way)
    whole = parse("packed:8100,seed=1").mask
    rows = found["ranks"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert sum(row["blocks"] for row in rows) == 64
    assert sum(row["visible_pairs"] for row in rows) == masks.area(whole)
    assert sum(row["tiles"] for row in rows) == found["tiles"]["full"] + found["tiles"]["partial"]
    assert found["tiles_over_mean"] == max(row["tiles"] for row in rows) * 4 / sum(row["tiles"] for row in rows)
    remote = sum(row["remote_key_blocks"] for row in rows)
    assert found["remote_over_all_gather"] == remote / (64 * 3)
    assert all(row["remote_key_blocks"] <= row["needed_key_blocks"] for row in rows)


def test_zigzag_balances_a_causal_mask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("causal:8192", "--ranks", "4", "--dispatch")
    assert figures(capsys, monkeypatch, *words, "zigzag")["tiles_over_mean"] == 1.0
    assert figures(capsys, monkeypatch, *words, "contiguous")["tiles_over_mean"] > 1.7


@pytest.mark.slow
def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    words = ("generation:4096", "--ranks", "2", "--svg", str(svg), "--png", str(png))
    code, out, err = run(capsys, monkeypatch, *words)
    assert code == 0, err
    assert "wrote" in out and "balanced: the heaviest rank has " in out
    assert "<svg" in svg.read_text() and "generation:4096" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["diagonal:8"], "'diagonal' is no mask"),
        (["causal:300", "--ranks", "4"], "3 blocks of 128 queries cannot be shared by 4 ranks"),
        (["causal:300", "--svg", "/nowhere/a.svg"], "/nowhere/a.svg: it cannot be written"),
        (["causal:262144", "--block", "64", "--svg", "a.svg"], "too many for a picture"),
    ],
)
def test_errors(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, monkeypatch, *words)
    assert code == 2 and message in " ".join(err.split())


def test_why_the_uneven_way_is_the_fastest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The heaviest rank has 1.41 times the mean; more even ways send more keys than attention lasts."""
    words = ("generation:8192,seed=1", "--ranks", "8")
    said = figures(capsys, monkeypatch, *words)
    ways = {way["way"]: way for way in said["ways"]}
    assert said["ways"][0]["way"] == "balanced" and ways["balanced"]["tiles_over_mean"] > 1.3
    assert ways["zigzag"]["tiles_over_mean"] < ways["balanced"]["tiles_over_mean"]
    assert ways["zigzag"]["seconds"] > ways["balanced"]["seconds"]
    start = "the heaviest rank of balanced has 1.41 times the mean of tiles, yet what limits the step is the link"
    assert said["why"].startswith(start)
    fast = figures(capsys, monkeypatch, *words, "--link", "5000")
    assert fast["ways"][0]["tiles_over_mean"] < 1.05 and fast["why"] == ""  # links that take no time: even tiles
