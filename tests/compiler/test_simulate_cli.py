"""`csc simulate` and `csc timeline`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from csc.ir.schedule import parse
from csc.planning.schedules.robust import ALIKE
from csc.runtime.loaded_program import load
from csc.simulation.pipeline import Pipeline, StageWork, slower, to_json
from csc.simulation.simulate import simulate
from csc.simulation.timeline import from_json
from csc.simulation.timeline import to_json as timeline_json
from tests.compiler.test_cli import TARGET, Run, one_capture, run  # noqa: F401  (fixtures)
from tests.runtime import handmade

pytestmark = pytest.mark.usefixtures("traces")


@pytest.mark.slow
def test_simulate(run: Run, tmp_path: Path) -> None:  # noqa: F811
    files = {name: tmp_path / name for name in ("plan.json", "plan.html", "chrome.json")}
    options = ["-o", files["plan.json"], "--page", files["plan.html"], "--chrome", files["chrome.json"]]
    done = run("simulate", TARGET, "--json", "--pp", "4", "--hardware", "a100", "--microbatches", "4", *options)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["makespan"] >= found["bound"] > 0
    assert found["gap"] == pytest.approx(found["makespan"] / found["bound"] - 1)
    assert found["costs"] == "model of a100" and found["memory_limit"] == 78.5e9
    assert [row["rank"] for row in found["ranks"]] == [0, 1, 2, 3]
    for row in found["ranks"]:
        assert row["busy"] + row["bubble"] == pytest.approx(found["makespan"])
        assert row["peak_memory"] > row["peak_activations"] >= 0 and row["holds"]
    assert found["baseline"]["speedup"] == pytest.approx(found["baseline"]["makespan"] / found["makespan"])
    assert found["baseline"]["speedup"] >= 1
    timeline = from_json(json.loads(files["plan.json"].read_text()))
    assert timeline.makespan == pytest.approx(found["makespan"])
    assert "baseline: equal forward time, 1f1b" in files["plan.html"].read_text()
    assert json.loads(files["chrome.json"].read_text())["traceEvents"]


@pytest.mark.slow
def test_simulate_prints_a_table(run: Run) -> None:  # noqa: F811
    done = run("simulate", TARGET, "--baseline", "none")
    assert done.code == 0
    assert "makespan" in done.out and "lower bound" in done.out and "vision_tower" in done.out
    assert "baseline" not in done.out


@pytest.mark.slow
def test_jitter_takes_longer(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """And each order stands beside its memory; the one for this jitter is a schedule file that compiles."""
    file = tmp_path / "robust.txt"
    calm, busy = (
        json.loads(run("simulate", TARGET, "--pp", "2", "--json", *flags).out)
        for flags in ((), ("--jitter", "J3", "--robust", file))
    )
    assert busy["makespan"] > calm["makespan"] and "jitter" not in calm
    rows = busy["jitter"]["schedules"]
    means = [row["mean"] for row in rows]
    assert busy["jitter"]["level"] == "J3" and means == sorted(means) and all(row["peak_memory"] > 0 for row in rows)
    named = {row["name"].partition(":")[0] for row in rows}
    assert {"plan", "1f1b", "for this jitter"} <= named
    best = next(row for row in rows if row["name"].startswith("for this jitter"))
    assert best["mean"] <= means[0] * ALIKE
    done = run("compile", TARGET, "--mesh", "pp=2", "--schedule", file, "-o", tmp_path / "program")
    assert done.code == 0, done.err
    assert load(tmp_path / "program", ranks=()).schedule.ranks == parse(file.read_text()).ranks


@pytest.mark.slow
def test_an_order_for_jitter_asks_how_much(run: Run, tmp_path: Path) -> None:  # noqa: F811
    done = run("simulate", TARGET, "--robust", tmp_path / "robust.txt")
    assert done.code == 2 and "Give --jitter J1, J2 or J3 too" in done.err


@pytest.mark.slow
def test_timelines_beside_each_other(run: Run, tmp_path: Path) -> None:  # noqa: F811
    assert run("compile", TARGET, "-o", tmp_path / "program").code == 0
    assert run("simulate", TARGET, "-o", tmp_path / "plan.json", "--json").code == 0
    sources = [tmp_path / "program", tmp_path / "plan.json"]
    done = run("timeline", *sources, "--json", "--page", tmp_path / "both.html")
    assert done.code == 0, done.err
    first, second = json.loads(done.out)["timelines"]
    assert first["makespan"] == pytest.approx(second["makespan"]) and second["over_first"] == pytest.approx(1)
    assert (tmp_path / "both.html").stat().st_size > 1000
    assert "makespan" in run("timeline", *sources).out


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ("model of cpu", "by a model of cpu, not by measured costs. csc profile TARGET -o mine.toml measures"),
        (
            "measured on a cpu",
            "by costs measured on a cpu: is it that machine, with a core or device for each rank? Else csc profile",
        ),
    ],
)
def test_a_step_far_from_its_plan(run: Run, tmp_path: Path, costs: str, said: str) -> None:  # noqa: F811
    """The line says what to measure; near the plan there is none, nor where the first is no plan."""
    directory = handmade.write(tmp_path / "program", schedule="1f1b")
    table = json.loads((directory / "program.json").read_text())
    messages = {(m["kind"], m["source"], m["destination"]): 240.0 * len(m["values"]) for m in table["messages"]}
    pipeline = Pipeline(tuple(StageWork(0.01, 0.01, 0.005) for _ in range(3)), messages)
    table["plan"] = {"pipeline": to_json(pipeline), "costs": costs}
    (directory / "program.json").write_text(json.dumps(handmade.sealed(table)))
    files = {}
    for name, factor in (("near", 1.2), ("far", 8.0), ("fast", 0.1)):
        timeline = simulate(slower(pipeline, factor), load(directory, ranks=()).schedule, name=name)
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps(timeline_json(timeline)))
    for names, start in ((["near", "far"], "far takes 8 times as long as"), (["fast"], "fast takes 0.1 times as long")):
        page = tmp_path / "both.html"
        done = run("timeline", directory, *(files[name] for name in names), "--scale", "own", "--page", page)
        assert done.code == 0, done.err
        out = " ".join(done.out.split())
        assert start in out and said in out and said in page.read_text()
    for sources in ([directory, files["near"]], [files["near"], files["far"]]):
        done = run("timeline", *sources, "--json")
        assert done.code == 0 and json.loads(done.out)["note"] == ""
    other = tmp_path / "other.json"
    other.write_text(files["far"].read_text())
    twice = json.loads(run("timeline", files["far"], other, "--json").out)["timelines"]
    assert [row["name"] for row in twice] == ["far (far.json)", "far (other.json)"]


def test_a_file_that_is_no_timeline(run: Run, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "bad.json").write_text("{")
    done = run("timeline", tmp_path / "bad.json")
    assert done.code == 2 and "this is no timeline" in done.err and "Traceback" not in done.err


@pytest.mark.slow
def test_ranks_that_differ(run: Run) -> None:  # noqa: F811
    """Each is priced on its own device; memory is that of each; the tables say which is which."""
    shared = ("simulate", TARGET, "--baseline", "none", "--memory", "20GB,10GB,10GB")
    found = json.loads(run(*shared, "--json", "--hardware", "h100,a100,a40").out)
    devices = [row["device"] for row in found["ranks"]]
    assert [one.partition(",")[0] for one in devices] == ["h100", "a100", "a40"]
    assert found["costs"] == "model of h100 on ranks 0; model of a100 on ranks 1; model of a40 on ranks 2"
    assert found["makespan"] >= found["bound"] > 0
    alike = json.loads(run(*shared[:-2], "--json", "--hardware", "h100,h100,h100").out)
    assert "device" not in alike["ranks"][0] and alike["makespan"] < found["makespan"]
    assert alike == json.loads(run(*shared[:-2], "--json", "--hardware", "h100").out)
    refused = run(*shared, "--hardware", "h100,a100")
    assert refused.code != 0 and "2 pipeline ranks, and the mesh has pp=3" in refused.err
