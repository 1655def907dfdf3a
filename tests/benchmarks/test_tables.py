"""docs/measurements.md is what its JSON files give."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.mesh.summary import geomean
from benchmarks.tables import DOCS, FOLDER, PAGE, TABLES, Table, markdown, page, read

RUN = {"date": "2026-11-29", "machine": "CPU", "command": "csc verify"}


def test_the_page_is_what_the_files_give() -> None:
    assert PAGE.read_text() == page(), "edit docs/measurements/*.json, then run `python -m benchmarks.tables`"
    assert {path.stem for path in FOLDER.iterdir()} == set(TABLES) and len(TABLES) == 11


def test_a_table_as_markdown() -> None:
    rows = (("Llama", 1.2345e-6, (80, None)), ("LLaVA", None, "all"))
    table = Table(
        "Gradients",
        "Largest.",
        (RUN | {"rows": "Both"},),
        (("model", ""), ("largest", ".1e"), ("gradients", "")),
        rows,
        ("Over gloo.",),
    )
    assert markdown(table).splitlines() == [
        "## Gradients", "", "Largest.", "", "- Both: `csc verify`, CPU, 2026-11-29.", "",
        "| model | largest | gradients |", "| --- | --- | --- |", "| Llama | 1.2e-06 | 80 /  |", "| LLaVA |  | all |",
        "", "- Over gloo.",
    ]  # fmt: skip


def test_rows_and_runs_are_whole() -> None:
    with pytest.raises(ValueError, match=r"G: row 'Llama' has 1 cells, for 2 columns\."):
        Table("G", "", (RUN,), (("model", ""), ("largest", "")), (("Llama",),))
    with pytest.raises(ValueError, match=r"G: a run lacks command, machine\."):
        Table("G", "", ({"date": "2026-11-29"},), (("model", ""),), ())
    with pytest.raises(ValueError, match=r"G: nothing says when and by which command it was measured\."):
        Table("G", "", (), (("model", ""),), ())


def test_meshes_are_those_of_the_rows_that_are_kept() -> None:
    """Speeds over the best uniform mesh, out of docs/mesh_rows.jsonl."""
    kept = [json.loads(line) for line in (DOCS / "mesh_rows.jsonl").read_text().splitlines()]
    for ranks, trained, device, cases, speed, _ in read("meshes").rows:
        case = {"ranks": ranks, "frozen": trained, "hardware": str(device).lower()}
        rows = [row for row in kept if case.items() <= row["case"].items()]
        uniform = [next(rival for rival in row["rivals"] if rival["name"] == "best uniform") for row in rows]
        speeds = [rival["seconds"] / row["own"]["seconds"] for row, rival in zip(rows, uniform, strict=True)]
        assert len(rows) == cases and math.isclose(geomean(speeds), speed, abs_tol=5e-4), case  # type: ignore[arg-type]
