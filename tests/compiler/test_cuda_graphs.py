"""Real models with cuda_graphs=True, recorded as on a GPU (tests/recording.py): every bit is that of steps that run."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

import csc
from csc.analysis.unfit_parts import unfit_parts
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.runtime import graphed_stage
from tests.compiler.conftest import MODELS, Models
from tests.compiler.test_cli import TARGET, Run, run  # noqa: F401
from tests.recording import CpuRecorder, recorded_on_cpus
from tests.tiers import long

Step = list[tuple[str, torch.Tensor]]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CpuRecorder:
    monkeypatch.setattr(graphed_stage, "MET", 4)
    return recorded_on_cpus(monkeypatch)


def batch_of(name: str, rows: int, number: int) -> dict[str, torch.Tensor]:
    """Of the same sizes, with other values, masks and labels in each step."""
    batch = {
        entry: tensor + 0.1 * number if tensor.is_floating_point() else tensor.clone()
        for entry, tensor in MODELS[name][1](rows).items()
    }
    if "attention_mask" in batch:
        batch["attention_mask"][number % rows, -(1 + number) :] = 0
    if "labels" in batch:
        batch["labels"][(number + 1) % rows, -3 - number :] = -100
    return batch


def trained(
    compiled: CompiledModel, name: str, steps: int = 4, accumulate: int = 1, to_none: bool = True,
    evaluates: bool = False,
) -> list[Step]:  # fmt: skip
    """Losses, gradients before each step of AdamW, losses of evaluations between. The weights are as before then."""
    model, chosen = compiled.model, compiled.options
    before = {one: parameter.detach().clone() for one, parameter in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    found = []
    for number in range(steps * accumulate):
        batch = batch_of(name, 2 * chosen.microbatches * chosen.mesh.dp, number)
        step = [("loss", compiled.train_step(batch).clone())]
        step += [(one, p.grad.clone()) for one, p in model.named_parameters() if p.grad is not None]
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        if evaluates:
            step.append(("evaluation", compiled.eval_step(batch).clone()))
        found.append(step)
    with torch.no_grad():
        for one, parameter in model.named_parameters():
            parameter.copy_(before[one])
    model.zero_grad()
    return found


def compare(models: Models, name: str, options: dict[str, Any], **how: Any) -> CompiledModel:
    """The one that records."""
    expected = trained(models(name, **options), name, **how)
    compiled = models(name, cuda_graphs=True, **options)
    for number, (step, right) in enumerate(zip(trained(compiled, name, **how), expected, strict=True)):
        assert [one for one, _ in step] == [one for one, _ in right]
        assert [one for (one, a), (_, b) in zip(step, right) if not torch.equal(a, b)] == [], number
        assert not any(tensor.isnan().any() for _, tensor in step)
    return compiled


CASES = [
    ("text", {"mesh": "pp=2", "microbatches": 4, "schedule": "zb-h1"}, {"to_none": False, "evaluates": True}),
    long("text", {"mesh": "pp=1", "microbatches": 4}, {}),
    long("text", {"mesh": "pp=2", "microbatches": 4, "schedule": "zb-v", "chunks": 2}, {}),
    long("text", {"mesh": "pp=2,dp=2", "microbatches": 4, "schedule": "1f1b"}, {"accumulate": 2, "to_none": False}),
    long("text", {"mesh": "dp=2", "zero": 2, "microbatches": 4}, {}),
    long("llava", {"mesh": "pp=1", "microbatches": 2, "freeze": ["vision_tower"]}, {"steps": 5}),
    long("llava", {"mesh": "pp=2", "microbatches": 4, "schedule": "zb-h1", "freeze": ["vision_tower"]},
         {"evaluates": True}),
    long("llava", {"mesh": "pp=2", "microbatches": 4, "schedule": "1f1b", "recompute": "full"}, {}),
    long("llava_tied", {"mesh": "pp=2", "microbatches": 4, "schedule": "1f1b", "recompute": "selective"}, {}),
    long("llava_tied", {"mesh": "pp=2", "microbatches": 4, "schedule": "zb-h1", "loss_chunk": 8}, {}),
    long("llava_lora", {"mesh": "pp=2", "microbatches": 4}, {}),
    long("llava", {"mesh": "pp=2", "microbatches": 4, "precision": "bf16"}, {}),
    long("whisper", {"mesh": "pp=2", "microbatches": 4}, {}),
    long("packed", {"mesh": "pp=2", "microbatches": 4}, {}),
    long("mixed", {"microbatches": 4}, {"accumulate": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "how"), CASES, ids=str)
def test_the_bits_are_those_of_steps_that_run(
    models: Models, recorder: CpuRecorder, name: str, options: dict[str, Any], how: dict[str, Any]
) -> None:
    compare(models, name, options, **how)
    assert len(recorder.launches) >= 2 and max(recorder.launches) > 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mesh": "tp=2"}, "it meets other ranks"),
        long({"mesh": "cp=2"}, "it meets other ranks"),
        long({"mesh": "dp=2", "zero": 3}, "its parameters are made whole for each microbatch (zero=3)"),
    ],
    ids=str,
)
def test_what_runs_as_it_is_says_why(
    models: Models, recorder: CpuRecorder, caplog: pytest.LogCaptureFixture, options: dict[str, Any], why: str
) -> None:
    """In the log, and ahead of it in what `csc explain` shows."""
    compiled = compare(models, "text", {"microbatches": 4, **options}, steps=2)
    assert not recorder.launches and f"runs as it is: {why}" in caplog.text
    parts = unfit_parts(compiled.program, compiled.options.mesh)
    assert {part.stage for part in parts} == {stage.index for stage in compiled.program.stages}
    assert {(part.part, part.why) for part in parts} == {("F", why)}


def test_dropout_is_found_ahead(recorder: CpuRecorder, caplog: pytest.LogCaptureFixture) -> None:
    from tests.compiler import small

    model = small.Dropped()
    compiled = csc.compile(model, example=small.text_batch(8), microbatches=4, cache=False, cuda_graphs=True)
    for _ in range(2):
        compiled.train_step(small.text_batch(8))
    assert not recorder.launches and "it draws random numbers, and a replay would draw the same" in caplog.text
    assert "csc::dropout: a replay would draw the same" in unfit_parts(compiled.program, compiled.options.mesh)[0].why


def test_a_cpu_skips_it(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "csc"):
        models("text", cuda_graphs=True).train_step(batch_of("text", 2, 0))
    assert "cuda_graphs: skipped, as there are none on a device of type cpu" in caplog.text


def test_the_option(models: Models) -> None:
    compiled = models("text")
    assert not compiled.options.cuda_graphs and compiled.with_options(cuda_graphs=True).options.cuda_graphs
    with pytest.raises(InputError, match="cuda_graphs is 'yes'"):
        compiled.with_options(cuda_graphs="yes")
    with pytest.raises(InputError, match="mode='reduce-overhead'"):
        csc.compile(compiled.model, mode="reduce-overhead")


@pytest.mark.long
def test_explain_says_what_is_not_recorded(run: Run) -> None:  # noqa: F811
    done = run("explain", TARGET, "--json", "--cuda-graphs")
    assert done.code == 0 and json.loads(done.out)["unrecorded"] == []
    assert "nothing speaks against recording the 3 stages" in run("explain", TARGET, "--cuda-graphs").out
