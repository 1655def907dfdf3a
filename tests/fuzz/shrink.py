"""The smallest recipe that still fails in the same way.

shrink(recipe, worker, folder) -> Recipe      of a recipe with one setting
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.judge import Outcome
from tests.fuzz.recipe import Recipe, smaller
from tests.fuzz.running import Worker
from tests.fuzz.source import source

SECONDS = 120


def judged(recipe: Recipe, worker: Worker, folder: Path) -> list[Outcome]:
    """The outcomes of a recipe, written to a file in a folder."""
    path = folder / "model.py"
    path.write_text(source(recipe), encoding="utf-8")
    return worker.outcomes(path, SECONDS * len(recipe.settings))


def likeness(outcome: Outcome) -> str:
    """What two failures of one cause have in common: for a crash, its text without numbers and names."""
    if outcome.kind != "crash":
        return outcome.kind
    return "crash " + re.sub(r"[\d.]+|'[^']*'|\"[^\"]*\"|\w+_\w+", "#", outcome.reason.splitlines()[0])[:80]


def shrink(recipe: Recipe, outcome: Outcome, worker: Worker, folder: Path) -> Recipe:
    """Take one thing away as long as it fails like `outcome`."""
    tries = 8 if outcome.kind == "caught" else 60
    while tries > 0:
        for candidate in smaller(recipe):
            tries -= 1
            if tries <= 0 or likeness(judged(candidate, worker, folder)[0]) == likeness(outcome):
                break
        else:
            return recipe
        recipe = candidate if tries > 0 else recipe
    return recipe
