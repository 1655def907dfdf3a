"""The fuzzer itself, a slice of what it runs, and what it found."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.judge import Outcome, eager, judge, pieces, sizes
from tests.fuzz.kinds import LAYERS
from tests.fuzz.recipe import Part, Recipe, random_recipe, smaller
from tests.fuzz.running import load, outcomes
from tests.fuzz.setting import Setting
from tests.fuzz.shrink import shrink
from tests.fuzz.source import source
from tests.tiers import long

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.py"))
SLICE = tuple(range(12))  # of `random_recipe(Random(f"slice/{number}"))`
OFTEN = 6  # of these, outside of the long tier


def written(recipe: Recipe, folder: Path) -> Any:
    path = folder / "model.py"
    path.write_text(source(recipe), encoding="utf-8")
    return load(path)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
@pytest.mark.long_cases("gru_microbatches", "lstm", "bf16_relu", "bf16_beside_double", "values_in_a_dict")
def test_what_was_found_stays_mended(path: Path) -> None:
    assert {outcome.kind for outcome in outcomes(path)} <= {"right", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [*SLICE[:OFTEN], *map(long, SLICE[OFTEN:])])
@pytest.mark.long_cases("1", "3", "2", "5")
def test_slice(number: int, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(source(random_recipe(Random(f"slice/{number}"), settings=2)), encoding="utf-8")
    assert {outcome.kind for outcome in outcomes(path)} <= {"right", "refused"}


def test_the_same_seed_gives_the_same_models() -> None:
    first, again, other = (random_recipe(Random(seed)) for seed in ("0/1", "0/1", "0/2"))
    assert first == again != other


def test_kinds_are_left_out() -> None:
    recipes = [random_recipe(Random(number), without=("attention*",)) for number in range(40)]
    assert not any(part.kind.startswith("attention") for recipe in recipes for part in recipe.parts)


@pytest.mark.parametrize("first", sorted({name.split("_")[0] for name in LAYERS})[::4])
def test_models_run_eagerly(first: str, tmp_path: Path) -> None:
    kind = next(name for name in LAYERS if name.startswith(first))
    module = written(Recipe((Part(kind, layers=2),)), tmp_path)
    found = eager(module, asdict(Setting()))
    assert torch.isfinite(found["loss 0"]) and found["head.weight"] is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed", [{"moved": True}, {"written": "weights"}, {"written": "column"}, {"forms": ("first", "both")}]
)
def test_what_changes_between_steps_is_in_the_reference(changed: dict[str, Any], tmp_path: Path) -> None:
    module = written(Recipe((Part("outside_global"), Part("read_longest"))), tmp_path)
    plain = asdict(Setting(forms=("first", "first")))
    losses = [eager(module, setting) for setting in (plain, plain | changed, plain)]
    assert losses[0]["loss 1"] == losses[2]["loss 1"] != losses[1]["loss 1"]
    assert losses[0]["loss 0"] == losses[1]["loss 0"]


def test_microbatches_of_a_list_weigh_by_their_labels(tmp_path: Path) -> None:
    module = written(Recipe((Part("gelu"),)), tmp_path)
    asked = asdict(Setting(microbatches=2, forms=("both",)))
    batch = module.batch(*sizes(asked)[0])
    assert [len(one["ids"][0]) for one in pieces(batch, asked)] == [6, 4]
    whole, listed = eager(module, asked), eager(module, asked | {"listed": True})
    assert torch.allclose(whole["loss 0"], listed["loss 0"])  # type: ignore[arg-type]


class Scale(nn.Module):
    """One parameter more than a compiler may lose, and one that it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).pow(2).mean()


def judged(monkeypatch: pytest.MonkeyPatch, change: Any) -> Outcome:
    """What the judge says of gradients that are eager's own, but for a change."""
    module = SimpleNamespace(make=lambda: torch.manual_seed(0) and Scale(), batch=lambda *_: {"x": torch.ones(4, 3)})
    true = eager(module, asdict(Setting()))
    monkeypatch.setattr("benchmarks.judge.ours", lambda *_: true | change(true))
    return judge(module, {})


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda true: {}, set()),
        (lambda true: {"first.weight": true["first.weight"] * (1 + 1e-6)}, set()),
        (lambda true: {"first.weight": true["first.weight"] * 1.001}, {"first.weight"}),
        (lambda true: {"second.bias": None}, {"second.bias"}),
        (lambda true: {"second.bias": torch.zeros(1)}, {"second.bias"}),
        (lambda true: {"first.bias": true["first.bias"] * float("nan")}, {"first.bias"}),
        (lambda true: {"loss 0": true["loss 0"] * 2}, {"loss 0"}),
    ],
)
def test_the_judge_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, change: Any, wrong: set[str]) -> None:
    assert set(judged(monkeypatch, change).differences) == wrong


class Suspicious:
    """A worker that finds every recipe with one kind wrong."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def outcomes(self, path: Path, seconds: float) -> list[Outcome]:
        name = "".join(word.title() for word in self.kind.split("_")) + "Layer("
        return [Outcome("wrong" if name in path.read_text("utf-8") else "right")]


def test_shrinking_leaves_what_fails(tmp_path: Path) -> None:
    parts = (Part("gru", "twice", 3), Part("topk", "dense", 2, skip=True), Part("linear"))
    recipe = Recipe(parts, loss="focal", tied=True, settings=(Setting(pp=3, dp=2),))
    small = shrink(recipe, Outcome("wrong"), Suspicious("topk"), tmp_path)  # type: ignore[arg-type]
    assert small == Recipe((Part("topk"),), norm=False, settings=(Setting(),))


def test_smaller_recipes_differ_in_one_thing() -> None:
    recipe = replace(random_recipe(Random(1)), settings=(Setting(pp=2),))
    assert all(candidate != recipe for candidate in smaller(recipe))
