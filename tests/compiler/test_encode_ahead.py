"""A frozen encoder's work for the next step, done in a step: the bits of steps that run the encoder, or an error."""

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
from tests.compiler import ahead_worker
from tests.compiler.ahead_worker import batch_of, compiled_for, model
from tests.compiler.features_worker import gradients
from tests.compiler.test_features import close
from tests.models.hf import llava, llava_batch, valm, valm_batch
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

Batch = dict[str, torch.Tensor]
Stepped = tuple[float, Batch]


def step(compiled: csc.CompiledModel, batch: Any, ahead: Any = None) -> Stepped:
    compiled.zero_grad()
    return float(compiled.train_step(batch, ahead=ahead)), gradients(compiled)


def same(found: Stepped, expected: Stepped) -> None:
    """To the bit."""
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def counts(compiled: csc.CompiledModel) -> tuple[float, float]:
    return compiled.metrics["features_ahead"], compiled.metrics["features_made"]


def makers(compiled: csc.CompiledModel) -> set[int]:
    """The ranks that encode."""
    assert compiled.program.plan is not None and compiled.program.plan.ahead is not None
    return {rank for rank, order in enumerate(compiled.program.plan.ahead) if order}


def valm_of(step: int) -> Batch:
    return {name: one + 0.01 * step if one.is_floating_point() else one for name, one in valm_batch(8).items()}


CASES: list[Any] = [
    ("llava", llava, batch_of, "pp=2,dp=2", 4, {}),
    long(("valm", valm, valm_of, "pp=3", 8, {"schedule": "gpipe"})),
    long(("llava", llava, batch_of, "cp=2,pp=2", 8, {})),
    long(("llava", llava, batch_of, "pp=2", 8, {"precision": "bf16"})),
    long(("llava", llava, batch_of, "pp=2,dp=2", 4, {"zero": 3, "recompute": "full"})),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_steps_are_those_of_a_program_that_runs_the_encoder(case: Any) -> None:
    name, make, batch, mesh, microbatches, options = case
    towers = ["vision_tower", "audio_tower"][: 1 + (name == "valm")]
    common = {
        "mesh": mesh, "example": batch(0), "freeze": towers, "microbatches": microbatches, "schedule": "1f1b", **options
    }  # fmt: skip
    whole, ahead = csc.compile(make(), **common), csc.compile(make(), **common, encode_ahead=True)
    assert makers(ahead)
    every = microbatches * csc.Mesh.of(mesh).dp
    same(step(ahead, batch(0)), step(whole, batch(0)))  # which is compared with eager PyTorch
    same(step(ahead, batch(1), ahead=batch(2)), step(whole, batch(1)))
    expected = step(whole, batch(2))
    same(step(ahead, batch(2), ahead=batch(3)), expected)
    assert counts(ahead)[0] >= every and counts(ahead)[1] == 0
    same(step(ahead, batch(2)), expected)
    assert counts(ahead)[1] >= every, "it is not the batch that was announced"
    same(step(ahead, batch(3)), step(whole, batch(3)))
    assert counts(ahead)[1] >= every, "what was made for a step is gone after it"


def test_weights_that_were_written_make_what_was_made_worthless() -> None:
    ahead = compiled_for("pp=2", 4, encode_ahead=True)
    step(ahead, batch_of(0))
    step(ahead, batch_of(1), ahead=batch_of(2))
    other = model()
    with torch.no_grad():
        for one in (ahead.model, other):
            for weight in one.model.vision_tower.parameters():
                weight += 0.01
    found = step(ahead, batch_of(2))
    assert counts(ahead) == (0, 4)
    options = {"mesh": "pp=2", "microbatches": 4, "freeze": ["vision_tower"], "schedule": "1f1b"}
    same(found, step(csc.compile(other, example=llava_batch(8), **options), batch_of(2)))


def test_a_loader_says_what_follows() -> None:
    ahead, whole = compiled_for("pp=2", 8, encode_ahead=True), compiled_for("pp=2", 8)
    assert makers(ahead) == {0, 1}, "what waits are too short for goes to both"
    told = []
    for number, batch in enumerate(ahead.ahead(batch_of(one) for one in range(4))):
        same(step(ahead, batch), step(whole, batch_of(number)))
        told.append(counts(ahead))
    assert told[2:] == [(8, 0)] * 2


def pictured(count: int) -> list[Batch]:
    """Samples of different length, each with other pixels."""
    whole = llava_batch(count, padded=False)
    whole["labels"] = whole["input_ids"].clone().index_fill_(1, torch.arange(12), -100)
    samples = [{name: one[i] for name, one in whole.items()} for i in range(count)]
    for i, one in enumerate(samples):
        one |= {name: one[name][: 20 - i % 5] for name in ("input_ids", "attention_mask", "labels")}
        one["pixel_values"] = one["pixel_values"] + 0.01 * i
    return samples


def rows(samples: list[Batch], width: int) -> Batch:
    """A row each, padded to the width."""

    def wide(name: str, value: int) -> torch.Tensor:
        return torch.stack([nn.functional.pad(one[name], (0, width - len(one[name])), value=value) for one in samples])

    found = {name: wide(name, -100 if name == "labels" else 0) for name in ("input_ids", "attention_mask", "labels")}
    return {**found, "pixel_values": torch.stack([one["pixel_values"] for one in samples])}


@pytest.mark.parametrize("options", [{"encode_ahead": True}, {"cache_features": True}], ids=lambda one: next(iter(one)))
@pytest.mark.long_cases("cache_features")
def test_balanced_steps_have_the_bits_of_steps_that_run_the_encoder(options: Any, tmp_path: Path) -> None:
    """Over two epochs: with features of the next step, or from disk."""
    data = pictured(24)
    if "cache_features" in options:
        options = {"cache_features": tmp_path}
    made, whole = compiled_for("pp=2", 4, **options), compiled_for("pp=2", 4)
    loader = csc.balanced(
        data, made, lengths={"tokens": [len(one["labels"]) for one in data], "images": [1] * 24}, batch_size=8,
        collate=rows, multiple=20, shuffle=True,
    )  # fmt: skip
    told = []
    for _ in range(2):
        for batch in made.ahead(loader):
            found, expected = step(made, batch), step(whole, batch)
            told.append(made.metrics)
            if "cache_features" in options and len(told) > 3:
                close(found, expected)
            else:
                same(found, expected)
    assert len(told) == 6
    if "cache_features" in options:
        assert all(one["features_made"] == 0 and one["features_read"] == 8 for one in told[3:])
    else:
        assert [one["features_ahead"] > 0 for one in told] == [False, True, True] * 2


def test_a_step_that_fails_leaves_the_next_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, whole = compiled_for("pp=2", 8, encode_ahead=True), compiled_for("pp=2", 8)
    step(ahead, batch_of(0))
    step(ahead, batch_of(1), ahead=batch_of(2))
    encode = "csc.driver.features.FrozenEncoder.encode"
    expected, ahead_of_it = step(whole, batch_of(2)), batch_of(3)

    def fails(*_: Any) -> Any:
        raise MemoryError("no room for features")

    ahead.zero_grad()
    with monkeypatch.context() as patched, pytest.raises(MemoryError) as raised:
        patched.setattr(encode, fails)
        ahead.train_step(batch_of(2), ahead=ahead_of_it)
    assert any("in rank" in note for note in raised.value.__notes__)
    assert not gradients(ahead)
    same(step(ahead, batch_of(2), ahead=ahead_of_it), expected)
    assert counts(ahead)[1] == 0, "what was there before is there still"
    same(step(ahead, batch_of(3)), step(whole, batch_of(3)))
    assert counts(ahead) == (8, 0)


def test_a_next_batch_that_cannot_be_is_said_in_its_step() -> None:
    ahead = compiled_for("pp=2", 4, encode_ahead=True)
    step(ahead, batch_of(0))
    longer = {name: torch.cat([one, one], 1) if one.dim() == 2 else one for name, one in batch_of(2).items()}
    step(ahead, batch_of(1), ahead={"pixel_values": torch.zeros(1)})
    step(ahead, batch_of(1), ahead=longer)
    step(ahead, batch_of(1))
    assert counts(ahead) == (0, 4)


def test_what_cannot_be() -> None:
    with pytest.raises(csc.InputError, match="encode_ahead=True and a frozen encoder"):
        compiled_for("pp=2", 4).train_step(batch_of(0), ahead=batch_of(1))
    with pytest.raises(csc.InputError, match="encode_ahead is 3"):
        compiled_for("pp=2", 4, encode_ahead=3)
    with pytest.raises(csc.InputError, match="cannot both be kept on disk and be made ahead"):
        compiled_for("pp=2", 4, encode_ahead=True, cache_features="features")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "case",
    [
        {"mesh": "pp=2", "local": False, "microbatches": 8, "steps": 5, "apart": 3},
        long({"mesh": "pp=2,dp=2", "local": True, "microbatches": 4, "steps": 4}),
        long({"mesh": "pp=3", "local": True, "microbatches": 8, "steps": 4}),
    ],
    ids=lambda case: case["mesh"],
)
def test_processes_give_the_bits_of_one_process(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = compiled_for(case["mesh"], case["microbatches"])
        expected = [step(whole, batch_of(number)) for number in range(case["steps"])]
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setenv("CSC_CACHE", "0")  # the first rank traces, which the others do not
    launching.ranks(ahead_worker.main, csc.Mesh.of(case["mesh"]).size, case, tmp_path)
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("result_*.json"))]
    assert sum(bool(order) for order in results[0]["orders"]) > 1, "features travel"
    for one in results:
        assert "pixel_values" in one["needs"]
        assert [loss for loss, *_ in one["told"]] == [loss for loss, _ in expected]
    read = [one["told"] for one in results if one["told"][-1][1]]
    assert read, "ranks that read features"
    for told in read:
        assert all(made == 0 for _, _, made in told[2:4]), told
        if "apart" in case:
            assert told[4][2] > 0, "what a rank made of other images serves nobody"
    for file in tmp_path.glob("gradients_*.safetensors"):
        for name, gradient in load_file(file).items():
            assert torch.equal(gradient, expected[-1][1][name]), name
