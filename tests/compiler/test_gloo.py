"""Compiled models on real processes over gloo: the gradients of eager PyTorch, or of the same mesh in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import csc
from csc.analysis.hardware import Wire, hardware, toml_text
from tests import launching
from tests.compiler import gloo_worker
from tests.compiler.gloo_models import BATCHES, MODELS
from tests.exactness import FLOAT32
from tests.tiers import long

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("traces")]


def launch(case: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Run the case on the ranks of its mesh; their results in order."""
    ranks = csc.Mesh.of(case["mesh"]).size
    launching.ranks(gloo_worker.main, ranks, case, directory)
    return [json.loads((directory / f"result_{rank}.json").read_text()) for rank in range(ranks)]


def in_process(case: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    compiled = csc.compile(
        MODELS[case["model"]](),
        mesh=case["mesh"],
        example=BATCHES[case["model"]](case["samples"]),
        freeze=case.get("freeze"),
        microbatches=case["microbatches"],
        schedule=case.get("schedule", "1f1b"),
        stages=case.get("stages"),
        placement=case.get("placement"),
        precision=case.get("precision"),
        recompute=case.get("recompute"),
        context=case.get("context"),
        hardware=case.get("hardware"),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have: reductions over threads round in another order
    try:
        loss = float(compiled.train_step(compiled.example))
    finally:
        torch.set_num_threads(threads)
    return loss, {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}


# Encoders on ranks of their own, beside each other: neither waits for the other.
PARALLEL = [
    ["vision_tower*", "vision_projector"],
    ["audio_tower*", "audio_projector"],
    ["language_model.model.embed_tokens", "merge", "language_model.model.layers.0"],
    ["language_model.model.layers.1", "language_model.model.layers.2"],
    ["language_model.model.layers.3", "language_model.model.norm", "language_model.lm_head"],
]
CASES = [
    {"model": "llava", "mesh": "pp=3", "samples": 4, "microbatches": 2, "freeze": ["vision_tower", "language_model"]},
    {"model": "llava", "mesh": "pp=2", "samples": 4, "microbatches": 4, "schedule": "zb-v"},
    {"model": "llava_long", "mesh": "cp=2,dp=2", "samples": 4, "microbatches": 2},
    {"model": "dropped", "mesh": "pp=2,dp=2", "samples": 8, "microbatches": 2, "precision": "bf16",
     "recompute": "full"},
    {"model": "packed", "mesh": "cp=2,pp=2", "samples": 4, "microbatches": 2, "schedule": "auto",
     "ahead": ["packed_otherwise", "packed", "packed_otherwise"]},
    {"model": "captions_tied", "mesh": "pp=2,dp=2", "samples": 4, "microbatches": 2},
    {"model": "llava", "mesh": "cp=2,pp=2", "samples": 2, "microbatches": 1, "context": {"vision_tower": 2},
     "freeze": ["vision_tower"]},
]  # fmt: skip
LONG = [
    {"model": "llava_long", "mesh": "cp=2,pp=2", "samples": 2, "microbatches": 1, "freeze": ["vision_tower"]},
    {"model": "captions_tied", "mesh": "pp=3", "samples": 4, "microbatches": 4},
    {"model": "llava", "mesh": "cp=2,pp=2", "samples": 2, "microbatches": 1, "context": {"vision_tower": 2}},
    {"model": "llava_lengths", "mesh": "pp=2,dp=2", "samples": 4, "microbatches": 2, "freeze": ["vision_tower"]},
    {
        "model": "valm",
        "mesh": "pp=5",
        "samples": 8,
        "microbatches": 8,
        "stages": PARALLEL,
        "schedule": "auto",
        "freeze": ["vision_tower", "audio_tower"],
    },
    {"model": "llava_tied", "mesh": "pp=2", "samples": 4, "microbatches": 2},
    {"model": "llava_tied", "mesh": "pp=2,dp=2", "samples": 4, "microbatches": 1, "freeze": ["vision_tower"]},
    {"model": "plain_long", "mesh": "cp=4", "samples": 2, "microbatches": 1},
    {"model": "llava_lengths", "mesh": "pp=2,dp=2,order=pp-dp", "samples": 4, "microbatches": 2},
    {"model": "tiles", "mesh": "pp=2", "samples": 3, "microbatches": 3},
    {"model": "valm", "mesh": "pp=5", "samples": 8, "microbatches": 8, "schedule": "auto"},
    {"model": "llava", "mesh": "pp=2", "samples": 4, "microbatches": 4, "schedule": "interleaved-1f1b"},
    {"model": "whisper", "mesh": "pp=2", "samples": 4, "microbatches": 2, "schedule": "gpipe"},
    {"model": "plain", "mesh": "pp=4", "samples": 2, "microbatches": 1},
    {"model": "valm", "mesh": "pp=5", "samples": 8, "microbatches": 8, "stages": PARALLEL},
    {"model": "packed", "mesh": "cp=4", "samples": 2, "microbatches": 2},
    {"model": "captions", "mesh": "pp=2,dp=2", "samples": 4, "microbatches": 2, "ahead": ["captions_text"]},
]


@pytest.mark.parametrize(
    "case", [*CASES, *map(long, LONG)],
    ids=lambda c: f"{c['model']}-{c['mesh']}-{c.get('schedule', '1f1b')}-{'freeze' in c}-{len(c.get('context', ()))}",
)  # fmt: skip
@pytest.mark.long_cases(
    "captions_tied-pp=2,dp=2-1f1b-False-0",
    "llava_long-cp=2,dp=2-1f1b-False-0",
    "llava-cp=2,pp=2-1f1b-True-1",
    "llava-pp=2-zb-v-False-0",
    "packed-cp=2,pp=2-auto-False-0",
)
def test_processes_give_the_bits_of_one_process(case: dict[str, Any], tmp_path: Path) -> None:
    check(case, tmp_path)


def test_ranks_divide_the_heads_where_links_are_slow(tmp_path: Path) -> None:
    """Wires of a kilobyte a second make the model choose the all-to-all over four ranks; over two it saves nothing."""
    slow = replace(hardware("cpu"), within=Wire(0.0, 1e3), between=Wire(0.0, 1e3))
    (tmp_path / "slow.toml").write_text(toml_text(slow))
    case = {
        "model": "plain_long", "mesh": "cp=4", "samples": 2, "microbatches": 1, "context": {"vision": 2, "audio": 4},
        "hardware": str(tmp_path / "slow.toml"),
    }  # fmt: skip
    assert all(result["ways"] == ["AllToAll", "KVExchange"] for result in check(case, tmp_path))


def check(case: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    """Losses, gradients and their norm from processes against those from one process; what the ranks left."""
    loss, expected = in_process(case)  # first: this process is warm, and the ranks take its program from the cache
    results = launch(case, tmp_path)
    assert {result["losses"][0] for result in results} == {loss}
    found: dict[str, torch.Tensor] = {}
    for rank in range(len(results)):
        for name, gradient in load_file(tmp_path / f"gradients_{rank}.safetensors").items():
            assert name not in found or torch.equal(found[name], gradient), f"{name} differs between its holders"
            found[name] = gradient
    assert found.keys() == expected.keys()
    mesh = csc.Mesh.of(case["mesh"])
    summed = 0 if mesh.dp * mesh.cp <= 2 else FLOAT32  # gloo adds more than two numbers in an order of its own
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():  # some gradients are zero but for rounding: a key's bias
        error, size = float((found[name] - gradient).abs().max()), float(gradient.abs().max())
        assert error <= summed * max(size, 1e-2 * largest), name
    norm = torch.stack([g.double().norm() for g in expected.values()]).norm().item()
    assert all(abs(result["norm"] - norm) <= 1e-5 * norm for result in results)
    return results


def test_another_phase_trains_on_the_weights_of_the_first(tmp_path: Path) -> None:
    """A new frozen set moves layers to other ranks; they must get what the ranks before them trained."""
    case = {
        "model": "llava", "mesh": "pp=3", "samples": 4, "microbatches": 2,
        "freeze": ["language_model"], "then_freeze": ["vision_tower"],
    }  # fmt: skip
    results = launch(case, tmp_path)
    compiled = csc.compile(
        MODELS["llava"](), mesh="pp=3", example=BATCHES["llava"](4), freeze=case["freeze"], microbatches=2
    )
    compiled.train_step(compiled.example)
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    compiled.zero_grad()
    second = compiled.with_options(freeze=case["then_freeze"])
    expected = float(second.train_step(second.example))
    for result in results:
        assert result["losses"][1] == pytest.approx(expected, rel=FLOAT32)
    saved: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "weights").glob("*.safetensors"):
        saved.update(load_file(shard))
    assert len(saved) == len(list(compiled.model.parameters())), "unused layers too"
    trained = dict(compiled.model.named_parameters())
    written = dict(type(compiled.model).from_pretrained(tmp_path / "weights").named_parameters())
    assert written.keys() == trained.keys()
    for name, tensor in written.items():
        torch.testing.assert_close(tensor.detach(), trained[name].detach(), rtol=1e-5, atol=1e-7)
