"""Steps to which each process brings its own samples: the gradients of the global batch, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import csc
from tests import launching
from tests.compiler import local_worker
from tests.compiler.local_worker import Batch, compiled_for, gradients, steps
from tests.models import captions

pytestmark = pytest.mark.usefixtures("traces")

FLOAT64 = 1e-12


def eager(microbatches: list[Batch]) -> tuple[float, Batch]:
    """One process, sample after sample: the mean over all labels that count."""
    model = captions.Captions()
    count = sum(int((one["labels"] != -100).sum()) for one in microbatches)
    whole = 0.0
    for one in microbatches:
        given = {name: value for name, value in one.items() if name != "image_grid_thw"}
        loss = model(**given) * (int((one["labels"] != -100).sum()) / count)
        loss.backward()
        whole += float(loss.detach())
    return whole, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(found: Batch, expected: Batch) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float(nn.functional.mse_loss(found[name], gradient).sqrt())
        assert error <= FLOAT64 * max(1e-3, float(gradient.abs().max())), name


def launch(case: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    ranks = csc.Mesh.of(case["mesh"]).size
    launching.ranks(local_worker.main, ranks, case, directory)
    return [json.loads((directory / f"result_{rank}.json").read_text()) for rank in range(ranks)]


def check(results: list[dict[str, Any]], names: list[str], directory: Path) -> None:
    for name in names:
        loss, expected = eager([one for own in steps(name) for one in own])
        assert all(result["losses"][name] == pytest.approx(loss, rel=FLOAT64) for result in results)
        found: Batch = {}
        for rank in range(len(results)):
            found |= load_file(directory / f"{name}_{rank}.safetensors")
        same(found, expected)


@pytest.mark.gloo
def test_replicas_load_their_own_samples(tmp_path: Path) -> None:
    names = ["one without images", "sounds"]
    results = launch({"mesh": "dp=2", "steps": names}, tmp_path)
    check(results, names, tmp_path)
    assert [result["place"] for result in results] == [[0, 2], [1, 2]]
    assert results[0]["metrics"] == results[1]["metrics"]
    last = [one for own in steps(names[-1]) for one in own]
    assert results[0]["metrics"]["tokens"] == sum(one["input_ids"].numel() for one in last)
    assert results[0]["metrics"]["samples"] == sum(len(one["input_ids"]) for one in last)


@pytest.mark.gloo
def test_ranks_of_a_pipeline_leave_out_what_they_do_not_read(tmp_path: Path) -> None:
    names = ["images", "one without images"]
    results = launch({"mesh": "dp=2,pp=2", "steps": names, "refusals": True}, tmp_path)
    check(results, names, tmp_path)
    first = [result["needs"] for result in results if "pixel_values" in result["needs"]]
    assert len(first) == 2, "the ranks of the last stage never see pixels"
    told = [result["told"] for result in results]
    assert all("belong to one replica and were given different samples: other tokens" in one["tokens"] for one in told)
    assert any("the schedule has 2" in one["few"] or "2 microbatches" in one["few"] for one in told)
    assert all("different samples: microbatch 1: image_grid_thw is int64" in one["length"] for one in told)
    assert any("key 'pixel_values' has no values on rank" in one["absent"] for one in told)
    assert all("a rank whose data ended earlier" in one["early"] for one in told)


@pytest.mark.long
def test_one_process_runs_all_replicas() -> None:
    compiled = compiled_for("dp=2,pp=2")
    assert (compiled.dp_rank, compiled.dp_size) == (0, 1)
    assert compiled.needs >= {"pixel_values", "input_features", "labels"}
    every = [one for own in steps("one without images") for one in own]
    loss = compiled.train_step(every, local=True)
    expected, right = eager(every)
    assert float(loss) == pytest.approx(expected, rel=FLOAT64)
    same(gradients(compiled), right)
    torch.testing.assert_close(compiled.train_step(every), loss, rtol=0, atol=0)
