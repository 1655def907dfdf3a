"""What commands print: tables that cut no name, and progress without a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from csc.commands.plan_command import faster_sentences
from csc.commands.printing import Column, print_json, shown, table
from csc.commands.tables import timings_table
from csc.reports.advice import Row

NAME = "model.language_model.layers.11.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(("width", "looks"), [(60, "listed"), (72, "listed"), (104, "plain"), (112, "edged")])
def test_no_name_is_cut_or_broken(width: int, looks: str) -> None:
    """Nor a figure. Where a name is longer than a line, it goes on in the next one."""
    made = table("name", "parameters", "share", "why", title="regions")
    made.add_row(NAME, "15,104", "0.57/0.39", "on the way")
    made.add_row("lm_head", "1", "", "trained", end_section=True)
    text = io.StringIO()
    Console(file=text, width=width).print(made)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in text.getvalue()
    assert ("┃" in text.getvalue(), "──" in text.getvalue()) == (looks == "edged", looks != "listed")
    assert NAME in "".join(lines) if width < len(NAME) else any(NAME in line for line in lines)
    assert any("15,104" in line and "0.57/0.39" in line for line in lines)
    if looks == "listed":
        assert "  parameters: 1; why: trained" in map(str.rstrip, lines)


def test_columns_leave_where_there_is_no_room() -> None:
    """The least important first, and the line below says so; a figure keeps its unit at every width."""
    rows = table("rank", Column("parameters", 1), Column("working", 2), "all", title="memory")
    for rank in range(3):
        rows.add_row(str(rank), "208 KiB", "45.0 KiB", "544 KiB")
    for width, left_out in ((40, ""), (33, "working"), (20, "parameters, working")):
        text = io.StringIO()
        Console(file=text, width=width).print(rows)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        assert max(map(len, lines)) <= width
        said = " ".join(lines)
        assert sum("544 KiB" in line for line in lines) == 3
        assert (f"not shown at {width} columns: {left_out};" in said) == bool(left_out)
        assert ("208 KiB" in said) == ("parameters" not in left_out)


def test_a_faster_alternative_says_how_to_take_it_or_that_it_is_a_tie() -> None:
    this = Row("1f1b, this plan", "planned", 1, 1.0, 1.0, 0.1, 1e9)
    auto = Row("auto", "planned", 4, 0.8, 1.25, 0.1, 1e9)
    assert faster_sentences([this]) == [] == faster_sentences([this, Row("zb-h2", "planned", 1, 0.5, 2.0, fits=False)])
    (said,) = faster_sentences([auto, this])
    assert said.startswith("--schedule auto --chunks 4 takes the fastest of them, 20.0% faster")
    (said,) = faster_sentences([Row("auto", "planned", 1, 0.998, 1.002), this])
    assert "0.20% faster, which is a tie" in said


@pytest.mark.parametrize(("columns", "expected"), [("70", 70), ("", 160)])
def test_tables_follow_columns(columns: str, expected: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", "from csc.commands.printing import console; print(console.width)"]
    given = {**environment, "COLUMNS": columns} if columns else environment
    assert int(subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout) == expected


def test_a_log_has_a_line_every_few_seconds() -> None:
    text = io.StringIO()
    with shown(Console(file=text, width=80), every=0.05) as tell:
        tell("differentiate [model.layers.0]")
        while text.getvalue().count("\n") < 2:
            time.sleep(0.01)
    lines = text.getvalue().splitlines()
    assert len(lines) >= 2 and all(line.startswith("csc: ") for line in lines)
    assert lines[-1].startswith("csc: differentiate [model.layers.0], ")
    said = text.getvalue()
    time.sleep(0.12)
    assert text.getvalue() == said  # the command is done


def test_a_quick_command_says_nothing() -> None:
    text = io.StringIO()
    with shown(Console(file=text), every=60.0) as tell:
        tell("capture")
    assert text.getvalue() == ""


def test_json_has_no_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"step": float("inf"), "rows": [(1, float("nan"))], "more": {"gap": 0.5}})
    assert json.loads(capsys.readouterr().out) == {"step": None, "rows": [[1, None]], "more": {"gap": 0.5}}


def test_every_step_of_a_compilation_has_a_row() -> None:
    """Those of all passes, a user's own too, under the part of the way that they run in."""
    names = ("capture", "shapes", "sequence", "differentiate", "mine", "features", "partition", "schedule", "emission")
    spent = {**dict.fromkeys(names, 0.25), "total": 2.25, "peak_memory": 2.0**30}
    text = io.StringIO()
    Console(file=text, width=120).print(timings_table("model", spent, {"mine": "what it leaves"}))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    assert [row[1] for row in rows] == [*names, ""] and rows[4][2:] == ["0.250", "11%", "what it leaves"]
    parts = ("capture", "passes", "", "differentiation", "", "", "planning", "", "emission", "all")
    assert tuple(row[0] for row in rows) == parts
