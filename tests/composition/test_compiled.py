"""Composed models compiled: loss and every gradient against eager, for each family and each kind of projector."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import csc
from csc.analysis.explain import explain
from csc.errors import InputError
from csc.reports.verification import Verification, verify
from tests.exactness import FLOAT32
from tests.models.composed import ENCODERS, LANGUAGE_MODELS, Resampler, batch, composed, valm
from tests.tiers import long


def checked(compiled: csc.CompiledModel) -> Verification:
    """Verified on the example; every gradient is there, and eager's but for rounding."""
    result = verify(compiled)
    assert not result.params_missing and not result.params_unexpected
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32
    return result


# Every encoder, every language model and every kind of projector at least once: (encoder, LLM, projector, options).
CASES: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "clip-llama-mlp": ("clip", "llama", "mlp", {"feature_layer": -2, "keep_prefix": True}),
    "siglip-qwen2-linear": ("siglip", "qwen2", "linear", {}),
    "dinov2-qwen3-pixel-shuffle": ("dinov2", "qwen3", "pixel-shuffle-mlp", {}),
    "vit-mistral-own": ("vit", "mistral", Resampler(), {}),
    "whisper-gemma-stack": ("whisper", "gemma", "stack-mlp", {}),
    "clip-gemma3-pixel-shuffle": ("clip", "gemma3", {"kind": "pixel-shuffle-mlp", "factor": 4}, {}),
}

OFTEN = {"dinov2-qwen3-pixel-shuffle", "whisper-gemma-stack"}  # one that sees, one that hears


def test_the_cases_leave_nothing_out() -> None:
    assert {case[0] for case in CASES.values()} == set(ENCODERS)
    assert {case[1] for case in CASES.values()} == set(LANGUAGE_MODELS)
    kinds = {case[2]["kind"] if isinstance(case[2], dict) else case[2] for case in CASES.values()}
    assert kinds >= {"linear", "mlp", "pixel-shuffle-mlp", "stack-mlp"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case if case in OFTEN else long(case) for case in CASES])
@pytest.mark.long_cases("dinov2-qwen3-pixel-shuffle")
def test_gradients_are_those_of_eager(case: str) -> None:
    """All in training, then the projector alone, on two ranks."""
    encoder, language_model, projector, options = CASES[case]
    model = composed({"vision": encoder}, {"vision": projector}, language_model, **options)
    compiled = csc.compile(model, mesh="pp=2", example=batch(model))
    assert checked(compiled).params_checked > 40
    alone = checked(compiled.with_options(freeze=["vision_encoder", "language_model"]))
    assert set(alone.grad_rel) == {f"vision_projector.{name}" for name, _ in model.vision_projector.named_parameters()}


@pytest.mark.slow
def test_vision_audio_and_text_on_three_ranks() -> None:
    """Components have the names of the modalities; encoders are frozen by them; microbatches of unequal labels."""
    model = valm()
    compiled = csc.compile(
        model, mesh="pp=3", example=batch(model, 4), microbatches=2, freeze=["vision_encoder", "audio_encoder"]
    )
    checked(compiled)
    rows, _ = explain(compiled.program)
    expected = {"vision_encoder", "vision_projector", "audio_encoder", "audio_projector", "language_model"}
    assert {row.component for row in rows} == expected | {"ComposedModel"}
    trained = {row.component for row in rows if row.trainable}
    assert trained == {"vision_projector", "audio_projector", "language_model"}
    _a_batch_that_does_not_fit(compiled)


def _a_batch_that_does_not_fit(compiled: csc.CompiledModel) -> None:
    """The compiled step has no decision that depends on data: the check runs before it, and leaves gradients alone."""
    compiled.train_step(compiled.example)
    before = {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}
    wrong = {name: tensor.clone() for name, tensor in compiled.example.items()}
    wrong["input_ids"][3, 1] = 7
    with pytest.raises(InputError, match="sample 3 needs 4 placeholders for 'vision'"):
        compiled.train_step(wrong)
    assert before
    assert all(torch.equal(p.grad, before[name]) for name, p in compiled.named_parameters() if name in before)


@pytest.mark.slow
def test_slots_that_are_empty_and_tokens_spread_over_ranks() -> None:
    model = composed({"vision": "clip"}, {"vision": "linear"})
    given = batch(model, 2, slots=2)
    given["pixel_values"][0, 1] = 0
    given["input_ids"][0, 17:33] = 7
    compiled = csc.compile(model, mesh="pp=2", example=given)
    checked(compiled)
    checked(compiled.with_options(mesh="pp=2,cp=2"))


@pytest.mark.slow
def test_a_batch_of_text_alone() -> None:
    model = valm()
    given = {name: tensor for name, tensor in batch(model).items() if name not in model.inputs.values()}
    given["input_ids"] = given["input_ids"].clamp(max=90)
    result = checked(csc.compile(model, mesh="pp=2", example=given))
    assert result.grad_rel and all(name.startswith("language_model.") for name in result.grad_rel)


@pytest.mark.slow
def test_another_length_needs_no_new_capture() -> None:
    model = composed({"vision": "clip"}, {"vision": "mlp"})
    compiled = csc.compile(model, mesh="pp=2", example=batch(model), freeze=["vision_encoder"])
    longer = batch(model, text=13)
    result = verify(compiled, longer)
    assert not result.params_missing and result.grad_rel_max <= FLOAT32
    assert len(compiled.compiler.captures) == 1
