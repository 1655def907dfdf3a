"""The README's picture: both plans with the same accounting, under a limit that is the device's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pictures.__main__ import MICROBATCHES, plan_picture, small
from csc.reports.forecast import forecast
from csc.simulation.page import BASE, LIMIT, MEMORY
from tests import launching

pytestmark = pytest.mark.usefixtures("traces")
ROOT = Path(__file__).parents[2]


def test_both_sides_are_accounted_alike() -> None:
    made, title = small()
    found = forecast(made)
    assert found.baseline is not None and found.memory == 80e9 - 1.5e9  # what the process takes
    assert min(found.plan.state) > 0 and sum(found.plan.state) == pytest.approx(sum(found.baseline.state))
    for one in (found.plan, found.baseline):
        forwards = sum(event.action.kind == "F" for event in one.ranks[0])
        assert forwards >= MICROBATCHES >= 24
    text = plan_picture(found, title, 2)
    assert text.count('class="state"') == 2 * 2 + 1  # a lane a rank and run, and the legend
    drawn = set(re.findall(r'<(?:rect|path)[^>]*fill="(#[0-9a-f]{6})"', text))
    assert MEMORY in drawn and BASE["F"] in drawn
    legend = text[text.rindex("memory: parameters") :]
    assert "limit: 73.1 GiB, above the picture" in legend  # a model that small is not drawn as blank lanes below it


def test_the_picture_in_the_repository() -> None:
    """It is what the script makes now: of that model, with state on both sides and no rank of csc's above the limit."""
    text = (ROOT / "docs" / "images" / "plan.svg").read_text()
    assert f"{MICROBATCHES} microbatches" in text
    upper, lower = text.split('class="head"')[1:3]
    assert upper.count('class="state"') == lower.split("limit:")[0].count('class="state"') - 1 > 0
    assert f'fill="{LIMIT}"' not in upper


def test_quick(tmp_path: Path) -> None:
    program = "benchmarks/pictures/__main__.py"
    said = launching.alone(launching.run_file, program, "--quick", "--output", str(tmp_path))
    assert (tmp_path / "plan.svg").read_text().startswith("<svg") and "lower bound" in said
