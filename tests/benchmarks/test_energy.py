"""The benchmark of energy: csc's clocks beside the frontiers that Perseus published, which stand here as data."""

from __future__ import annotations

import pytest

from benchmarks.energy.perseus import CELLS, FACTORS, Cell, measured_cell, problem_of, published
from benchmarks.energy.plans import PlanRow, ScheduleRow
from benchmarks.energy.rival import RivalRow
from benchmarks.energy.summary import AIMS, document
from csc.planning.energy.clock_program import relaxed

SHORT = [cell for cell in CELLS if cell.microbatches == 12]
# Of the fastest published point: what it saves beside the highest clocks, in percent; and what no clocks save in the
# fastest step that was measured.
SAVED = {
    ("gpt3-175b", "a100_sxm"): (15.35, 16.06), ("bloom", "a100_sxm"): (10.69, 11.10),
    ("gpt3-175b", "a40"): (11.82, 12.65), ("bloom", "a40"): (7.20, 8.61),
}  # fmt: skip


@pytest.mark.parametrize("cell", SHORT, ids=str)
def test_ahead_of_the_published_frontier_and_near_the_bound(cell: Cell) -> None:
    row = measured_cell(cell)
    assert [each.factor for each in row.rows] == list(FACTORS)
    assert all(each.ahead for each in row.rows)
    assert row.worst_below_bound <= (0.2 if cell.device == "a100_sxm" else 0.6)
    assert row.worst_promise <= 1 + 1e-9
    theirs, possible = SAVED[cell.model, cell.device]
    assert 100 * row.rows[0].perseus == pytest.approx(theirs, abs=0.01)
    assert 100 * row.rows[0].possible == pytest.approx(possible, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.microbatches == 24], ids=str)
def test_ahead_of_the_published_frontier_with_more_microbatches(cell: Cell) -> None:
    row = measured_cell(cell)
    assert all(each.ahead for each in row.rows)
    assert row.worst_promise <= 1 + 1e-9


def test_the_claimed_times_of_perseus_are_shorter_than_any_measured_clocks_reach() -> None:
    for cell in SHORT:
        problem = problem_of(cell)
        seconds, joules = published(cell)[0]
        assert seconds < problem.fastest.seconds
        answer = relaxed(problem.waits, problem.free, sum(problem.watts), problem.fastest.seconds)
        assert answer.bound < joules


def test_the_summary_names_what_was_measured_and_leaves_the_rest_null() -> None:
    cell = measured_cell(SHORT[0])
    plan = PlanRow("VLM-S", "encoder frozen", (
        ScheduleRow("1f1b", 2.0, 0.1, 0.11, 0.1, 1.0), ScheduleRow("auto", 1.8, 0.12, 0.13, 0.2, 1.0)
    ), 1.0)  # fmt: skip
    rival = RivalRow(SHORT[0], 30.0, 0.6, 8, 8, 1.0, 1.01)
    summary = document([cell], [rival], [plan])["summary"]
    assert set(AIMS) <= set(summary)
    assert summary["ahead_of_perseus"] == summary["ahead_of_perseus_at_1.05"] == 1
    assert summary["order_and_clocks_points"] == pytest.approx(10.0)
    assert summary["saved_same_time_geomean"] == pytest.approx(0.12)
    assert summary["seconds_over_lowtime"] == pytest.approx(0.02)
    assert summary["seconds_8x96"] is None and summary["points_below_bound_a40_max"] is None
    assert document([], [], [])["summary"]["saved_same_time_geomean"] is None
