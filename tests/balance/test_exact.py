"""A balanced step is the step of one process on the same samples: loss and every gradient."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import csc
from tests import launching
from tests.balance import balanced_worker
from tests.balance.balanced_worker import compiled_for, loader_for, sampled
from tests.balance.captions import Captions, Sample, collate
from tests.models import captions, packed
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

FLOAT64, FLOAT32 = 1e-12, 1e-6


def eager(model: nn.Module, samples: list[Sample], shifted: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Sample after sample, each alone: the mean over all labels that count. shifted: 1 if the model shifts labels."""
    counts = [int((one["labels"][:, shifted:] != -100).sum()) for one in samples]
    whole = 0.0
    for one, count in zip(samples, counts):
        found = model(**{name: value for name, value in one.items() if name != "image_grid_thw"})
        loss = (found if isinstance(found, torch.Tensor) else found.loss) * (count / sum(counts))
        loss.backward()
        whole += float(loss.detach())
    return whole, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def eager_captions(dataset: Captions, indices: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    return eager(captions.Captions(), [collate([dataset[i]], int(dataset.tokens[i])) for i in indices], 0)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], error: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1e-3, float(gradient.norm()))
        assert float((found[name] - gradient).norm()) <= error * scale, name


def gradients(compiled: csc.CompiledModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mesh", [long("dp=2,pp=2"), long("pp=1")])
def test_a_step_of_several_ranks_in_one_process(mesh: str) -> None:
    compiled = compiled_for(mesh)
    dataset = Captions(40, lacking=True)
    for step, indices in zip(loader_for(compiled, dataset), sampled(40)):
        compiled.zero_grad()
        loss = compiled.train_step(step)
        whole, expected = eager_captions(dataset, indices)
        assert float(loss) == pytest.approx(whole, rel=FLOAT64)
        same(gradients(compiled), expected, FLOAT64)


def in_one_row(samples: list[Any], width: int) -> Sample:
    """Documents one after the other, their positions from 0 on; padding is a document of its own without labels."""
    lengths = [len(one) for one in samples]
    rest = width - sum(lengths)
    positions = torch.cat([torch.arange(one) for one in (*lengths, rest) if one])
    ids = torch.cat([*samples, torch.zeros(rest, dtype=torch.long)])
    labels = ids.masked_fill(positions == 0, -100)
    labels[sum(lengths) :] = -100
    return {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(8, 50, (24,), generator=generator).tolist()
    return [1 + (start * 7 + torch.arange(length)) % 90 for start, length in enumerate(lengths)]


@pytest.mark.parametrize("mesh", [long("pp=2"), "cp=2", long("dp=2,pp=2")])
def test_samples_packed_in_one_row_see_themselves_alone(mesh: str, caplog: pytest.LogCaptureFixture) -> None:
    """Programs for the loader's sizes are there before the first step."""
    dataset = documents()
    replicas = csc.Mesh.of(mesh).dp
    example = [in_one_row(dataset[:3], 160), in_one_row(dataset[3:6], 160)] * replicas
    compiled = csc.compile(packed.llama(), mesh=mesh, example=example, microbatches=2, schedule="1f1b")
    loader = csc.balanced(
        dataset, compiled, lengths=lambda i: len(dataset[i]), batch_size=8, collate=in_one_row, multiple=32
    )
    with caplog.at_level(logging.INFO, "csc"):
        assert loader.compile_ahead(compiled) == len(loader.sizes) > 1
        made = sum("a program for microbatches" in record.message for record in caplog.records)
        step = next(iter(loader))
        assert all(len(one["input_ids"]) == 1 for one in step) and len(step) == 2 * replicas
        assert {one["input_ids"].shape[1] for one in step} <= {size[-1] for size in loader.sizes}
        loss = compiled.train_step(step)
    assert sum("a program for microbatches" in record.message for record in caplog.records) == made > 1
    expected, right = eager(packed.llama(), [in_one_row([one], len(one)) for one in dataset[:8]], 1)
    assert float(loss) == pytest.approx(expected, rel=FLOAT32)
    same(gradients(compiled), right, FLOAT32)


@pytest.mark.gloo
def test_ranks_decide_alike_and_load_their_own(tmp_path: Path) -> None:
    launching.ranks(balanced_worker.main, 4, tmp_path)
    told = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(4)]
    dataset = Captions(40, lacking=True)
    for number, indices in enumerate(sampled(40)):
        whole, expected = eager_captions(dataset, indices)
        assert all(one["losses"][number] == pytest.approx(whole, rel=FLOAT64) for one in told)
        found: dict[str, torch.Tensor] = {}
        for rank in range(4):
            found |= load_file(tmp_path / f"{number}_{rank}.safetensors")
        same(found, expected, FLOAT64)
    assert told[0]["sizes"] == told[1]["sizes"] == told[2]["sizes"] == told[3]["sizes"]
    assert told[0]["loaded"] == told[1]["loaded"] != told[2]["loaded"] == told[3]["loaded"]
    assert sorted(told[0]["loaded"] + told[2]["loaded"]) == sorted(i for step in sampled(40) for i in step)
    assert all("divided as" in one["other"] and "on rank" in one["other"] for one in told)
    assert told[0]["resumed"] == told[0]["losses"][1:]
