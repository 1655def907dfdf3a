"""Steps of real lengths: few sizes, all of them known after a few steps; decided fast; faster than random ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.balance.lengths import SETS
from csc.balance.loader import Decider
from csc.balance.sample_costs import Lengths
from csc.commands.main import app
from tests.balance.costs import costs

pytestmark = pytest.mark.usefixtures("traces")

STEP, MICROBATCHES = 128, 32


def decider(name: str, packed: bool = True) -> Decider:
    found = SETS[name]()
    table = Lengths(found[:, 1], found[:, :1], ("tiles",))
    return Decider(table, costs(4, MICROBATCHES), packed, 1, MICROBATCHES, 64)


def drawn(count: int, steps: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.choice(count, STEP, replace=False).tolist() for _ in range(steps)]


@pytest.mark.slow
def test_no_size_is_new_after_ten_steps() -> None:
    free = decider("AI2D").with_shapes(STEP)
    own = free.with_sizes(STEP)
    assert len(own.sizes) <= 64
    seen, late, seconds, without = set(own.sizes), 0, 0.0, 0.0
    for number, indices in enumerate(drawn(len(own.lengths), 20)):
        found = own.decide(indices)
        assert sorted(i for group in found.groups[0] for i in group) == sorted(indices)
        new = set(found.sizes[0]) - seen
        late += len(new) if number >= 10 else 0
        seen |= new
        if number < 4:
            seconds, without = seconds + found.seconds, without + free.decide(indices).seconds
    assert late == 0
    assert seconds <= 1.02 * without  # what it costs to keep to sizes


@pytest.mark.parametrize("packed", [True, False])
def test_balanced_steps_are_shorter_than_random_ones(packed: bool) -> None:
    own = decider("AI2D", packed)
    for indices in drawn(len(own.lengths), 2):
        step = own.step(indices)
        random = [list(range(k, STEP, MICROBATCHES)) for k in range(MICROBATCHES)]
        assert own.decide(indices).seconds < 0.98 * step.seconds([random])[0]


MODEL = """
import csc
from tests.compiler import small
text = csc.compile(small.text(2), mesh="pp=2", example=small.text_batch(4, 16), microbatches=2)
"""


@pytest.mark.slow
def test_csc_data_says_what_balance_gains(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    lengths = 8 + torch.arange(200) % 57
    np.savez(tmp_path / "lengths.npz", tokens=lengths.numpy())
    command = ["data", f"{tmp_path}/model.py:text", "--lengths", f"{tmp_path}/lengths.npz", "--multiple", "8"]
    told = CliRunner().invoke(app, [*command, "--batch-size", "16", "--steps", "2", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["samples"] == 200 and found["distribution"]["tokens"]["100%"] == 64
    assert found["seconds"]["balanced"] <= found["seconds"]["random"]
    assert found["sizes"] and found["microbatches"] == 4 and found["error"] < 0.1
    refused = CliRunner().invoke(app, [*command, "--batch-size", "300"])
    assert "there are 200 samples, and a step has 300" in str(refused.exception)
