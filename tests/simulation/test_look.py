"""Colours that can be told apart and read, axes, figures as text, and the summary's rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from csc.ir.schedule import parse
from csc.simulation.page import BASE, COLUMNS, TINTS, bytes_text, colour, levels, rows, seconds_text, unit
from csc.simulation.pipeline import Pipeline, StageWork
from csc.simulation.simulate import simulate

# Viénot, Brettel and Mollon 1999: linear RGB as seen without L cones, without M cones.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deutan": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


def linear(text: str) -> list[float]:
    parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def brightness(text: str) -> float:
    red, green, blue = linear(text)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("kind", BASE)
@pytest.mark.parametrize("level", range(len(TINTS) + 2))
def test_numbers_in_boxes_can_be_read(kind: str, level: int) -> None:
    """WCAG 2: a contrast of 4.5 and more."""
    dark, light = sorted(brightness(text) for text in colour(kind, level))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("matrix", BLINDNESS.values(), ids=BLINDNESS)
def test_kinds_can_be_told_apart(matrix: tuple[tuple[float, ...], ...]) -> None:
    seen = {
        kind: [sum(a * b for a, b in zip(row, linear(colour(kind)[0]))) for row in matrix]
        for kind in ("F", "B", "W", "BW")
    }
    for first, second in combinations(seen.values(), 2):
        assert sum((a - b) ** 2 for a, b in zip(first, second)) ** 0.5 > 0.2


def test_later_chunks_are_lighter() -> None:
    for kind in BASE:
        shades = [brightness(colour(kind, level)[0]) for level in range(len(TINTS))]
        assert shades == sorted(set(shades))
    pipeline = Pipeline((StageWork(1.0, has_b=False, has_w=False),) * 4)
    timeline = simulate(pipeline, parse("rank 0: F 2 0 | F 0 0\nrank 1: F 1 0 | F 3 0"))
    assert levels(timeline) == {0: 0, 2: 1, 1: 0, 3: 1}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 µs"),
        (1.5e-6, "1.50 µs"),
        (1.9e-3, "1,900 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1,500 ms"),
        (2.0, "2.00 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
    assert text.endswith(unit(seconds)[1])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**30, "3.00 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**42, "4.00 TiB"),
    ],
)
def test_bytes(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_summary() -> None:
    stage = StageWork(1.0, 1.0, has_w=False, saved=2.0**20, state=2.0**20)
    slow = StageWork(2.0, 2.0, has_w=False, saved=2.0**21, state=2.0**20)
    schedule = parse("rank 0: F 0 0 | B 0 0\nrank 1: F 1 0 | B 1 0")
    runs = [simulate(Pipeline((stage, stage)), schedule, name="plan"), simulate(Pipeline((stage, slow)), schedule)]
    first, second = (dict(zip(COLUMNS, row)) for row in rows(runs, bound=1.6, limit=2.5 * 2**20))
    assert (first["run"], first["ranks"], first["makespan"]) == ("plan", "2", "2.00 s")
    assert (first["against the first"], second["against the first"]) == ("", "2.000 ×")
    assert (first["over the bound"], second["over the bound"]) == ("1.250 ×", "2.500 ×")
    assert first["bubble"] == "mean 0.0%, worst 0.0% (rank 0)"
    assert second["bubble"] == "mean 25.0%, worst 50.0% (rank 0)"
    assert first["peak memory"] == "2.00 MiB (rank 0)"
    assert second["peak memory"] == "3.00 MiB (rank 1), over the limit"
    assert second["peak activations"] == "2.00 MiB (rank 1)"
    assert rows([]) == []
    unknown = replace(runs[0], memory=((),) * len(runs[0].ranks), state=(0.0,) * len(runs[0].ranks))
    assert dict(zip(COLUMNS, rows([unknown])[0]))["peak memory"] == "not recorded"
    assert dict(zip(COLUMNS, rows(runs)[0]))["over the bound"] == ""
