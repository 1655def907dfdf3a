"""The compiled step against eager PyTorch: the loss and every gradient, for every frozen set and number of stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from csc.reports.verification import Verification, verify
from tests.compiler.conftest import MODELS, Models
from tests.exactness import FLOAT32
from tests.models import hf, plain
from tests.tiers import long

# name -> (model, frozen components, how many parameters get a gradient)
LLAVA: dict[str, tuple[str, list[str] | None, int]] = {
    "all trainable": ("llava", None, 80),
    "encoder frozen": ("llava", ["vision_tower"], 43),
    "LLM frozen": ("llava", ["language_model"], 41),
    "projector only": ("llava", ["vision_tower", "language_model"], 4),
    "LoRA": ("llava_lora", None, 24),
    "tied": ("llava_tied", None, 79),
    "tied, encoder frozen": ("llava_tied", ["vision_tower"], 42),
}


def check(result: Verification, tolerance: float, gradients: int | None = None) -> None:
    """Every gradient of eager is there and none besides; bit for bit if the tolerance is 0."""
    assert result.params_missing == ()
    assert result.params_unexpected == ()
    assert result.params_checked > 0
    if gradients is not None:
        assert result.params_checked == gradients
    if tolerance == 0:
        assert (result.loss_rel, result.grad_rel_max, result.bit_equal) == (0, 0, result.params_checked)
    assert result.loss_rel <= tolerance
    assert result.grad_rel_max <= tolerance


def capture_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is has to do: captured here, or by another process of this run, which kept it."""

    def captured_again(*_: Any) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr("csc.driver.compiler.capture", captured_again)


@contextmanager
def training_only(model: nn.Module, wanted: Any) -> Iterator[int]:
    """Set requires_grad to `wanted(name)` within the block; gives how many parameters train."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        for name, p in model.named_parameters():
            p.requires_grad_(wanted(name))
        yield sum(p.requires_grad for p in model.parameters())
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(before[name])


# The captures of these take long; tied weights and partial freezing are in the fast tier with the plain model.
SLOW = ("LoRA", "tied", "tied, encoder frozen")
# Eager multiplies by this matrix with another kernel when it is frozen (tests/exactness.py), so it trains with the rest
# where bits are compared.
SLICED = "model.multi_modal_projector.linear_1.weight"


@pytest.mark.parametrize("stages", [1, long(2), 3, long(4)])
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in LLAVA])
@pytest.mark.long_cases("LoRA-1", "LoRA-3")
def test_llava_has_eager_gradients_bit_for_bit(models: Models, case: str, stages: int) -> None:
    """But for LoRA, which freezes all matrices."""
    name, freeze, gradients = LLAVA[case]
    check(verify(models(name, mesh={"pp": stages}, freeze=freeze)), FLOAT32 if case == "LoRA" else 0, gradients)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", ["all trainable", "projector only"])
def test_microbatches_with_unequal_label_counts(models: Models, case: str, schedule: str) -> None:
    name, freeze, gradients = LLAVA[case]
    compiled = models(name, mesh="pp=3", freeze=freeze, microbatches=2, schedule=schedule)
    labels = (compiled.example["labels"] != hf.IGNORED).sum(dim=1)
    assert labels[:2].sum() != labels[2:].sum(), "the batch is to have unequal microbatches"
    check(verify(compiled), FLOAT32, gradients)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_data_parallel(models: Models, mesh: str) -> None:
    name, freeze, gradients = LLAVA["encoder frozen"]
    check(verify(models(name, mesh=mesh, freeze=freeze)), FLOAT32, gradients)


def test_data_parallel_with_microbatches(models: Models) -> None:
    check(verify(models("llava", mesh="dp=2,pp=3", microbatches=2)), FLOAT32, 80)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [long(1), 3])
def test_bfloat16_is_bit_equal(models: Models, stages: int) -> None:
    check(verify(models("llava_bf16", mesh={"pp": stages})), 0, 80)


PLAIN = {
    "all trainable": None,
    "encoders frozen": ["vision", "audio"],
    "projectors only": ["vision", "audio", "language", "head"],
    "language frozen": ["language", "head"],
    "cross-attention only": [
        "vision*", "audio*", "deep*", "head*", "*.mlp.*", "*.attention.*", "*norm.*", "*positions*", "*embed*",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stages", [long(1), long(3), 4])
@pytest.mark.parametrize("case", PLAIN)
def test_plain_model_with_every_wiring(models: Models, case: str, stages: int) -> None:
    check(verify(models("plain", mesh={"pp": stages}, freeze=PLAIN[case])), FLOAT32)


@pytest.mark.parametrize("name", ["plain", long("plain_untied")])
def test_plain_model_in_microbatches_on_replicas(models: Models, name: str) -> None:
    check(verify(models(name, mesh="pp=4,dp=2", microbatches=2)), FLOAT32)


def test_cross_attention_only_trains_cross_attention(models: Models) -> None:
    compiled = models("plain", freeze=PLAIN["cross-attention only"])
    trained = {p.name for p in compiled.program.parameters if p.trainable}
    assert trained == {n for n, _ in compiled.model.named_parameters() if ".cross." in n}


WHISPER = {
    "all trainable": None,
    "encoder frozen": ["audio_tower"],
    "LLM frozen": ["language_model"],
    "projector only": ["audio_tower", "language_model"],
}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [long(1), 3])
@pytest.mark.parametrize("case", WHISPER)
@pytest.mark.long_cases("all trainable-3")
def test_whisper_and_llama(models: Models, case: str, stages: int) -> None:
    check(verify(models("whisper", mesh={"pp": stages}, freeze=WHISPER[case])), FLOAT32)


@pytest.mark.slow
def test_whisper_in_microbatches(models: Models) -> None:
    check(verify(models("whisper", mesh="pp=3", freeze=["audio_tower"], microbatches=2)), FLOAT32)


def test_norms_only_by_freezing_the_rest(models: Models) -> None:
    rest = ["*_proj.*", "*.linear_?.*", "*.fc?.*", "*embed*", "lm_head.*"]
    compiled = models("llava", mesh="pp=3", freeze=rest)
    trained = {p.name for p in compiled.program.parameters if p.trainable}
    assert trained == {n for n, _ in compiled.model.named_parameters() if "norm" in n or "layrnorm" in n}
    check(verify(compiled), FLOAT32)


@pytest.mark.parametrize("ending", [".bias", "input_layernorm.weight"])
def test_biases_or_norms_only_by_requires_grad(models: Models, ending: str) -> None:
    compiled = models("llava", mesh="pp=3")
    with training_only(compiled.model, lambda name: name.endswith(ending) or name == SLICED) as trained:
        assert sum(p.trainable for p in compiled.program.parameters) == trained > 0
        check(verify(compiled), 0)


def test_every_second_parameter(models: Models) -> None:
    compiled = models("llava", mesh="pp=4")
    names = [name for name, _ in compiled.model.named_parameters()]
    with training_only(compiled.model, lambda name: (names.index(name) - names.index(SLICED)) % 2 == 0):
        check(verify(compiled), 0)


@pytest.mark.slow
@pytest.mark.parametrize("length", [17, long(27), 40])
@pytest.mark.long_cases("40")
def test_another_sequence_length_uses_the_same_capture(
    models: Models, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = models("llava", mesh="pp=2", freeze=["vision_tower"])
    verify(compiled)
    capture_no_more(monkeypatch)
    check(verify(compiled, hf.llava_batch(length=length)), 0, 43)


@pytest.mark.slow
def test_another_length_of_the_plain_model(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = models("plain", mesh="pp=3")
    verify(compiled)
    capture_no_more(monkeypatch)
    check(verify(compiled, plain.plain_batch(length=17)), FLOAT32)


@pytest.mark.slow
def test_a_new_frozen_set_traces_nothing(models: Models) -> None:
    first = models("llava", mesh="pp=2")
    joint = {name: template.joint for name, template in first.program.templates.items()}
    captures, traced = list(first.compiler.captures), list(first.compiler.traced)
    for freeze in (["vision_tower"], ["vision_tower", "language_model"], ["*.bias"]):
        changed = models("llava", mesh="pp=3", freeze=freeze)
        templates = changed.program.templates
        assert templates.keys() == joint.keys()
        assert all(templates[name].joint is graph for name, graph in joint.items())
    assert (list(first.compiler.captures), list(first.compiler.traced)) == (captures, traced)


def test_requires_grad_changed_after_the_capture_counts(models: Models) -> None:
    compiled = models("llava", mesh="pp=2")
    captures = list(compiled.compiler.captures)
    with training_only(compiled.model, lambda name: "multi_modal_projector" in name):
        check(verify(compiled), 0, 4)
    assert list(compiled.compiler.captures) == captures


@pytest.mark.slow
def test_gradients_accumulate_and_are_cleared(models: Models) -> None:
    """`.grad` behaves as autograd's does: a second step adds, zero_grad clears."""
    compiled = models("text", mesh="pp=2")
    batch = MODELS["text"][1](2)
    compiled.train_step(batch)
    once = {name: p.grad.clone() for name, p in compiled.named_parameters()}
    compiled.train_step(batch)
    assert all((p.grad == 2 * once[name]).all() for name, p in compiled.named_parameters())
    compiled.zero_grad()
    assert all(p.grad is None for p in compiled.parameters())


@pytest.mark.slow
def test_another_loss_weight_is_not_taken_from_the_kept_trace(models: Models) -> None:
    """Equal weights are wrong for unequal label counts, and must be what the program does if asked for."""
    compiled = models("llava")
    assert compiled.program.loss_weight == "tokens"
    equal = compiled.with_options(loss_weight="mean", microbatches=2)
    assert equal.program.loss_weight == "mean"
    assert verify(equal).loss_rel > 1e-4
    assert verify(compiled.with_options(microbatches=2)).loss_rel <= FLOAT32
