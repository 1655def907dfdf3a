"""`csc energy` and `csc.energy`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from csc.errors import InputError
from csc.reports.energy_report import slack_of
from csc.runtime.clocks import read_clocks
from csc.runtime.loaded_program import load
from tests.compiler.test_cli import TARGET, Run, one_capture, run  # noqa: F401  (fixtures)

pytestmark = pytest.mark.usefixtures("traces")


@pytest.mark.slow
def test_the_frontier_its_clocks_and_its_page(run: Run, tmp_path: Path) -> None:  # noqa: F811
    files = {name: tmp_path / name for name in ("clocks.json", "page.html", "picture.svg")}
    outputs = ["-o", files["clocks.json"], "--page", files["page.html"], "--svg", files["picture.svg"]]
    done = run("energy", TARGET, "--json", "--hardware", "a100", "--slack", "5%", *outputs)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    spent = [row["joules"] for row in found["points"]]
    assert spent == sorted(spent, reverse=True) and len(spent) > 5
    for row in found["points"]:
        assert row["bound_joules"] <= row["joules"] and row["seconds"] <= row["promised"] * (1 + 1e-9)
    assert 0 < found["chosen"]["saved"] <= found["chosen"]["bound_saved"] < 1
    assert found["chosen"]["promised"] == pytest.approx(1.05 * found["usual"]["seconds"])
    assert "dense LLM layers" in found["sources"][0]
    assert run("compile", TARGET, "-o", tmp_path / "program", "--hardware", "a100").code == 0
    clocks = read_clocks(files["clocks.json"], load(tmp_path / "program").schedule)
    assert [len(own) for own in clocks] == [len(listed) for listed in found["clocks"]]
    page = files["page.html"].read_text()
    assert files["picture.svg"].read_text() in page and "saved at most" in page and "dense LLM layers" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.long
def test_prints_a_table_and_bounds_changes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("COLUMNS", "80")
    done = run("energy", TARGET, "--hardware", "a40", "--changes", "1", "--straggler", "1.1")
    assert done.code == 0, done.err
    assert "saved at most" in done.out and "curves: a40: Perseus" in done.out and "highest clocks" in done.out
    document = json.loads(run("energy", TARGET, "--hardware", "a40", "--changes", "1", "--json").out)
    assert max(max(row["changes"]) for row in document["points"]) <= 1


@pytest.mark.long
def test_orders_are_compared_at_one_time(run: Run) -> None:  # noqa: F811
    done = run("energy", TARGET, "--hardware", "a100", "--slack", "10%", "--schedule", "1f1b", "--orders", "--json")
    rows = json.loads(done.out)["orders"]
    known = [row["joules"] for row in rows if row["joules"] is not None]
    assert known == sorted(known) and len(known) > 2
    assert any("this plan" in row["name"] for row in rows)
    assert any("recompute" in row["name"] for row in rows)


@pytest.mark.slow
def test_refuses_what_nobody_measured(run: Run) -> None:  # noqa: F811
    done = run("energy", TARGET, "--hardware", "h100")
    assert done.code == 2
    assert "the profile h100 has no measured clocks" in done.err and "csc profile TARGET --clocks" in done.err
    for slack in ("-5%", "much"):
        done = run("energy", TARGET, "--hardware", "a100", f"--slack={slack}")
        assert done.code == 2 and "the slack is" in done.err
    done = run("energy", TARGET, "--hardware", "a100", "--straggler", "0.5")
    assert done.code == 2 and "a straggler takes 0.5 times the usual step" in done.err
    done = run("energy", TARGET, "--hardware", "a100", "--changes", "-1")
    assert done.code == 2 and "-1 changes of clock are asked for" in done.err


def test_a_slack_is_a_share() -> None:
    assert slack_of("5%") == slack_of("0.05") == slack_of(0.05) == 0.05
    with pytest.raises(InputError, match="the slack is 'x%'"):
        slack_of("x%")
