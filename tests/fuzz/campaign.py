"""Recipe after recipe, judged, shrunk where they fail, and kept.

run(seed, seconds, folder, without, ...) -> rows
folder: rows.jsonl, one line a combination, from which a run goes on; found/NAME.py, what fails, made small
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.judge import Outcome
from tests.fuzz.recipe import Recipe, each_alone, random_recipe
from tests.fuzz.running import Worker
from tests.fuzz.shrink import judged, likeness, shrink
from tests.fuzz.source import source

FAILED = ("wrong", "caught", "crash", "hang")
Known = tuple[str, frozenset[str], str]  # what failed in which way, with which features, and its file


def run(
    seed: int,
    seconds: float,
    folder: Path,
    without: Sequence[str] = (),
    each: bool = False,
    job: int = 0,
    jobs: int = 1,
    favour: Sequence[str] = (),
) -> None:
    """Judge recipes until the time is over. job of jobs: every so many-th recipe, for runs side by side. each: the
    kinds one by one instead of random recipes.
    """
    found = folder / "found"
    found.mkdir(parents=True, exist_ok=True)
    rows_file = folder / f"rows-{job}.jsonl"
    done = {row["recipe"] for row in read(folder)}
    worker, scratch = Worker(), folder / f"scratch-{job}"
    scratch.mkdir(exist_ok=True)
    known: list[Known] = []
    end = time.monotonic() + seconds
    random = (random_recipe(Random(f"{seed}/{number}"), without, favour=favour) for number in count())
    recipes = each_alone(without, favour) if each else random
    try:
        for number, recipe in enumerate(recipes):
            if time.monotonic() > end:
                break
            name = f"each/{number}" if each else f"{seed}/{number}"
            if number % jobs == job and name not in done:
                rows = _rows(name, recipe, worker, scratch, known, found)
                with rows_file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    finally:
        worker.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder, of all jobs."""
    lines = [line for path in sorted(folder.glob("rows-*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    return [json.loads(line) for line in lines]


def _rows(
    name: str, recipe: Recipe, worker: Worker, scratch: Path, known: list[Known], found: Path
) -> list[dict[str, Any]]:
    results = judged(recipe, worker, scratch)
    if len(results) < len(recipe.settings):  # the process ended: one by one
        results = [judged(replace(recipe, settings=(setting,)), worker, scratch)[0] for setting in recipe.settings]
    rows = []
    for setting, outcome in zip(recipe.settings, results):
        row = {"recipe": name, "setting": str(setting), "kind": outcome.kind, "reason": outcome.reason[:400]}
        if outcome.kind in FAILED:
            row["file"] = _kept(replace(recipe, settings=(setting,)), outcome, worker, scratch, known, found)
        rows.append(row | {"features": sorted(recipe.features), "seconds": round(outcome.seconds, 2)})
    return rows


def _kept(
    recipe: Recipe,
    outcome: Outcome,
    worker: Worker,
    scratch: Path,
    known: list[Known],
    found: Path,
) -> str:
    """The name of the small file that shows the failure: one that is there, or a new one."""
    asked = recipe.features | frozenset(recipe.settings[0].changed)
    for like, features, name in known:
        if like == likeness(outcome) and features <= asked:
            return name
    if likeness(judged(recipe, worker, scratch)[0]) == likeness(outcome):
        recipe = shrink(recipe, outcome, worker, scratch)
    features = recipe.features | frozenset(recipe.settings[0].changed)
    name = "-".join([outcome.kind, *sorted(features)]).replace(" ", "_").replace("/", "_")[:120]
    last = judged(recipe, worker, scratch)[0]
    numbers = [f"{n}: eager {a:.6g}, csc {b:.6g} (norms), {c:.2g} apart" for n, (a, b, c) in last.differences.items()]
    top = [f"{last.kind}: {last.reason}", f"run: python -m tests.fuzz --file {name}.py", *numbers]
    text = "".join(f"# {line}\n" for entry in top for line in entry.splitlines()) + "\n" + source(recipe)
    (found / f"{name}.py").write_text(text, encoding="utf-8")
    known.append((likeness(outcome), features, name))
    return name
